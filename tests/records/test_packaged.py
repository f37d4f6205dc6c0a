"""Packaged data: recording, catalogue and library agree, and so do the published figures and their files.

These tests read the package's own files, not fixtures.
"""

from __future__ import annotations

import json
import random
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages.notes import count_replaced_rows, notes_of_replaced
from pages.publish_results import Measured, check_published, generated_blocks

from outblas.core.config import LAUNCHES, KernelConfig, config_name, launch_allows
from outblas.core.evaluation import Status
from outblas.core.gpu_records import packaged_gpu, packaged_records
from outblas.core.problem import Problem
from outblas.core.suites import BLOCK_FLOP, SUITES, suite, tensor_parallel_weights
from outblas.kernels.catalogue import catalogue, catalogue_of
from outblas.kernels.epilogue import STACKED_GATE, why_not_fused
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LEVEL_ABOVE, LibraryRow
from outblas.records.proved_kernels import unproved_intervals, unproved_tables
from outblas.records.result_rows import launch_of_row
from outblas.records.results import PROVENANCE_FIELDS, bench_files, read_result, write_result
from outblas_lab.build.library_tables import kernels_since
from outblas_lab.pool.averages import table_label
from outblas_lab.recordings.recording import Recording, packaged
from outblas_lab.recordings.recording_files import CHOICE_CODES, STATUS_CODES
from outblas_lab.train.policy import Policy
from outblas_lab.train.policy_quality import recorded_searches, search_qualities
from support.helpers import ROOT

DATA = ROOT / "src" / "outblas" / "data"
LAB_DATA = ROOT / "lab" / "src" / "outblas_lab" / "data"
RESULTS = ROOT / "results" / "h200"
MOST_BYTES = 15_000_000
#: How many of the library's kernels are compiled here; always the same ones.
SAMPLE = 10


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording.load("h200")


@pytest.fixture(scope="module", params=packaged())
def each_recording(request: pytest.FixtureRequest) -> Recording:
    """Every packaged recording in turn."""
    return Recording.load(request.param)


@pytest.fixture(scope="module", params=sorted(set(packaged()) & set(packaged_records())))
def of_a_catalogue(request: pytest.FixtureRequest) -> Recording:
    """Every packaged recording that is named after its GPU."""
    return Recording.load(request.param)


@pytest.fixture(scope="module")
def library() -> Library:
    return Library.packaged("h200")


@pytest.fixture(scope="module", params=sorted(file.stem for file in (DATA / "libraries").glob("*.json")))
def each_library(request: pytest.FixtureRequest) -> Library:
    """Every packaged library in turn."""
    return Library.packaged(request.param)


def installed(library: Library) -> list[tuple[Problem, KernelConfig]]:
    """Every (problem, kernel) that the library would launch."""
    choices = ((row.problem, row.choice(launch)) for row in library.rows for launch in LAUNCHES)
    return [(problem, choice.config) for problem, choice in choices if choice is not None]


def check_provenance(provenance: dict[str, Any], gpu: str) -> None:
    """A measurement on a GPU of a kind; its driver, toolchain, time and commit are all known."""
    assert set(PROVENANCE_FIELDS) <= set(provenance)
    assert provenance["gpu"] in packaged_records()[gpu].products
    assert re.fullmatch(r"\d+(\.\d+)+", provenance["driver"])
    assert all(provenance["toolchain"][part] for part in ("outblas", "python", "nvrtc", "torch", "cublas"))
    assert datetime.fromisoformat(provenance["date"]).utcoffset() is not None
    commits = provenance["commit"].split("; ")  # a bench that went on after a kill names all of them
    assert all(re.fullmatch(r"[0-9a-f]{7,40}", commit) for commit in commits) and provenance["command"]


def test_the_recording_is_small_enough_to_ship() -> None:
    files = list((LAB_DATA / "recordings").rglob("*.parquet"))
    assert files and sum(f.stat().st_size for f in files) < MOST_BYTES


def test_the_recording_is_of_a_catalogue_on_grid1000(recording: Recording) -> None:
    """A catalogue of its own time: today's may be wider, until the next recording."""
    of_layout = {layout: {p for p in recording.problems if p.layout == layout} for layout in ("TN", "NN")}
    assert of_layout["TN"] == set(suite("grid1000"))
    assert of_layout["NN"] <= set(suite("grid1000", "NN")) and len(of_layout["NN"]) >= 988
    assert len(recording.problems) == sum(map(len, of_layout.values()))
    assert len(set(recording.catalogue)) == len(recording.catalogue) >= 128
    assert len(catalogue("h200")) >= len(recording.catalogue)


