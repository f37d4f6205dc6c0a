"""The measurements of ``outblas fit any-shape extend`` and ``answers``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="what any shape is given is fitted by torch")

from outblas.core.config import launch_of  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.registry import FAMILIES  # noqa: E402
from outblas_lab.build import any_shape_run  # noqa: E402
from outblas_lab.build.any_shape_run import (  # noqa: E402
    CHOSEN,
    DRAWN,
    UNALIGNED,
    PromisingKernels,
    extension_shapes,
    unaligned_kernels,
)
from support.gpus.known import H200  # noqa: E402


def test_shapes_are_drawn_in_turns() -> None:
    drawn = extension_shapes(30, 3)
    assert drawn == extension_shapes(30, 3) != extension_shapes(30, 4) and len(set(drawn)) == 30
    assert {p.layout for p in drawn} == {"TN", "NN"} and extension_shapes(0, 3) == []
    assert any(not p.rows_aligned for p in drawn) and all(p.rows_aligned for p in drawn[::3])


@pytest.fixture
def promising(monkeypatch: pytest.MonkeyPatch) -> PromisingKernels:
    monkeypatch.setattr(any_shape_run, "ask_cublaslt", lambda lt, index, problem: ("id=66 tile=10 splitk=1",))
    return PromisingKernels(H200)


@pytest.mark.parametrize("problem", [Problem(64, 4096, 4096), Problem(65, 1001, 2003), Problem(65, 1001, 2003, "NN")])
def test_a_problem_has_likely_kernels_and_random_ones_for_unaligned_rows(
    promising: PromisingKernels, problem: Problem
) -> None:
    kernels = promising.kernels(problem)
    assert kernels == PromisingKernels(H200).kernels(problem)  # a run that resumes asks for the same
    assert len(set(kernels)) == len(kernels) <= 2 * (CHOSEN + DRAWN) + UNALIGNED
    assert {launch_of(c) for c in kernels} == {"plain", "pdl"}
    for_unaligned = [c for c in kernels if FAMILIES[c.family].for_unaligned_rows]
    assert len(for_unaligned) >= UNALIGNED if not problem.rows_aligned else not for_unaligned
    assert promising.answer(problem) == "id=66 tile=10 splitk=1"


def test_aligned_rows_have_no_kernels_for_unaligned_ones() -> None:
    assert unaligned_kernels(Problem(64, 4096, 4096), H200) == []


def test_answers_are_recorded_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Problem] = []

    class Clock(SimpleNamespace):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: Any) -> None:
            pass

    def times(self: Any, clock: Any) -> dict[str, float]:
        timed.append(clock.problem)
        return {"id=1": 2.0, "id=2": 3.0}

    monkeypatch.setattr(any_shape_run, "GpuClock", lambda problem, index, gpu: Clock(problem=problem))
    monkeypatch.setattr(any_shape_run, "version", lambda: "13.1.0")
    monkeypatch.setattr(any_shape_run, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(any_shape_run, "collect_provenance", lambda command, index: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(any_shape_run.LtAnswers, "times", times)
    problems, journal, out = extension_shapes(3, 1), tmp_path / "work" / "a.jsonl", tmp_path / "a.parquet"
    assert any_shape_run.record_answers(problems[:2], journal, out) == "4 answers of 2 problems"
    journal.write_text(journal.read_text() + '{"problem": "cut off')
    assert any_shape_run.record_answers(problems, journal, out) == "6 answers of 3 problems"
    assert timed == problems
    table = pq.ParquetFile(out).read()
    assert table.column("answer").to_pylist() == ["id=1", "id=2"] * 3
    assert json.loads(table.schema.metadata[b"provenance"]) == {"gpu": "NVIDIA H200"}
