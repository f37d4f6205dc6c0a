"""Tables that were proved with other kernel sources: a bench proves their kernels with today's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.suites import Table
from outblas.records.proved_kernels import built_by, unproved_tables
from outblas.records.results import Result, read_result, write_result
from outblas_lab.build.build_run import copy_tables_from, publish_seconds
from outblas_lab.build.build_work import BuildFolder, proved
from outblas_lab.build.judging import note_proof
from support.build_library_fixture import run, script_fixture, work_fixture  # noqa: F401


def by_compiler(work: BuildFolder, table: Table, nvrtc: str | None) -> Result:
    """Return a table's bench as if that compiler had made its kernels."""
    result = read_result(work.result(table, "offline"))
    return replace(result, meta={**result.meta, "provenance": {**result.provenance, "toolchain": {"nvrtc": nvrtc}}})


def test_a_table_of_other_kernels_is_proved_by_its_bench(
    script: Any, work: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, llm, other = script.TABLES[0], Table.parse("llm:TN:fp16:fp32"), BuildFolder(tmp_path / "other")
    other.path.mkdir()
    for place, each in ((work, table), (other, llm)):
        run(script, place, "tune", tables=str(each))
        publish_seconds(place, {})
    before = other.load()
    replace(before, provenance={**before.provenance, "kernels": "0" * 64}).save(other.library)
    copy_tables_from(work, [other.library])
    assert unproved_tables(work.load()) == [llm] and unproved_tables(other.load()) == [llm]
    only_there = {p for p in llm.problems() if p not in table.problems()}
    names = {config_name(c) for p in only_there for c in before.installed()[p]}
    names -= {config_name(c) for p, configs in work.load().installed().items() if p not in only_there for c in configs}
    assert names and not names & proved(work, llm)
    run(script, work, "bench", tables=str(llm))
    assert unproved_tables(work.load()) == []
    known = work.load()
    replace(known, provenance={**known.provenance, "toolchain": {"nvrtc": built_by()["nvrtc"]}}).save(work.library)
    assert not names & proved(work, llm), "the fake's bench names no compiler"
    note_proof(work, llm, by_compiler(work, llm, "12.8"))
    assert not names & proved(work, llm), "of another compiler"
    note_proof(work, llm, by_compiler(work, llm, built_by()["nvrtc"]))
    assert names <= proved(work, llm)
    replace(known, provenance={**work.load().provenance, "toolchain": {"nvrtc": "12.8"}}).save(work.library)
    assert names <= proved(work, llm), "whatever compiled for the search"
    assert "all kernels are proved" in capsys.readouterr().out
    run(script, work, "bench", tables=str(llm))
    assert "all kernels are proved" not in capsys.readouterr().out, "once"


def test_a_bench_with_a_kernel_that_fails_proves_no_table(script: Any, work: Any) -> None:
    table = script.TABLES[0]
    run(script, work, "tune")
    publish_seconds(work, {})
    library = work.load()
    replace(library, provenance={**library.provenance, "kernels": "0" * 64}).save(work.library)
    row = library.rows[0]
    script.fake_bench.statuses[row.problem, row.plain.config] = Status.WRONG
    with pytest.raises(UsageError, match="[1-9] failed"):
        run(script, work, "bench")
    assert unproved_tables(work.load()) == [table]
    assert not read_result(work.result(table, "offline")).rows[0]["config"]


def test_a_bench_of_other_sources_proves_no_table(script: Any, work: Any) -> None:
    table = script.TABLES[0]
    run(script, work, "tune", "bench")
    result = read_result(work.result(table, "offline"))
    assert result.provenance["kernels"] == built_by()["kernels"]
    older = {**result.meta, "provenance": {**result.provenance, "kernels": "1" * 64}}
    write_result(result.rows, older, result.path)
    with pytest.raises(UsageError, match="0 failed"):
        note_proof(work, table, read_result(result.path))
