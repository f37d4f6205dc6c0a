"""Results of benchmarks/free_kernels.py and benchmarks/cutlass_peer.py from given measurements, and the note."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from figures.rival_files import cutlass_means
from pages.notes import CUTLASS

from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas_lab.custom.examples.example_kernels import example
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.evaluation_file import load
from support.gpus.known import H200


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module


def row(cutlass: float | None, ours: float | None, over: float = 1.5) -> dict[str, Any]:
    def figure(ratio: float | None) -> dict[str, Any] | None:
        return None if ratio is None else {"baseline": "lt_auto", "ratio": ratio, "low": ratio, "high": ratio}

    found = {"cutlass": figure(cutlass), "ours": figure(ours)}
    return found if cutlass is None else {**found, "ours_over_cutlass": figure(over)}


def test_orders_agree_but_for_ties(scripts: Any) -> None:
    contradictions = scripts("free_kernels").contradictions
    recorded = {
        "a": Speedup("lt_auto", 1.0, 0.98, 1.02),
        "b": Speedup("lt_auto", 0.97, 0.96, 0.99),
        "c": Speedup("lt_auto", 0.5, 0.49, 0.51),
    }
    same = {"a": (10.0, 9.9, 10.1), "b": (10.3, 10.2, 10.4), "c": (20.0, 19.0, 21.0)}
    assert contradictions(recorded, same) == ([], [])
    exchanged = {**same, "a": (10.35, 10.32, 10.45)}
    assert contradictions(recorded, exchanged) == ([], [["a", "b"]]), "their intervals overlap"
    against = {**same, "c": (9.0, 8.9, 9.1)}
    assert contradictions(recorded, against) == ([["a", "c"], ["b", "c"]], [])


def test_instances_of_cutlass_are_different_and_take_the_ragged_problem(scripts: Any) -> None:
    peer = scripts("cutlass_peer")
    assert 20 <= len(peer.INSTANCES) <= 24
    assert (
        len({i.name for i in peer.INSTANCES}) == len({i.kernel().name for i in peer.INSTANCES}) == len(peer.INSTANCES)
    )
    assert all(i.kernel().launch.why_not(peer.RAGGED, H200) is None for i in peer.INSTANCES)
    assert all(peer.RAGGED.m % i.tile[0] and peer.RAGGED.n % i.tile[1] and peer.RAGGED.k % 32 for i in peer.INSTANCES)


def test_means_count_a_fall_back_as_the_baseline_and_leave_out_what_cutlass_cannot_do() -> None:
    found = cutlass_means([row(0.5, 2.0, 4.0), row(2.0, None, 1.0), row(None, 8.0)])
    assert found == pytest.approx(
        {"cutlass_over_baseline": 1.0, "ours_over_baseline": 2.0**0.5, "ours_over_cutlass": 2.0}
    )
    with pytest.raises(RecordError):
        cutlass_means([row(None, 2.0)])


def test_the_note_is_there_only_where_cutlass_was_measured(tmp_path: Path) -> None:
    assert CUTLASS.lines(tmp_path) == []
    data: dict[str, Any] = {"provenance": {"date": "2026-11-24T00:00:00+00:00", "commit": "0" * 40}}
    data |= {"format": CUTLASS.form, "instances": ["x", "y"], "rows": [row(0.9, 1.1, 1.2), row(0.9, 1.1, 0.95)]}
    (tmp_path / CUTLASS.name).write_text(json.dumps(data))
    (line,) = CUTLASS.lines(tmp_path)
    assert "0.900×" in line and "1.100×" in line and "of 2 kernels" in line and "2 problems" in line
    assert "faster on 1" in line and "2026-11-24" in line
    for damage in (
        {"format": "x"},
        {"format": CUTLASS.form},
        {"format": CUTLASS.form, "instances": [], "rows": [{}]},
        [],
    ):
        (tmp_path / CUTLASS.name).write_text(json.dumps(damage))
        with pytest.raises(RecordError):
            CUTLASS.lines(tmp_path)


#: Microseconds of a fake GPU; other kernels fail. The last is hopeless, and not timed directly.
TIMES = {"naive": 40.0, "mma_direct": 10.0, "wgmma_ring": 5.0, "shared_tiles": 900.0}


def timing(us: float) -> Timing:
    return Timing("offline", tuple(us * f for f in (0.99, 1.0, 1.01)), us, 0.01)


@pytest.fixture
def pretended(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/free_kernels.py on a GPU that answers from TIMES, and counts what it is asked."""
    script = scripts("free_kernels")
    asked: list[tuple[str, frozenset[str]]] = []
    names = {example(name): name for name in (*TIMES, "split_k")}

    class Live:
        def __init__(self, options: Any, step_s: float, free: Any) -> None:
            self.options, self.carried = options, None

        def close(self) -> None:
            """No worker was started ahead."""

        def evaluate(self, problem: Problem, kernels: Sequence[FreeKernel]) -> Iterator[tuple[Evaluation, None]]:
            for kernel in kernels:
                name = names[kernel]
                asked.append((f"{problem.mnk} {name}", self.options.proved))
                if name not in TIMES:
                    yield Evaluation(problem, kernel, Status.WRONG, "an error"), None
                    continue
                ratio = 8.0 / TIMES[name]
                figure = Speedup("lt_auto", ratio, 0.99 * ratio, 1.01 * ratio)
                verdict, found = Verdict(Status.PASSED), timing(TIMES[name])
                yield Evaluation(problem, kernel, Status.PASSED, "", verdict, found, {"lt_auto": 8.0}, figure), None

    def direct(problem: Problem, kernels: dict[str, FreeKernel], folder: Path) -> dict[str, Timing]:
        return {"lt_auto": timing(8.0), **{name: timing(TIMES[name]) for name in kernels}}

    monkeypatch.setattr(script, "CarriedLiveEvaluator", Live)
    monkeypatch.setattr(script, "_direct", direct)
    monkeypatch.setattr("outblas.runtime.device.gpu_of_device", lambda index: H200)
    script.asked = asked
    return script


