"""The table of commands that make the published tables again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages.all_rows_table import again_table, build_command, command_of_file

from outblas.records.results import Result
from support.helpers import ROOT


def made(suite: str, mode: str = "offline", **more: Any) -> Result:
    row = {"m": 8, "n": 8, "k": 8, "layout": "TN", "dtype": "fp16", "acc": "fp32", "mode": mode, **more}
    return Result(Path(f"{suite}_{mode}.parquet"), {"suite": suite, "provenance": {}, "shapes": "drawn, seed 3"}, [row])


@pytest.mark.parametrize(
    ("result", "command"),
    [
        (made("grid1000"), "BUILD --tables grid1000:TN:fp16:fp32 --steps bench --modes offline"),
        (made("llm", "server"), "BUILD --tables llm:TN:fp16:fp32 --steps bench --modes server"),
        (made("grid1000", by_start=[1.0, 1.1, 1.2]), "BUILD --tables grid1000:TN:fp16:fp32 --steps judge,merge"),
        (made("new_shapes"), "python benchmarks/new_shapes.py --out new_shapes_offline.parquet"),
        (made("llm_tp_drawn"), "python benchmarks/llm_tp_drawn.py --out llm_tp_drawn_offline.parquet"),
        (
            made("drawn", "unmeasured", layout="NN"),
            "python benchmarks/new_shapes.py --drawn --count 1 --seed 3 --layout NN --dtype fp16 "
            "--out drawn_unmeasured.parquet",
        ),
        (
            made("drawn", "unmeasured", by_start=[1.0, 1.1, 1.2]),
            "python benchmarks/new_shapes.py --drawn --count 1 --seed 3 --layout TN --dtype fp16 --starts 3 "
            "--out drawn_unmeasured.parquet",
        ),
        (
            made("drawn", "learned"),
            "python benchmarks/learning.py --drawn --count 1 --seed 3 --layout TN --dtype fp16 "
            "--out drawn_learned.parquet",
        ),
    ],
)
def test_each_file_has_its_command(result: Result, command: str) -> None:
    assert command_of_file(result) == command


def test_the_scripts_and_the_library_that_commands_name_exist() -> None:
    assert all((ROOT / "benchmarks" / name).is_file() for name in ("new_shapes.py", "learning.py", "llm_tp_drawn.py"))
    assert (ROOT / build_command("h200").split()[-1]).is_file()
    assert build_command("no-gpu") == "outblas build-library --work build/no-gpu"


def test_minutes_are_of_the_file_and_a_dash_without() -> None:
    timed = made("grid1000")
    timed.meta["provenance"]["gpu_seconds"] = 174.0
    table = again_table([timed, made("llm")], "h200")
    assert table.startswith(f"`BUILD` stands for `{build_command('h200')}`.")
    assert "| grid1000_offline | `BUILD --tables grid1000:TN:fp16:fp32 --steps bench --modes offline` | 2.9 |" in table
    assert table.splitlines()[-1].endswith("| – |")