def test_every_family_of_the_catalogue_was_measured(recording: Recording) -> None:
    """Both tiled families are in it; the one that serves no problem of grid1000 is not."""
    passed = (recording.status == STATUS_CODES[Status.PASSED]).any(axis=0)
    measured = {type(config) for config, some in zip(recording.catalogue, passed, strict=True) if some}
    assert measured == {type(config) for config in recording.catalogue}
    assert {Sm90WgmmaConfig, Sm80MmaConfig} <= measured and Sm80GemvConfig not in measured


def test_every_cell_passed_or_was_not_tried(of_a_catalogue: Recording) -> None:
    """The catalogue holds proven kernels only: a wrong, faulty or slow-to-die cell is a bug that ships."""
    fine = [STATUS_CODES[s] for s in (Status.PASSED, Status.LEFT_OUT, Status.ILLEGAL)]
    assert np.isin(of_a_catalogue.status, fine).all()
    passed = of_a_catalogue.status == STATUS_CODES[Status.PASSED]
    assert passed.any(axis=1).all(), "every problem has a kernel"
    assert (of_a_catalogue.median_us[passed] > 0).all() and (of_a_catalogue.rounds[passed] > 0).all()
    assert np.isnan(of_a_catalogue.median_us[~passed]).all()


def test_the_recordings_verdict_of_legality_is_the_predicates(of_a_catalogue: Recording) -> None:
    gpu, kernels = of_a_catalogue.gpu, of_a_catalogue.catalogue
    for problem, status in list(zip(of_a_catalogue.problems, of_a_catalogue.status, strict=True))[::37]:
        illegal = [why_illegal(problem, config, gpu) is not None for config in kernels]
        assert illegal == (status == STATUS_CODES[Status.ILLEGAL]).tolist(), problem.key


def test_no_model_chose_a_cell_of_the_recording_without_a_model() -> None:
    """300 kernels on each of 100 problems: a grid, and the rest at random; the few that failed are recorded, too."""
    uncut = Recording.load("uncut")
    chosen = np.isin(uncut.chosen, [CHOICE_CODES[name] for name in ("grid", "random")])
    assert len(uncut.problems) == 100 and (chosen.sum(axis=1) == 300).all()
    assert (uncut.status[~chosen] == STATUS_CODES[Status.LEFT_OUT]).all()
    passed = uncut.status == STATUS_CODES[Status.PASSED]
    assert passed.sum() >= 28_000 and (uncut.median_us[passed] > 0).all() and (uncut.rounds[passed] > 0).all()


def test_every_problem_has_its_baselines(each_recording: Recording) -> None:
    assert {"torch", "cublas", "lt_heuristic", "lt_auto"} <= set(each_recording.baselines)
    for name in ("torch", "cublas", "lt_heuristic", "lt_auto"):
        assert (each_recording.baselines[name] > 0).all(), name


def test_a_library_decides_grid1000_with_legal_kernels(each_library: Library) -> None:
    """Not each of the catalogue: that may be younger, and refining a row tries what is near its best candidates."""
    assert {row.problem for row in each_library.rows} >= set(suite("grid1000"))
    gpu = packaged_gpu(each_library.gpu)
    packaged = set(catalogue_of(gpu))
    assert any(config in packaged for _, config in installed(each_library))
    for problem, config in installed(each_library):
        assert why_illegal(problem, config, gpu) is None, f"{problem.key}: {config_name(config)}"


def test_a_library_has_intervals_of_legal_kernels_ahead_or_level(each_library: Library) -> None:
    gpu, tables = packaged_gpu(each_library.gpu), each_library.provenance.get("intervals", {})
    assert bool(each_library.intervals) == bool(tables)
    for one in each_library.intervals:
        for choice in filter(None, (one.row.choice(launch) for launch in LAUNCHES)):
            ends = [why_illegal(one.weight.problem(m), choice.config, gpu) for m in (one.first, one.last)]
            assert ends == [None, None] and choice.low > LEVEL_ABOVE, one.row.problem.key


def test_a_library_has_gates_of_legal_kernels_ahead_or_level(each_library: Library) -> None:
    gpu = packaged_gpu(each_library.gpu)
    assert bool(each_library.gates) == bool(each_library.provenance.get("gates"))
    for one in each_library.gates:
        choice = one.row.plain
        for m in (one.first, one.last) if choice is not None else ():
            problem = one.weight.problem(m)
            assert why_illegal(problem, choice.config, gpu) is None and choice.low > LEVEL_ABOVE
            assert why_not_fused(problem, choice.config, STACKED_GATE) is None


