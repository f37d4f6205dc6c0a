"""scripts/restamp.py: what it takes for the same, what it writes, and that it writes nothing where a kernel differs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from helpers import ROOT
from outblas.compile import compile_source
from outblas.cubin import Cubin
from outblas.errors import CompileError, RecordError, UsageError
from outblas.kernels.config_text import config_from_name
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.library import Choice, Library, Row
from outblas.problem import Problem
from outblas.results import read_result, write_result
from outblas.source import Source, kernels_sha, make_source

P = Problem(64, 64, 512)
SOURCES = [make_source(P, c) for c in (Sm80DirectConfig(16, 8), Sm80MmaConfig(64, 64))]
RECORD = {"since": "c" * 40, "compared": 2, "kernels_of_that_commit": "old"}


@pytest.fixture(name="script")
def script_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("restamp", ROOT / "scripts" / "restamp.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "restamp", module)  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="cubins", scope="module")
def cubins_fixture() -> list[Cubin]:
    return [compile_source(source, cache=None) for source in SOURCES]


def build(answers: dict[int, Any]) -> Any:
    """The first call of it is for the sources of before, the second for the present ones."""
    calls = iter(sorted(answers))
    return lambda sources: answers[next(calls)]


def test_the_same_bytes_and_the_same_code_are_the_same(script: Any, cubins: list[Cubin]) -> None:
    first, second = cubins
    other_bytes = replace(second, image=second.image + b"\0" * 16)  # behind all sections
    found = script.compare(["a", "b"], SOURCES, SOURCES, build({0: cubins, 1: [first, other_bytes]}))
    assert (found.whole, found.code, found.differences) == (1, 1, ())


def test_other_code_other_resources_and_refusals_are_told(script: Any, cubins: list[Cubin]) -> None:
    first, second = cubins
    error = CompileError("no such thing", "C++", "correct it")
    more = replace(second, image=second.image + b"\0" * 16, registers=second.registers + 8)
    found = script.compare(
        ["a", "b", "c"], SOURCES, SOURCES, build({0: [first, second, first], 1: [second, more, error]})
    )
    assert (found.whole, found.code, len(found.differences)) == (0, 0, 3)
    assert "another machine code" in found.differences[0] and found.differences[1].startswith("b: ")
    assert "now: no such thing" in found.differences[2]


def test_everything_that_ships_is_compared(script: Any) -> None:
    from outblas.shipped_build import any_shape_files, sources_for_any_shape, sources_of

    compared = {make_source(Problem.from_key(key), config_from_name(name)) for key, name in script.shipped_pairs()}
    assert compared >= set(sources_of([Library.packaged("h200")])) | set(sources_for_any_shape(any_shape_files()))


def test_a_stamp_keeps_what_it_replaces(script: Any) -> None:
    once = script.stamped({"gpu": "x", "kernels": "a"}, RECORD, "b")
    assert once == {"gpu": "x", "kernels": "b", "restamped": [{**RECORD, "replaced": "a"}]}
    twice = script.stamped(once, RECORD, "c")
    assert [r["replaced"] for r in twice["restamped"]] == ["a", "b"] and twice["kernels"] == "c"
    assert script.stamped({}, RECORD, "b")["restamped"] == [{**RECORD, "replaced": None}]


def test_libraries_and_results_with_a_hash_are_stamped_and_nothing_else_changes(script: Any, tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    row = Row(P, "lt_auto", plain=Choice(Sm80DirectConfig(16, 8), 1.2, 1.1, 1.3))
    path = data / "libraries" / "h200.json"
    Library("h200", (row,), {"gpu": "NVIDIA H200"}).save(path)
    published = ROOT / "results" / "h200" / "new_shapes_tn_fp16_fp32_offline.parquet"
    (results / "h200").mkdir(parents=True)
    without = Path(shutil.copy(published, results / "h200" / published.name))
    told = read_result(published)
    about = {**told.meta, "provenance": {**told.provenance, "kernels": "old"}}
    stamped = write_result(told.rows, about, results / "h200" / "stamped.parquet")
    before = without.read_bytes()
    pq.write_table(pa.table({"of": [1]}), results / "h200" / "a_scripts_own.parquet")
    assert script.restamp(RECORD, "new", data, results) == [path, stamped]
    library = Library.load(path)
    assert library.rows == (row,) and library.provenance["kernels"] == "new"
    assert library.provenance["gpu"] == "NVIDIA H200" and library.provenance["restamped"][0]["replaced"] is None
    after = read_result(stamped)
    assert after.rows == told.rows and after.provenance["restamped"] == [{**RECORD, "replaced": "old"}]
    assert without.read_bytes() == before, "a result that names no kernels is left alone"
    assert script.restamp(RECORD, "new", data, results) == [], "done before"
    (results / "h200" / "damaged.parquet").write_bytes(b"PAR1")
    with pytest.raises(RecordError, match="damaged.parquet cannot be read"):
        script.restamp(RECORD, "newer", data, results)


def test_what_is_of_other_kernels_than_were_compared_is_not_stamped(script: Any, tmp_path: Path) -> None:
    for name, kernels in (("h100", "old"), ("h200", "older still")):
        Library(name, (), {"kernels": kernels}).save(tmp_path / "libraries" / f"{name}.json")
    before = [path.read_bytes() for path in sorted((tmp_path / "libraries").iterdir())]
    with pytest.raises(UsageError, match="h200.json is of kernels older still, compared were old"):
        script.restamp(RECORD, "new", tmp_path, tmp_path / "results")
    assert [path.read_bytes() for path in sorted((tmp_path / "libraries").iterdir())] == before


def test_one_kernel_that_differs_leaves_everything_as_it_is(
    script: Any, cubins: list[Cubin], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [(P.key, "sm80_direct_gemm:bm=16,bn=8,wm=1,wn=1,wk=1,unroll=2,pdl=false")]
    monkeypatch.setattr(script, "shipped_pairs", lambda: pairs)
    monkeypatch.setattr(script, "older", lambda commit, pairs: script.Older("c" * 40, "old", SOURCES[:1]))
    monkeypatch.setattr(script, "_build", lambda sources, jobs, what: [cubins[what == "now"]])
    written: list[Any] = []
    monkeypatch.setattr(script, "restamp", lambda *arguments: written.append(arguments) or [])
    assert script.main(["--since", "x"]) == 1 and not written
    told = capsys.readouterr().out
    assert "sm80_direct_gemm" in told and "1 of 1 kernels differ; nothing is written" in told
    monkeypatch.setattr(script, "_build", lambda sources, jobs, what: [cubins[0]])
    assert script.main(["--since", "x", "--check"]) == 0 and not written
    assert script.main(["--since", "x"]) == 0 and written[0][1] == kernels_sha()
    record = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (record["identical_cubins"], record["compared"], record["kernels_of_that_commit"]) == (1, 1, "old")


def test_the_sources_of_a_commit_are_its_own(script: Any) -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("no checkout")
    pairs = [(P.key, "sm80_direct_gemm:bm=16,bn=8,wm=1,wn=1,wk=1,unroll=2,pdl=false")]
    found = script.older("HEAD", pairs)
    assert len(found.commit) == 40 and len(found.kernels) == 64
    assert isinstance(found.sources[0], Source) and found.sources[0].entry == "sm80_direct_gemm"
    with pytest.raises(UsageError, match="git rev-parse fails"):
        script.older("no-such-commit", pairs)
    with pytest.raises(UsageError, match="makes no sources of the shipped kernels"):
        script.older("HEAD", [(P.key, "sm99_none:")])
