"""Trials of a build as a table for the choice for any shape: times of several starts, rivals and answers."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="the table is a Parquet file")
pytest.importorskip("torch", reason="the table is read for a fit by torch")

from outblas.core.errors import RecordError, UsageError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas_lab.build.any_shape_run import collect_trials  # noqa: E402
from outblas_lab.train.fit_any_shape_run import read_cells  # noqa: E402

KEY, ANSWER = "64_6144_4096_TN_fp16_fp32", "id=66 tile=10 splitk=1"
FIRST = "sm80_mma_gemm:bm=16,bn=16,bk=256,stages=4,wm=1,wn=1,wk=8,split_k=1,vec=8,pdl=false"
SECOND = FIRST.replace("stages=4", "stages=3")
PROVENANCE = {"gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-23T00:00:00+00:00", "command": "trial"}


def samples(us: float) -> dict[str, Any]:
    return {"us": [us] * 9, "repeats": 25, "sets": 4}


def write_trial(folder: Path, start: str, torch_us: float, kernels: dict[str, float], finished: bool = True) -> None:
    rivals = {"torch": torch_us, "cublas": torch_us, "lt_heuristic": torch_us, "lt_auto": 0.9 * torch_us}
    lines: list[dict[str, Any]] = [
        {"table": "llm:TN:fp16:fp32", "start": start, "gpu": "h200", "finalists": {}},
        {
            "problem": KEY,
            "rivals": {name: samples(us) for name, us in rivals.items()},
            "details": dict.fromkeys(rivals, "x") | {"lt_heuristic": ANSWER},
            "left_out": {},
            "kernels": {name: samples(us) for name, us in kernels.items()},
            "failed": {},
        },
    ]
    lines += [{"problem": "", "provenance": PROVENANCE}] if finished else []
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"llm_tn_fp16_fp32_trial_{start}.jsonl").write_text(text)


def test_times_are_means_over_starts_relative_to_torch(tmp_path: Path) -> None:
    write_trial(tmp_path, "1", 10.0, {FIRST: 8.0})
    write_trial(tmp_path, "2", 40.0, {FIRST: 32.0, SECOND: 20.0})
    for other_clock in ("block", "offline_cold", "server"):
        write_trial(tmp_path, other_clock, 1.0, {FIRST: 100.0})
    out = tmp_path / "new" / "trials.parquet"
    assert collect_trials(tmp_path, out) == "2 cells of 1 problems"
    (cells,), provenance = read_cells(out)
    assert cells.problem == Problem(64, 6144, 4096) and (cells.source, cells.answer) == ("llm", ANSWER)
    assert sorted(np.exp(cells.gains)) == pytest.approx([1.25, 2.0], rel=1e-5), "of each start's own torch"
    assert np.exp(cells.rival) == pytest.approx(1 / 0.9) and cells.fitted.all()
    assert provenance == PROVENANCE


def test_a_trial_that_is_not_finished_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no finished trial"):
        collect_trials(tmp_path, tmp_path / "out.parquet")
    write_trial(tmp_path, "1", 10.0, {FIRST: 8.0}, finished=False)
    with pytest.raises(UsageError, match="trial 1 of llm:TN:fp16:fp32 is not finished"):
        collect_trials(tmp_path, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_a_trial_that_has_only_begun_is_named(tmp_path: Path) -> None:
    write_trial(tmp_path, "1", 10.0, {FIRST: 8.0})
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(UsageError, match="is not finished"):
        collect_trials(tmp_path, tmp_path / "out.parquet")
    path.write_text("")
    with pytest.raises(UsageError, match="no finished trial"):
        collect_trials(tmp_path, tmp_path / "out.parquet")


def test_a_disk_that_refuses_keeps_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_trial(tmp_path, "1", 10.0, {FIRST: 8.0})
    out = tmp_path / "out.parquet"
    collect_trials(tmp_path, out)
    before = out.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        collect_trials(tmp_path, out)
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", [b"PAR1", b"", b"{}"])
def test_a_damaged_table_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "cells.parquet").write_bytes(text)
    with pytest.raises(RecordError, match="cells.parquet cannot be read"):
        read_cells(tmp_path / "cells.parquet")