def test_a_library_installs_what_is_ahead_or_level_only(each_library: Library) -> None:
    for row in each_library.rows:
        timed = bool(row.baseline)  # large products wait for their blocks; until then torch computes them
        assert timed or (row.problem.flops >= BLOCK_FLOP and row == LibraryRow(row.problem)), row.problem.key
        for launch in LAUNCHES:
            choice = row.choice(launch)
            if choice is not None:
                assert LEVEL_ABOVE < choice.low <= choice.speedup <= choice.high, row.problem.key
                assert launch_allows(launch, choice.config), row.problem.key


def test_some_of_a_librarys_kernels_compile_without_a_spill(each_library: Library) -> None:
    pytest.importorskip("cuda.bindings", reason="NVRTC is not installed")
    from outblas.kernels.source import make_source
    from outblas.runtime.nvrtc import compile_source
    from outblas.runtime.sass import check_static

    first = {config_name(config): (problem, config) for problem, config in reversed(installed(each_library))}
    assert len(first) >= SAMPLE
    by_family = {config.family: name for name, (_, config) in sorted(first.items())}
    assert {"sm90_wgmma_gemm", "sm80_mma_gemm"} <= set(by_family)
    chosen = {*random.Random(0).sample(sorted(first), SAMPLE), *by_family.values()}
    for name in chosen:
        source = make_source(*first[name])
        cubin = compile_source(source, cache=None)
        assert (cubin.spill_bytes, cubin.stack_bytes, cubin.facts.ldl, cubin.facts.stl) == (0, 0, 0, 0), name
        assert check_static(cubin.facts, source, cubin) is None, name


def test_a_library_is_of_these_kernels(each_library: Library) -> None:
    """The rows were proved with the cubins of these kernel files.

    After a change that leaves every cubin equal, run tools/restamp.py. After any other change, prove and time the rows
    again.
    """
    assert each_library.provenance["kernels"] == kernels_sha(), (
        "python tools/restamp.py --since <commit before the change>"
    )
    assert unproved_tables(each_library) == [], "outblas build-library --steps bench --modes offline"
    assert unproved_intervals(each_library) == [], "outblas build-library --steps prove_intervals --begin-with"
    for table, about in each_library.provenance.get("gates", {}).items():
        assert about["kernels"] == kernels_sha(), f"outblas build-library --steps gates --tables {table}"
    for last in each_library.provenance.get("restamped", [])[-1:]:  # none: made by these very files
        same = last.get("identical_sources", 0) + last["identical_cubins"] + last["identical_code_sections_only"]
        assert last["compared"] == same > 1000


def test_the_kernels_for_unlisted_shapes_were_proved_with_these_kernels(library: Library) -> None:
    made = json.loads((ROOT / "results" / "any_shapes" / "h200_proved.json").read_text())
    assert made["provenance"]["date"] >= kernels_since(library), "outblas fit any-shape prove"


def test_a_library_says_where_and_when_it_was_measured(each_library: Library) -> None:
    check_provenance(dict(each_library.provenance), each_library.gpu)
    parts = (each_library.provenance["tables"], each_library.provenance.get("intervals", {}))
    for about in (about for part in parts for about in part.values()):
        check_provenance(about, each_library.gpu)


def test_a_recording_says_where_and_when_it_was_measured(each_recording: Recording) -> None:
    for part in each_recording.provenance.get("parts", [each_recording.provenance]):
        check_provenance(part, each_recording.gpu.name)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_bench_says_where_and_when_it_was_measured(gpu: str) -> None:
    for path in bench_files(RESULTS.parent / gpu):
        check_provenance(read_result(path).provenance, gpu)


@pytest.mark.slow  # `tools/published_pages.py --check` of docs/results/index.md runs in any case
def test_summary_pictures_and_generated_blocks_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert check_published(Path("results", RESULTS.name)) == []
    assert [page for page, _ in generated_blocks(Measured(Path("results/h200"))) if not Path(page).is_file()] == []


@pytest.fixture(scope="module")
def judged() -> set[tuple[Problem, str, str]]:
    """(problem, launch option, kernel) that some offline bench publishes."""
    rows = (row for path in bench_files(RESULTS) for row in read_result(path).rows if row["mode"] == "offline")
    return {(Problem.from_json(row), launch_of_row(row), row["config"]) for row in rows if not row["fallback"]}


