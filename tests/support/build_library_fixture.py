"""`outblas build-library` on a fake GPU, two suites of a few problems."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas_lab.build import build_run, build_searches, build_work, finalists, judging, open_rows
from outblas_lab.build import finalist_trials as trials
from outblas_lab.pool import record_suite, run_bench
from support.fake_gpu import install
from support.gpus.known import H200

SHAPES = [(64 * m, 128, 512) for m in (1, 2, 4, 8)]
#: Of suite llm: one shape is of the other suite too.
LLM_SHAPES = [SHAPES[0], (16, 256, 512)]
MADE = ("record", "tune", "bench")
ALL = "grid1000:TN:fp16:fp32,grid1000:NN:fp16:fp32,grid1000:TN:fp16:fp16,llm:TN:fp16:fp32"


def problems_of(name: str, layout: str = "TN", dtype: str = "fp16", acc: str = "fp32") -> list[Problem]:
    shapes = {"grid1000": SHAPES, "llm": LLM_SHAPES}.get(name, [])  # the packaged library has tables of other suites
    return [Problem(*shape, layout, dtype, acc) for shape in shapes]  # type: ignore[arg-type]


@pytest.fixture(name="script")
def script_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the build, and the fake that they ask."""
    benched, _ = install(monkeypatch, run_bench), install(monkeypatch, record_suite)
    fake, trial = install(monkeypatch, build_searches), install(monkeypatch, trials)
    asking = (judging, build_work, finalists, open_rows, build_searches, build_run)
    for module in asking:
        monkeypatch.setattr(module, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr("outblas.core.suites.suite", problems_of)
    packaged = build_searches.packaged_kernels
    monkeypatch.setattr(build_searches, "packaged_kernels", lambda work, gpu: {})
    return SimpleNamespace(
        fake=fake,
        trial=trial,
        fake_bench=benched,
        packaged_kernels=packaged,
        runs=build_run,
        benching=judging,
        trials=trials,
        search=build_searches,
        directory=build_work,
        TABLES=build_work.TABLES,
        gpu=H200,
    )


@pytest.fixture(name="work")
def work_fixture(script: Any, tmp_path: Path) -> build_work.BuildFolder:
    return build_work.BuildFolder(tmp_path)


def run(script: Any, work: Any, *steps: str, tables: str = "grid1000:TN:fp16:fp32", modes: str = "offline") -> None:
    parsed = [Table.parse(text) for text in tables.split(",")]
    for job in build_run.jobs(steps, parsed, modes.split(","), [build_work.TABLES[0]]):
        build_run.run_job(work, job)
