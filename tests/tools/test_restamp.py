"""tools/restamp.py: equal kernels, the written stamp, and no write if a kernel differs."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")
pytest.importorskip("pyarrow")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from outblas import __version__  # noqa: E402
from outblas.core.config import config_name  # noqa: E402
from outblas.core.errors import CompileError, RecordError, UsageError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.kernel_hash import headers_sha, kernels_sha  # noqa: E402
from outblas.kernels.source import Source, make_source  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.records.results import read_result, write_result  # noqa: E402
from outblas.records.user_library import EqualKernels, KernelRelease  # noqa: E402
from outblas.runtime.cubin import Cubin  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402
from support.helpers import ROOT, module_of_file  # noqa: E402

P = Problem(64, 64, 512)
SOURCES = [make_source(P, c) for c in (Sm80DirectConfig(16, 8), Sm80MmaConfig(64, 64))]
#: The same kernels, from texts that a compiler reads differently.
EARLIER = [replace(source, text=f"#define EARLIER 1\n{source.text}") for source in SOURCES]
OLD, MIDDLE, NOW = KernelRelease("0.1.0", "a"), KernelRelease("0.1.0", "b"), KernelRelease("0.2.0", "b")
OTHER = KernelRelease("0.3.0", "c")
NAMED = KernelRelease("0.0.9", "as that release says")
RECORD = {"since": "c" * 40, "compared": 2, "kernels_of_that_commit": "old"}


@pytest.fixture(name="script")
def script_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of_file(ROOT / "tools" / "restamp.py", monkeypatch)


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
    found = script.compare(["a", "b"], EARLIER, SOURCES, build({0: cubins, 1: [first, other_bytes]}))
    assert (found.source, found.whole, found.code, found.differences) == (0, 1, 1, ())


def test_only_sources_that_differ_for_a_compiler_are_compiled(script: Any, cubins: list[Cubin]) -> None:
    first, second = SOURCES
    beside = [("new.cuh", "int unused;")]
    said = [(name, f"// said otherwise\n{text}") for name, text in first.headers]
    reached = [(name, f"{text}\nint more;" if name == "ptx/types.cuh" else text) for name, text in second.headers]
    before = [replace(first, headers=(*said, *beside)), replace(second, headers=tuple(reached))]
    asked: list[Any] = []
    found = script.compare(["a", "b"], before, SOURCES, lambda sources: asked.append(sources) or [cubins[1]])
    assert asked == [[before[1]], [second]]
    assert (found.source, found.whole) == (1, 1)


def test_other_code_other_resources_and_refusals_are_told(script: Any, cubins: list[Cubin]) -> None:
    first, second = cubins
    error = CompileError("no such thing", "C++", "correct it")
    more = replace(second, image=second.image + b"\0" * 16, registers=second.registers + 8)
    found = script.compare(
        ["a", "b", "c"],
        [*EARLIER, EARLIER[0]],
        [*SOURCES, SOURCES[0]],
        build({0: [first, second, first], 1: [second, more, error]}),
    )
    assert (found.whole, found.code, len(found.differences)) == (0, 0, 3)
    assert "another machine code" in found.differences[0] and found.differences[1].startswith("b: ")
    assert "now: no such thing" in found.differences[2]


def test_everything_that_ships_is_compared(script: Any) -> None:
    from outblas_lab.build.cubin_build import any_shape_files, pairs_for_any_shape, sources_of

    compared = {script.source_of(key, name) for key, name in script.packaged_pairs()}
    offered = {make_source(p, c) for p, c in pairs_for_any_shape(any_shape_files())}
    assert compared >= offered | set(sources_of([Library.packaged("h200")]))


def test_kernels_for_any_shape_count_if_they_were_on_offer_before(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas_lab.build.cubin_build import any_shape_files, pairs_for_any_shape

    now = pairs_for_any_shape(any_shape_files())
    file = (script.ROOT / script.ANY_SHAPE / "h200.npz").read_bytes()
    monkeypatch.setattr(script, "_git", lambda command, *_: b"h200.npz\n" if command == "ls-tree" else file)
    assert script.offered_before("a commit") == set(now)
    all_of_them, without = (set(script.packaged_pairs(known)) for known in (now, set(now) - {now[-1]}))
    assert all_of_them - without == {(now[-1][0].key, config_name(now[-1][1]))}


def test_a_stamp_keeps_what_it_replaces(script: Any) -> None:
    once = script.stamped({"gpu": "x", "kernels": "a"}, RECORD, "b")
    assert once == {"gpu": "x", "kernels": "b", "restamped": [{**RECORD, "replaced": "a"}]}
    twice = script.stamped(once, RECORD, "c")
    assert [r["replaced"] for r in twice["restamped"]] == ["a", "b"] and twice["kernels"] == "c"
    assert script.stamped({}, RECORD, "b")["restamped"] == [{**RECORD, "replaced": None}]


def test_tables_of_the_compared_kernels_are_stamped_too(script: Any) -> None:
    tables = {"a": {"kernels": "old"}, "b": {"kernels": "older still", "proved": {"kernels": "old", "date": "d"}}}
    found = script.stamped({"kernels": "old", "tables": tables}, RECORD, "new")["tables"]
    assert found == {
        "a": {"kernels": "new"},
        "b": {"kernels": "older still", "proved": {"kernels": "new", "date": "d"}},
    }


def test_a_bench_of_the_present_kernels_excuses_what_it_proved(script: Any, tmp_path: Path) -> None:
    told = read_result(ROOT / "results" / "h200" / "new_shapes_tn_fp16_fp32_offline.parquet")
    row = next(row for row in told.rows if row["config"])
    meta = {**told.meta, "provenance": {**told.provenance, "kernels": "now"}}
    bench = write_result([row, next(row for row in told.rows if not row["config"])], meta, tmp_path / "bench.parquet")
    found = script.proved_anew(bench, "now")
    key = Problem(row["m"], row["n"], row["k"]).key
    assert found == {
        "gpu": told.provenance["gpu"], "date": told.provenance["date"], "rows": [[key, row["config"], row["ours_us"]]]
    }  # fmt: skip
    with pytest.raises(UsageError, match="is of kernels now, the present ones are later"):
        script.proved_anew(bench, "later")


def without_kernels(path: Path) -> Path:
    """Write a published result that names no kernels."""
    told = read_result(ROOT / "results" / "h200" / "new_shapes_tn_fp16_fp32_offline.parquet")
    about = {key: value for key, value in told.provenance.items() if key not in ("kernels", "restamped")}
    return write_result(told.rows, {**told.meta, "provenance": about}, path)


def test_libraries_and_results_with_a_hash_are_stamped_and_nothing_else_changes(script: Any, tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    row = LibraryRow(P, "lt_auto", plain=LibraryChoice(Sm80DirectConfig(16, 8), 1.2, 1.1, 1.3))
    path = data / "libraries" / "h200.json"
    Library("h200", (row,), {"gpu": "NVIDIA H200"}).save(path)
    (results / "h200").mkdir(parents=True)
    without = without_kernels(results / "h200" / "without.parquet")
    told = read_result(without)
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
    monkeypatch.setattr(script, "offered_before", lambda commit: set())
    monkeypatch.setattr(script, "packaged_pairs", lambda before: pairs)
    monkeypatch.setattr(script, "older", lambda commit, pairs: script.Older("c" * 40, "old", EARLIER[:1], NAMED))
    monkeypatch.setattr(script, "_build", lambda sources, jobs, what: [cubins[what == "now"]])
    written: list[Any] = []
    monkeypatch.setattr(script, "restamp", lambda *arguments: written.append(arguments) or [])
    assert script.main(["--since", "x"]) == 1 and not written
    told = capsys.readouterr().out
    assert "sm80_direct_gemm" in told and "1 of 1 kernels differ; nothing is written" in told
    monkeypatch.setattr(script, "_build", lambda sources, jobs, what: [cubins[0]])
    tables: list[Any] = []
    monkeypatch.setattr(script, "write_table", lambda *arguments: tables.append(arguments) or ROOT / "table")
    assert script.main(["--since", "x", "--check"]) == 0 and not written and not tables
    assert script.main(["--since", "x"]) == 0 and written[0][1] == kernels_sha()
    assert tables == [(script.DATA, KernelRelease(__version__, kernels_sha()), NAMED, "old")]
    record = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (record["identical_cubins"], record["compared"], record["kernels_of_that_commit"]) == (1, 1, "old")


def test_the_sources_of_a_commit_are_its_own(script: Any) -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("no checkout")
    pairs = [(P.key, "sm80_direct_gemm:bm=16,bn=8,wm=1,wn=1,wk=1,unroll=2,pdl=false")]
    found = script.older("HEAD", pairs)
    assert len(found.commit) == 40 and found.named.release and len(str(found.named.sha)) == 64
    assert found.kernels == headers_sha(found.sources[0].headers), "by the present rule"
    assert isinstance(found.sources[0], Source) and found.sources[0].entry == "sm80_direct_gemm"
    with pytest.raises(UsageError, match="git rev-parse fails"):
        script.older("no-such-commit", pairs)
    with pytest.raises(UsageError, match="makes no sources of the shipped kernels"):
        script.older("HEAD", [(P.key, "sm99_none:")])


HEADERS = [("a.cuh", "int x;  // why\n")]


@pytest.fixture(name="recorded")
def recorded_fixture(script: Any, tmp_path: Path) -> Path:
    """A folder with libraries of these kernel files by the old rule, by the present one, and of none that it names."""
    hashes = {"h100": script.headers_sha_as_written(HEADERS), "h200": headers_sha(HEADERS)}
    for name, kernels in hashes.items():
        Library(name, (), {"gpu": name, "kernels": kernels}).save(tmp_path / "libraries" / f"{name}.json")
    return tmp_path


def test_a_recorded_hash_by_the_old_rule_is_written_by_the_new_one(script: Any, recorded: Path) -> None:
    other = recorded / "libraries" / "h200.json"
    before = other.read_bytes()
    path = recorded / "libraries" / "h100.json"
    table = recorded / "equal_kernels.json"
    assert script.rehash(HEADERS, recorded, recorded / "results") == [table, path]
    library = Library.load(path)
    assert library.provenance["kernels"] == headers_sha(HEADERS) and library.provenance["gpu"] == "h100"
    assert [r["replaced"] for r in library.provenance["rehashed"]] == [script.headers_sha_as_written(HEADERS)]
    assert other.read_bytes() == before, "it has the hash already"
    now, old = (
        KernelRelease(__version__, sha) for sha in (headers_sha(HEADERS), script.headers_sha_as_written(HEADERS))
    )
    assert EqualKernels.load(table) == EqualKernels(now, (old,))
    assert script.rehash(HEADERS, recorded, recorded / "results") == [], "done before"


def test_a_published_result_that_names_its_kernels_is_rehashed(script: Any, recorded: Path) -> None:
    unnamed = without_kernels(recorded / "results" / "h200" / "unnamed.parquet")
    before, told = unnamed.read_bytes(), read_result(unnamed)
    about = {**told.meta, "provenance": {**told.provenance, "kernels": script.headers_sha_as_written(HEADERS)}}
    named = write_result(told.rows, about, unnamed.with_name("named.parquet"))
    assert named in script.rehash(HEADERS, recorded, recorded / "results")
    assert read_result(named).provenance["kernels"] == headers_sha(HEADERS) and read_result(named).rows == told.rows
    assert unnamed.read_bytes() == before


@pytest.mark.parametrize("kernels", ["f" * 64, None])
def test_a_hash_of_other_files_is_not_rewritten_and_nothing_else_is(
    script: Any, recorded: Path, kernels: str | None
) -> None:
    Library("rtx", (), {"kernels": kernels}).save(recorded / "libraries" / "rtx.json")
    before = {path: path.read_bytes() for path in recorded.rglob("*.json")}
    with pytest.raises(UsageError, match="rtx.json is of kernels .*by the old rule"):
        script.rehash(HEADERS, recorded, recorded / "results")
    changed = [("a.cuh", "int x;  // a comment that was changed after the hash was recorded\n")]
    with pytest.raises(UsageError, match="h100.json is of kernels"):
        script.rehash(changed, recorded, recorded / "results")
    assert {path: path.read_bytes() for path in recorded.rglob("*.json")} == before


def test_the_package_has_been_rehashed(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "_save_library", lambda *arguments: pytest.fail("written"))
    monkeypatch.setattr(script, "write_table", lambda *arguments: pytest.fail("written"))
    assert script.main(["--rehash"]) == 0 and capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        script.main(["--rehash", "--since", "x"])
    with pytest.raises(SystemExit):
        script.main([])


def test_the_table_keeps_what_was_equal(script: Any, tmp_path: Path) -> None:
    old, now = KernelRelease("0.1.0", "old"), KernelRelease("0.2.0", "new")
    path = script.write_table(tmp_path, old, KernelRelease("0.0.9", "older"), "older")
    assert path == tmp_path / "equal_kernels.json"
    script.write_table(tmp_path, now, old, "old")
    assert EqualKernels.load(path) == EqualKernels(now, (KernelRelease("0.0.9", "older"), old))


def test_new_kernels_begin_a_table_if_all_was_proved_with_them(script: Any, tmp_path: Path) -> None:
    path, name = tmp_path / "equal_kernels.json", "grid1000:TN:fp16:fp32"
    EqualKernels(KernelRelease("0.1.0", "old"), (KernelRelease("0.0.9", "older"),)).save(path)
    before = path.read_bytes()
    other = Library("h200", (), {"kernels": "old", "tables": {name: {}}})
    with pytest.raises(UsageError, match=f"{name} were proved with other kernels"):
        script.begin_table([other], path)
    assert path.read_bytes() == before
    proved = {name: {"proved": {"kernels": kernels_sha()}}}
    script.begin_table([replace(other, provenance={**other.provenance, "tables": proved})], path)
    assert EqualKernels.load(path) == EqualKernels(KernelRelease(__version__, kernels_sha()))


def test_the_old_rule_counts_every_blank(script: Any) -> None:
    assert script.headers_sha_as_written([("a", "x ")]) != script.headers_sha_as_written([("a", "x")])
    assert headers_sha([("a", "x ")]) == headers_sha([("a", "x")])


def test_it_grows_by_what_was_compared(script: Any) -> None:
    first = EqualKernels(OLD)
    assert script.extended(first, MIDDLE, OLD, "a") == EqualKernels(MIDDLE, (OLD,))
    grown = script.extended(EqualKernels(MIDDLE, (OLD,)), NOW, MIDDLE, "b")
    assert grown == EqualKernels(NOW, (OLD, MIDDLE))
    assert script.extended(grown, NOW, MIDDLE, "b") == grown, "done twice"
    assert script.extended(grown, NOW, KernelRelease("0.0.9", "z"), "z").before == (OLD, MIDDLE, ("0.0.9", "z"))


def test_what_was_equal_to_other_kernels_goes(script: Any) -> None:
    """The compared commit has other kernels than those of the table."""
    assert script.extended(EqualKernels(MIDDLE, (OLD,)), OTHER, KernelRelease("0.3.0", "x"), "x").before == (
        ("0.3.0", "x"),
    )
