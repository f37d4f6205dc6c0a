"""benchmarks/ampere_peers.py without a GPU: problems, candidates, the choice within limits, the run and its table."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from figures.rival_files import ampere_means
from pages.rival_tables import AMPERE, NOT_MEASURED, each_table

from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Timing
from outblas.core.problem import Problem
from outblas.kernels.geometry import geometry
from outblas.kernels.legality import why_illegal
from support.gpus.known import H100

LIMIT = {"163": 163 * 1024, "99": 99 * 1024}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module


def timing(us: float) -> Timing:
    return Timing("offline", tuple(us * f for f in (0.99, 1.0, 1.01)), us, 0.01)


def test_a_quarter_of_the_problems_has_few_rows_and_the_square_one_is_there(modules: Any) -> None:
    script = modules("ampere_peers")
    problems = script.drawn(60)
    assert len(set(problems)) == len(problems) == 60 and Problem(4096, 4096, 4096) in problems
    assert sum(problem.m <= 64 for problem in problems) == 15 and problems == script.drawn(60)
    both = script.with_both_accumulators(problems)
    assert len(set(both)) == 120 and {p.acc for p in both[60:]} == {"fp16"}
    for count in (7, 1000):
        with pytest.raises(UsageError):
            script.drawn(count)


@pytest.mark.parametrize("acc", ["fp32", "fp16"])
def test_candidates_and_instances_fit_both_limits(modules: Any, acc: Any) -> None:
    problem = Problem(64, 4096, 16384, acc=acc)
    ours = modules("ampere_peers").our_candidates(problem, H100)
    sizes = [geometry(problem, config).smem_bytes for config in ours]
    assert {config.family for config in ours} == {"sm80_pipelined_gemm"} and max(sizes) <= LIMIT["163"]
    assert 24 <= len(set(ours)) == len(ours) <= 48 and sum(size <= LIMIT["99"] for size in sizes) >= 24
    assert not any(why_illegal(problem, config, H100) for config in ours)
    instances = modules("rivals.cutlass_instances").cutlass_instances(acc)
    assert len({i.name for i in instances}) == len({i.kernel().name for i in instances}) == len(instances) >= 20
    assert all(i.shared_bytes <= LIMIT["163"] for i in instances)
    assert sum(i.shared_bytes <= LIMIT["99"] for i in instances) >= 20
    ragged = modules("rivals.ampere_rows").RAGGED[acc]
    assert all(i.kernel().launch.why_not(ragged, H100) is None for i in instances)
    assert all(ragged.m % i.tile[0] and ragged.n % i.tile[1] and ragged.k % i.tile[2] for i in instances)


class FakeClock:
    """Drops what is over 1.5 x the fastest, as a quick pass does; ``lost`` cannot be captured."""

    def __init__(self, us: dict[str, float], lost: str = "") -> None:
        self.us, self.lost, self.passes = us, lost, 0

    def quick(self, kernels: dict[str, Any], skip: Any) -> dict[str, Timing]:
        self.passes += 1
        captured = [name for name in kernels if name != self.lost]
        for name in captured:
            kernels[name].shared_bytes = kernels[name].size
        most = 1.5 * min((self.us[name] for name in captured), default=0.0)
        return {name: timing(self.us[name]) for name in captured if self.us[name] <= most}


def test_the_fastest_within_a_limit_is_chosen_though_larger_ones_are_much_faster(modules: Any) -> None:
    sizes = {"large": 150_000, "middle": 120_000, "small": 90_000, "smaller": 80_000, "lost": 1}
    kernels = {name: SimpleNamespace(size=size, shared_bytes=0) for name, size in sizes.items()}
    clock, refused = FakeClock({"large": 10.0, "middle": 9.0, "small": 30.0, "smaller": 31.0}, "lost"), {}
    times = modules("rivals.ampere_rows").QuickTimes(clock, kernels, refused)
    assert times.fastest(LIMIT["163"]) == "middle" and clock.passes == 1
    assert times.fastest(LIMIT["99"]) == "small" and clock.passes == 2
    assert times.fastest(70_000) is None and list(refused) == ["lost"]


def test_a_rival_counts_only_within_the_limit(modules: Any) -> None:
    us = {"ours_163": 10.0, "ours_99": 12.0, "cutlass_163": 11.0, "cutlass_99": 11.0, "cuda_l2": 15.0}
    shared = {"cutlass_163": 90_000, "cutlass_99": 90_000, "cuda_l2": 120_000}
    found = modules("rivals.ampere_rows").ratios({name: timing(t) for name, t in us.items()}, shared)
    assert {limit: sorted(each) for limit, each in found.items()} == {"163": ["cuda_l2", "cutlass"], "99": ["cutlass"]}
    assert found["163"]["cuda_l2"]["ratio"] == pytest.approx(1.5)
    assert found["99"]["cutlass"]["ratio"] == pytest.approx(11 / 12)


def row(problem: Problem, over_cutlass: float, over_cuda_l2: float | None) -> dict[str, Any]:
    def figure(ratio: float) -> dict[str, Any]:
        return {"baseline": "x", "ratio": ratio, "low": 0.99 * ratio, "high": 1.01 * ratio}

    large = {"cutlass": figure(over_cutlass)}
    if over_cuda_l2:
        large["cuda_l2"] = figure(over_cuda_l2)
    refused = {} if over_cuda_l2 else {"cuda_l2": "wrong"}
    return {"problem": problem.key, "ratios": {"163": large, "99": {"cutlass": figure(0.5)}}, "refused": refused}


def test_an_interrupted_run_resumes_and_its_file_becomes_the_table(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, asked = modules("ampere_peers"), []
    instances = {"fp32": {"x": "built"}, "fp16": {"x": "built"}}
    monkeypatch.setattr(script, "carried_instances", lambda folder: instances)
    monkeypatch.setattr(script, "our_cubins", lambda problem, gpu: ([], {"slow": "it spills"}))
    monkeypatch.setattr("outblas.runtime.device.gpu_of_device", lambda index: H100)
    provenance = {"gpu": "NVIDIA H100", "date": "2026-01-02T03:04", "commit": "0123456789"}
    monkeypatch.setattr(modules("rivals.peer_arguments"), "collect_provenance", lambda command: provenance)

    def rows_of(requests: Any, factory: str, args: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
        assert factory == "rivals.ampere_rows:make_handler" and args[1:] == (H100, instances)
        for request in requests:
            asked.append(request.problem)
            assert request.refused == {"slow": "it spills", "cuda_l2": "not compiled"}
            if len(asked) == 3:
                raise KeyboardInterrupt
            square = request.problem.m == request.problem.n == request.problem.k == 4096
            lost = {"problem": request.problem.key, "lost": "hang: no answer"}
            yield lost if request.problem.m == 16384 else row(request.problem, 0.9 if square else 1.2, 1.5)

    monkeypatch.setattr(script, "rows_of", rows_of)
    out = tmp_path / "h100" / AMPERE.name
    arguments = ["measure", "--out", str(out), "--count", "8", "--carried", str(tmp_path), "--cutlass", "4.2.0"]
    assert each_table(tmp_path, AMPERE) == NOT_MEASURED
    with pytest.raises(KeyboardInterrupt):
        script.main(arguments)
    assert not out.exists()
    script.main(arguments)
    assert len(asked) == 17 and len(set(asked)) == 16, "finished rows are not measured again"
    data = json.loads(out.read_text())
    assert data["format"] == AMPERE.form and data["instances"] == {"fp32": 1, "fp16": 1} and len(data["rows"]) == 16
    assert "163 KiB, sums in fp16" in capsys.readouterr().out
    text = each_table(tmp_path, AMPERE)
    assert "| 163 KiB (A100) | fp32 | CUDA-L2's A100 kernel |" in text and "1.10×" in text
    assert "On 4096_4096_4096 with fp16 sums it has 0.900× the speed of the fastest CUTLASS 2.x" in text
    assert "Not timed, because a kernel ended the process: 16384" in text
    assert "NVIDIA H100, CUTLASS 4.2.0, 2026-01-02, commit 0123456." in text


def test_means_are_of_one_limit_and_accumulator(tmp_path: Path) -> None:
    rows = [row(Problem(64, 64, 64), 1.0, 2.0), row(Problem(64, 64, 128), 4.0, None)]
    rows.append(row(Problem(64, 64, 64, acc="fp16"), 3.0, 1.0))
    found = {(limit, acc, rival): mean for limit, acc, rival, mean in ampere_means(rows)}
    assert found["163", "fp32", "cutlass"] == pytest.approx((2.0, 2, 1))
    assert found["163", "fp32", "cuda_l2"] == pytest.approx((2.0, 1, 1))
    assert found["163", "fp16", "cutlass"].ratio == pytest.approx(3.0)
    assert found["99", "fp32", "cutlass"] == pytest.approx((0.5, 2, 0)) and ("99", "fp32", "cuda_l2") not in found
    (tmp_path / "h100").mkdir()
    for data in ({"format": "x"}, {"format": AMPERE.form, "rows": []}):
        (tmp_path / "h100" / AMPERE.name).write_text(json.dumps(data))
        with pytest.raises(RecordError):
            each_table(tmp_path, AMPERE)