def test_examples_are_recorded_once_and_their_orders_compared(pretended: Any, tmp_path: Path) -> None:
    kernels = {name: example(name) for name in (*TIMES, "split_k", "few_rows")}
    problems = [Problem(512, 512, 512), Problem(1024, 512, 512)]
    arguments = argparse.Namespace(out=tmp_path / "r.jsonl", ranking=tmp_path / "r.json", carried=tmp_path / "carried")
    pretended.record(kernels, problems[:1], arguments)
    assert [what for what, _ in pretended.asked] == [f"512_512_512 {n}" for n in (*TIMES, "split_k")], "few_rows cannot"
    assert pretended.rank(kernels, problems[:1], arguments)
    pretended.asked.clear()
    pretended.record(kernels, problems, arguments)
    assert all(what.startswith("1024") for what, _ in pretended.asked), "what is recorded is not asked again"
    assert all(example("naive").name in proved for _, proved in pretended.asked), "proved in full once"
    assert all(example("split_k").name not in proved for _, proved in pretended.asked)
    assert len(load(arguments.out).evaluations) == 2 * (len(TIMES) + 1)
    assert pretended.rank(kernels, problems, arguments)
    written = json.loads(arguments.ranking.read_text())
    assert written["agree"] and [row["problem"] for row in written["problems"]] == [p.key for p in problems]
    assert list(written["problems"][0]["kernels"]) == ["wgmma_ring", "mma_direct", "naive"], "fastest first"


def test_a_direct_run_that_disagrees_is_told(pretended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, problem = {name: example(name) for name in TIMES}, Problem(512, 512, 512)
    arguments = argparse.Namespace(out=tmp_path / "r.jsonl", ranking=tmp_path / "r.json", carried=tmp_path / "carried")
    pretended.record(kernels, [problem], arguments)
    other = {"lt_auto": 8.0, "naive": 4.0, "mma_direct": 10.0, "wgmma_ring": 5.0}
    monkeypatch.setattr(pretended, "_direct", lambda *_: {name: timing(us) for name, us in other.items()})
    assert not pretended.rank(kernels, [problem], arguments)
    (found,) = json.loads(arguments.ranking.read_text())["problems"]
    assert sorted(found["contradictions"]) == [["mma_direct", "naive"], ["wgmma_ring", "naive"]]


def test_the_peer_resumes_and_writes_what_the_note_reads(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer, calls = scripts("cutlass_peer"), []

    class Measured(peer.Peer):  # type: ignore[name-defined, misc]
        def __init__(self, *_: Any) -> None:
            self.gpu = H200

        def measure(self, problem: Problem) -> dict[str, Any]:
            calls.append(problem)
            if len(calls) == 2:
                raise KeyboardInterrupt
            times = {"torch": timing(9.0), "lt_auto": timing(8.0), "cutlass": timing(10.0), "ours": timing(8.0)}
            return dict(self._row(problem, None, times, {"x": 10.5, "y": 11.0}, {"z": "wrong"}))

    monkeypatch.setattr(peer, "Peer", Measured)
    monkeypatch.setattr("outblas.runtime.device.gpu_of_device", lambda index: H200)
    arguments = argparse.Namespace(
        out=tmp_path / CUTLASS.name, count=3, carried=tmp_path / "carried", cutlass="4.2.0", step="measure"
    )
    with pytest.raises(KeyboardInterrupt):
        peer.measure(arguments)
    assert not arguments.out.exists()
    peer.measure(arguments)
    assert len(calls) == 4 and len(set(calls)) == 3, "the first problem is not measured again"
    written = json.loads(arguments.out.read_text())
    assert [found["problem"] for found in written["rows"]] == [p.key for p in sorted(set(calls), key=peer.sample(
        peer.suite("grid1000"), 3, 0, gpu=H200).index)]  # fmt: skip
    first = written["rows"][0]
    assert first["instance"] == "x" and first["baseline"] == "lt_auto"
    assert first["config"] is None and first["ours"]["ratio"] == 1.0, "what the library runs without a kernel"
    assert first["cutlass"]["ratio"] == pytest.approx(0.8) and first["ours_over_cutlass"]["ratio"] == pytest.approx(
        1.25
    )
    assert "ours over cutlass: 1.250" in capsys.readouterr().out
    assert "0.800×" in CUTLASS.lines(tmp_path)[0]
