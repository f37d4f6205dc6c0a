"""Commands write over their own earlier files, and over nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outblas.cli import common
from outblas.core.errors import RecordError, UsageError
from outblas.core.gpu_records import packaged_records, read_record
from support.cli_fixture import assert_refused, outblas, recording_fixture  # noqa: F401
from support.helpers import synthetic_problems

PROBLEM = synthetic_problems()[1]
#: Name of an output -> the command that writes it. ``{recording}`` is a recording, ``{out}`` the file in ``{folder}``.
WRITERS: dict[str, str] = {
    "export-t4": f"export-t4 --mnk {PROBLEM.mnk} --device replay:{{recording}} --out {{out}}",
    "import-t4": "import-t4 {folder}/t4.json --to {out}",
    "fit catalogue": "fit catalogue --recording {recording} --kernels 1 --out {out}",
    "fit model": "fit model --recording {recording} --folds 2 --out {out}",
    "recipe": "recipe --recording {recording} --shapes 2 --out {out}",
    "report": "report {folder}/t4.json --out {out}",
}


def written(name: str, recording: str, out: Path) -> Any:
    words = WRITERS[name].split()
    return outblas("-q", *(w.format(recording=recording, out=out, folder=out.parent) for w in words))


@pytest.mark.parametrize(
    ("name", "text"),
    [*((name, '{"name": "mine"}\n') for name in WRITERS), ("export-t4", "[1]"), ("import-t4", "1")],
)
def test_a_file_of_something_else_is_refused_and_kept(name: str, text: str, recording: str, tmp_path: Path) -> None:
    if name in ("fit model", "fit catalogue", "recipe"):
        for package in ("torch", "sb3_contrib", "optuna"):
            pytest.importorskip(package, reason="needs torch, sb3-contrib and optuna (pip install './lab[rl]')")
    if name == "import-t4":
        assert written("export-t4", recording, tmp_path / "t4.json").exit_code == 0
    if name == "report":
        (tmp_path / "t4.json").write_text("any")
    out = tmp_path / "settings.json"
    out.write_text(text)
    assert_refused(written(name, recording, out), "settings.json exists but is not a ", "pass another path")
    assert out.read_text() == text


@pytest.mark.parametrize("name", ["export-t4", "import-t4"])
def test_an_earlier_output_is_replaced(name: str, recording: str, tmp_path: Path) -> None:
    assert written("export-t4", recording, tmp_path / "t4.json").exit_code == 0
    out = tmp_path / "out.json"
    out.touch()
    first, again = (written(name, recording, out) for _ in range(2))
    assert first.exit_code == again.exit_code == 0, (first.stderr, again.stderr)
    assert json.loads(out.read_text().splitlines()[0] if name == "import-t4" else out.read_text())


def test_a_report_is_not_written_over_its_own_result(tmp_path: Path) -> None:
    result = tmp_path / "bench.parquet"
    result.write_bytes(b"PAR1 and more")
    assert_refused(outblas("report", str(result), "--out", str(result)), "exists but is not a report")
    assert result.read_bytes() == b"PAR1 and more"


def test_a_bench_into_a_folder_is_refused_before_it_times(tmp_path: Path) -> None:
    assert_refused(outblas("bench", "--suite", "llm", "--no-resume", "--out", str(tmp_path)), "is a folder", "--out")
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))


def test_a_folder_or_a_dangling_link_is_no_output(tmp_path: Path) -> None:
    def unread(path: Path) -> None:
        raise RecordError(f"{path} is read", "no reading", "stop")

    (tmp_path / "link").symlink_to("nowhere")
    for path, word in ((tmp_path, "is a folder"), (tmp_path / "link", "exists but is not a report")):
        with pytest.raises(UsageError, match=word):
            common.output_file("--out", path, "report", unread)
    assert common.output_file("--out", tmp_path / "new", "report", unread) == tmp_path / "new"


def test_a_gpu_record_is_replaced_by_one(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(packaged_records()["h200"].to_json()))
    assert common.output_file("--out", path, "GPU record", read_record) == path
    path.write_text("{}")
    with pytest.raises(UsageError, match="is not a GPU record"):
        common.output_file("--out", path, "GPU record", read_record)
