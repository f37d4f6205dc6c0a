"""benchmarks/cuda_l2.py without a GPU: its problems, its requests, the run and its table."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages.rival_tables import CUDA_L2, NOT_MEASURED, each_table

from outblas.core.evaluation import Timing
from support.gpus.known import H100, H200


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module


def timing(us: float) -> Timing:
    return Timing("offline", tuple(us * f for f in (0.99, 1.0, 1.01)), us, 0.01)


def test_ratios_are_of_the_pairs_that_were_timed(modules: Any) -> None:
    ratios = modules("rivals.cuda_l2_rows").ratios
    found = ratios({"ours": timing(10.0), "torch": timing(20.0), "lt_auto": timing(12.0), "cuda_l2": timing(15.0)})
    assert {name: round(each["ratio"], 3) for name, each in found.items()} == {
        "ours_over_cuda_l2": 1.5, "cuda_l2_over_lt_auto": 0.8, "cuda_l2_over_torch": 1.333, "ours_over_lt_auto": 1.2,
        "ours_over_torch": 2.0,
    }  # fmt: skip
    fallen = ratios({"ours": timing(2.1), "torch": timing(2.0), "lt_auto": timing(1.0), "cuda_l2": timing(4.2)})
    assert fallen["ours_over_cuda_l2"]["ratio"] == pytest.approx(2.0), "by its own time, not that of the faster rival"
    alone = ratios({"ours": timing(1.0), "torch": timing(1.0), "lt_auto": timing(1.0)})
    assert sorted(alone) == ["ours_over_lt_auto", "ours_over_torch"]


def test_the_host_clock_waits_for_the_last_calls_whose_operands_may_then_be_freed(modules: Any) -> None:
    seen: list[str] = []
    modules("host_cost").measure(
        {"ours": lambda: seen.append("call")}, 4, lambda on: None, lambda: seen.append("wait"), block=2
    )
    assert seen[-1] == "wait" and seen.count("call") > 4


def test_a_gpu_without_a_library_takes_the_rows_of_the_h200(modules: Any) -> None:
    script = modules("cuda_l2")
    library = script.our_library(replace(H100, name="h100-pcie"))
    assert library.gpu == "h100-pcie" and library.rows == script.our_library(H200).rows and library.rows


def test_facts_are_those_of_text_and_machine_code(modules: Any) -> None:
    request = modules("rivals.row_worker").RowRequest
    problem = modules("cuda_l2").drawn(1, 0)[0]
    cubin = SimpleNamespace(facts=SimpleNamespace(accumulators=("fp16",)))
    kernel = SimpleNamespace(problem=problem, padded=replace(problem, m=96), waits=True)
    facts = modules("rivals.cuda_l2_rows").facts
    assert facts(request(problem, (), (kernel, SimpleNamespace(cubin=cubin)))) == {
        "claimed": "fp32", "accumulators": ["fp16"], "waits": True, "padded": replace(problem, m=96).key,
    }  # fmt: skip
    assert facts(request(problem)) is None
    sums = modules("rivals.cuda_l2_rows").sums
    for found, its in ((("fp16",), "fp16"), (("fp32",), "fp32"), (("fp16", "fp32"), "fp32"), ((), "fp32")):
        built = SimpleNamespace(cubin=SimpleNamespace(facts=SimpleNamespace(accumulators=found)))
        assert sums(request(problem, (), (kernel, built))) == its
    assert sums(request(problem)) == "fp32"


def test_the_run_takes_the_layout_of_the_kernel_and_its_file_becomes_the_table(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = modules("cuda_l2")
    problems = script.drawn(4, 0)
    assert script.drawn(4, 0) == problems != script.drawn(4, 1)

    class Builds:
        def __init__(self, folder: Path, gpu: Any) -> None:
            assert folder == tmp_path

        def get(self, whose: str, problem: Any) -> Any:
            if problem == problems[0]:
                return "not compiled: nvcc refuses it"
            layout = "NN" if problem == problems[1] else "TN"
            return SimpleNamespace(problem=replace(problem, layout=layout)), "built"

    def rows_of(requests: Any, factory: str, args: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
        assert factory == "rivals.cuda_l2_rows:make_handler"
        assert {row.problem for row in args[2].rows} <= {replace(p, layout=x) for p in problems for x in ("TN", "NN")}
        for index, request in enumerate(requests):
            assert request.ours == [("ours of", request.problem)]
            us = {"ours": 10.0, "torch": 15.0, "lt_auto": 12.0, **({"cuda_l2": 20.0} if request.theirs else {})}
            kernel = {
                "claimed": "fp32",
                "accumulators": [["fp32"], ["fp16"], []][index % 3],
                "waits": True,
                "padded": None,
            }
            yield {
                "problem": request.problem.key,
                "us": us,
                "host_us": {name: 2.0 for name in us},
                "ratios": modules("rivals.cuda_l2_rows").ratios({name: timing(t) for name, t in us.items()}),
                "kernel": kernel if request.theirs else None,
                "refused": request.refused,
            }

    monkeypatch.setattr(script, "CudaL2Builds", Builds)
    monkeypatch.setattr(script, "rows_of", rows_of)
    monkeypatch.setattr(script, "our_kernel", lambda problem, library, gpu: [("ours of", problem)])
    monkeypatch.setattr("outblas.runtime.device.gpu_of_device", lambda index: H100)
    provenance = {"gpu": "NVIDIA H100", "date": "2026-01-02T03:04", "commit": "0123456789"}
    monkeypatch.setattr(modules("rivals.peer_arguments"), "collect_provenance", lambda command: provenance)
    out = tmp_path / "h100" / CUDA_L2.name
    assert each_table(tmp_path, CUDA_L2) == NOT_MEASURED
    script.main(["measure", "--count", "4", "--out", str(out), "--carried", str(tmp_path), "--cutlass", "4.2.1"])
    keys = [found["problem"] for found in json.loads(out.read_text())["rows"]]
    assert keys == [p.key for p in (problems[0], replace(problems[1], layout="NN"), *problems[2:])]
    assert "sums as claimed: ours over cuda l2: 2.000x on 2 problems" in capsys.readouterr().out
    text = each_table(tmp_path, CUDA_L2)
    assert "| as claimed | OutBLAS / CUDA-L2 | 2 | 2.000× | 2 |" in text
    assert "| others | OutBLAS / CUDA-L2 | 1 | 2.000× | 1 |" in text and "CUDA-L2 / torch | 1 | 0.750× | 0 |" in text
    assert "| ---: |\n| as claimed |" in text, "the lines of a table follow each other"
    assert "According to their machine code, of 3 kernels 1 accumulate in fp16 where CUDA-L2 claims fp32." in text
    assert "3 wait for the GPU" in text
    assert "1 builds or proofs failed: `cuda_l2` on 1." in text and "cuda_l2 2.00 µs" in text


def test_compile_needs_the_checkout(modules: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cuda_l2", "ampere_peers"):
        with pytest.raises(SystemExit):
            modules(name).main(["compile"])
        assert "--checkout" in capsys.readouterr().err
