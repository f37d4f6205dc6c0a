"""The table of runs on several GPUs: one GPU is compared on the work that the several ones did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from figures.equal_work import equal_work_ratio
from pages.study_blocks import scale_block

from outblas.core.errors import RecordError
from support.helpers import ROOT


def part(seconds: float, *tasks: float) -> dict[str, Any]:
    ledger = {f"worker {i}: host": {"seconds": {"task": each, "idle": 9.0}} for i, each in enumerate(tasks)}
    ledger["driver"] = {"seconds": {"waiting": 99.0}}
    return {"gpus": [*range(len(tasks))], "evaluate_seconds": seconds, "measurements": 3, "ledger": ledger}


def test_work_that_only_the_one_gpu_did_is_no_speed_up() -> None:
    assert equal_work_ratio(part(20.0, 20.0), part(10.0, 9.0, 9.0)) == pytest.approx(1.8)
    assert equal_work_ratio(part(20.0, 18.0), part(10.0, 9.0, 9.0)) == pytest.approx(2.0)


def test_the_page_has_the_files_ratio_on_equal_work_and_not_that_of_the_times() -> None:
    data = json.loads((ROOT / "results/h200/scale_out_free.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/develop/build-the-library.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if "scale_out_free.json" in line]
    wall = data["several"]["evaluate_seconds"]
    tasks = sum(data["several"]["ledger"][f"worker {i}: host"]["seconds"]["task"] for i in (0, 1))
    assert tasks / wall == pytest.approx(1.95, abs=0.005) and data["ratio"] > 2.1
    assert line.endswith("| **1.95×** |") and "2.14" not in page


def test_a_file_without_task_seconds_is_refused(tmp_path: Path) -> None:
    assert scale_block(tmp_path) == "Not measured on this GPU."
    (tmp_path / "scale_out_free.json").write_text(json.dumps({"one": part(1.0), "several": part(1.0)}))
    with pytest.raises(RecordError, match="ZeroDivisionError"):
        scale_block(tmp_path)