@pytest.mark.parametrize("path", bench_files(RESULTS), ids=lambda path: path.name)
def test_the_published_benches_are_of_the_packaged_library(
    path: Path, library: Library, judged: set[tuple[Problem, str, str]]
) -> None:
    result = read_result(path)
    head = result.rows[0]
    kind = [head[c] for c in ("layout", "dtype", "acc")]
    notes = (ROOT / "docs/results/tables.md").read_text("utf-8")
    assert path.stem == "_".join((result.suite, *kind, head["mode"])).lower()
    if head["mode"] in ("unmeasured", "learned"):  # drawn shapes, by the package's choices or by learning
        assert result.suite == "drawn" and "seed" in result.meta["shapes"]
        return
    if result.suite == "llm_tp_drawn":  # benchmarks/llm_tp_drawn.py: by the intervals, else as any shape
        assert "seed" in result.meta["shapes"]
        assert {(row["n"], row["k"]) for row in result.rows} == set(tensor_parallel_weights())
        for row in (row for row in result.rows if not row["fallback"]):
            known = library.lookup(Problem.from_json(row))
            choice = known and known.choice(launch_of_row(row))
            assert known is None or known.is_open or (choice and row["config"] == config_name(choice.config))
        return
    if result.suite not in SUITES:  # benchmarks/new_shapes.py: what an agent finds where no library has anything
        assert not any(library.lookup(Problem.from_json(row)) for row in result.rows)
        assert min(row["published"] for row in result.rows if not row["fallback"]) >= 0.99
        return
    if head["mode"] != "offline":  # a sample; where the library has changed since, the tables' notes say so
        assert count_replaced_rows(result, library) == 0 or f"{head['mode']}: from an earlier library" in notes
        return
    assert list(dict.fromkeys(Problem.from_json(row) for row in result.rows)) == suite(result.suite, *kind)
    for row in result.rows:
        found = library.lookup(Problem.from_json(row))
        assert found is not None
        choice = found.choice(launch_of_row(row))
        assert row["fallback"] or choice is not None
        if choice is not None and row["config"] != config_name(choice.config):  # chosen and judged in another suite
            assert (found.problem, launch_of_row(row), config_name(choice.config)) in judged
            assert f"- {table_label(result.suite, head)}: from an earlier library" in notes


def test_a_bench_of_an_earlier_library_is_said_to_be_so(tmp_path: Path, library: Library) -> None:
    directory = tmp_path / library.gpu
    directory.mkdir()
    path = ROOT / "results/h200/grid1000_tn_fp16_fp32_offline.parquet"
    result = read_result(path)
    assert count_replaced_rows(result, library) == 0
    ours = [i for i, row in enumerate(result.rows) if not row["fallback"]]
    rows = [dict(row) for row in result.rows]
    rows[ours[0]]["config"] = rows[ours[0]]["config"].replace("bm=", "bm=9")
    rows[ours[1]] |= {"fallback": True, "config": "", "speedup": None, "published": 1.0, "ran": None, "by_start": None}
    read = [read_result(write_result(rows, result.meta, directory / path.name))]
    of = f"from an earlier library; 2 of {len(rows)} rows now have another kernel"
    assert notes_of_replaced(directory, read) == [f"- grid1000 TN fp16/fp32, offline: {of}"]
    assert notes_of_replaced(directory.rename(tmp_path / "b1"), read) == [], "no library of that GPU to compare with"


def test_every_resource_of_the_package_is_of_a_known_kind() -> None:
    """A stray file would ship with a wheel; a missing kind would break it."""
    # .so and .pack: the extension and the cubins, where they were built. The last six: templates of exports.
    packaged = {".c", ".cuh", ".h", ".json", ".npz", ".cpp", ".cu", ".md", ".nix", ".toml", ".txt"}
    assert _kinds(DATA.parent) - {".so", ".pack"} == packaged
    assert _kinds(LAB_DATA.parent) == {".parquet", ".npz", ".cu", ".md", ".css", ".j2", ".js"}
    assert [p for data in (DATA, LAB_DATA) for p in data.rglob("*") if p.name.endswith(".tmp")] == []


def _kinds(folder: Path) -> set[str]:
    files = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.suffix for p in files} - {".py", ".typed", ""}


def test_the_packaged_policy_loads_and_ranks_well_what_it_was_trained_on() -> None:
    """Over a sample of the packaged recording: a policy of other inputs, or one that was never trained, does not."""
    policy, recording = Policy.load("h200"), Recording.load("h200")
    assert json.loads(policy.about)["settings"]["budget"] == 8
    first = search_qualities(policy, recorded_searches(policy, recording, recording.problems[::50]), 1)[:, 0]
    assert np.exp(np.mean(np.log(first))) > 0.97
