"""Ways to use the command line wrongly: each ends in one line that says wrong, expected and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from outblas.runtime import device
from support.cli_fixture import assert_refused, outblas

#: Arguments -> words of the line. ``{here}`` is a scratch folder with the files that :func:`here` makes.
WRONG: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "mnk that is no shape": (["export", "--mnk", "abc"], ("M_N_K",)),
    "mnk of zero": (["export", "--mnk", "0_64_64"], ("M is 0", "a positive integer")),
    "mnk of a negative": (["export", "--mnk", "-1_64_64"], ("-1",)),
    "mnk that is huge": (["export", "--mnk", "999999999999_64_64"], ("999999999999",)),
    "unlisted problem": (["export", "--mnk", "64_4096_65", "--out", "{here}/x"], ("64_4096_65", "outblas tune")),
    "unknown agent": (["tune", "--agent", "huristic"], ("huristic", "heuristic")),
    "agent file": (["tune", "--agent", "mine.py"], ("mine.py", "outblas recording score mine.py")),
    "unknown suite": (["tune", "--suite", "grid"], ("grid",)),
    "unknown layout": (["tune", "--layout", "tt"], ("layout",)),
    "unknown dtype": (["tune", "--dtype", "fp8"], ("dtype", "bf16")),
    "unknown accumulator": (["tune", "--acc", "fp64"], ("fp32",)),
    "fp16 sums of bf16": (["tune", "--dtype", "bf16", "--acc", "fp16"], ("fp16",)),
    "unknown device": (["tune", "--device", "cpu"], ("cuda:",)),
    "unknown recording": (["tune", "--device", "replay:a100"], ("a100",)),
    "unknown format": (["export", "--mnk", "64_64_64", "--format", "zip"], ("zip", "cubin")),
    "unknown split": (["compare", "--splits", "rows", "--out", "{here}/c.parquet"], ("rows", "families")),
    "unknown list kind": (["list", "agent"], ("agents",)),
    "unknown mode": (["bench", "--mode", "onlin"], ("offline",)),
    "budget of zero": (["tune", "--budget", "0"], ("budget",)),
    "budget of a negative": (["tune", "--budget", "-3"], ("-3",)),
    "budget that is a word": (["tune", "--budget", "abc"], ("abc",)),
    "missing result": (["report", "{here}/nope.parquet"], ("nope",)),
    "broken result": (["report", "{here}/broken.parquet"], ("broken",)),
    "a text as result": (["report", "{here}/README.md"], ("README.md",)),
    "missing capture": (["tune", "--captured", "{here}/none.json"], ("none.json",)),
    "broken capture": (["tune", "--captured", "{here}/broken.json", "--run", "{here}/r"], ("broken.json",)),
    "unwritable run": (["tune", "--run", "{here}/README.md/run", "--sample", "3"], ("README.md",)),
    "run that is the kernel's": (["tune", "--run", "/proc/foo", "--sample", "3"], ("/proc/foo",)),
    "no GPU to measure": (["eval", "--mnk", "64_64_64", "--base-dir", "{here}"], ("GPU",)),
    "no rate in server mode": (["eval", "--mnk", "64_64_64", "--mode", "server"], ("--target-qps",)),
    "a rate out of server mode": (["eval", "--mnk", "64_64_64", "--target-qps", "9"], ("--target-qps",)),
    "sample of zero": (["tune", "--sample", "0"], ("sample",)),
    "suite and problems": (["tune", "--mnk", "64_64_64", "--suite", "grid1000"], ("--suite conflicts with --mnk",)),
    "suite and capture": (["tune", "--captured", "{here}/none.json", "--suite", "llm"], ("--suite", "--captured")),
    "suite and weights": (["tune", "--linear", "4096_4096", "--suite", "llm"], ("--suite", "--linear")),
    "sources of one GPU": (["compare", "--learn-from", "own"], ("--learn-from was passed without --across",)),
    "missing option": (["export"], ("--mnk",)),
    "problems in two ways": (["export", "--mnk", "64_64_64", "--suite", "llm"], ("2 of --mnk", "pass one of them")),
    "sample that is a word": (["tune", "--sample", "five"], ("--sample", "expected a valid integer.")),
    "a global option behind the command": (["tune", "-q"], ("put -q before the command: outblas -q tune ...",)),
    "the same in a group": (["fit", "model", "--quiet"], ("before the command: outblas --quiet fit model ...",)),
    "misspelt command": (["tunne"], ("tunne", "tune")),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    (tmp_path / "README.md").write_text("# No Parquet\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize("usage", WRONG)
def test_a_wrong_usage_is_one_line(usage: str, here: Path) -> None:
    arguments, words = WRONG[usage]
    assert_refused(outblas(*(part.replace("{here}", str(here)) for part in arguments)), *words)
