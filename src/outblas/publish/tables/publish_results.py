"""Publish result files: summary.json, the pictures, and every generated block of a page.

A generated block stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``. Its text comes from the committed
result files or from the code, and is the same every time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import OutblasError, RecordError
from outblas.core.files import write_atomic
from outblas.kernels.families.registry import FAMILIES
from outblas.llm.train.training_cost import cost_table
from outblas.publish.tables import reference_blocks
from outblas.publish.tables.across_block import ACROSS, across_block, across_files
from outblas.publish.tables.again_table import again_table
from outblas.publish.tables.all_rows_table import markdown_table
from outblas.publish.tables.compare_block import PICTURE as COMPARE_PICTURE
from outblas.publish.tables.compare_block import compare_block, comparison_of
from outblas.publish.tables.compare_picture import compare_svg
from outblas.publish.tables.counter_table import counters_text
from outblas.publish.tables.headline import ANY_SHAPES, headline_rows, headline_table
from outblas.publish.tables.live_block import LIVE, LIVE_PICTURE, live_block, live_files, live_svg
from outblas.publish.tables.notes import (
    notes_of_accuracy,
    notes_of_cutlass,
    notes_of_earlier_kernels,
    notes_of_inductor,
    notes_of_large_products,
    notes_of_replaced,
    notes_of_retune,
)
from outblas.publish.tables.peer_tables import cutlass_table, transformer_table
from outblas.publish.tables.recipe_block import RECIPE, recipe_block
from outblas.publish.tables.rival_tables import ampere_table, cuda_l2_table
from outblas.publish.tables.speedup_picture import speedup_svg
from outblas.publish.tables.weak_spots import weak_spots
from outblas.publish.tables.whole_models_table import whole_models_block
from outblas.records.averages import Row
from outblas.records.results import Result, bench_files, read_result
from outblas.records.summary import summary_rows, summary_text, why_stale
from outblas.search.compare.compare_result import read_comparison

PICTURES = Path("docs/img")
#: Of ``benchmarks/profile_regimes.py``, beside the result files.
COUNTERS = "ncu.json"


@dataclass(frozen=True)
class Measured:
    """All result files of one GPU, read once.

    Attributes:
        folder: their folder, e.g. ``results/h200``.
    """

    folder: Path

    @functools.cached_property
    def results(self) -> list[Result]:
        """The bench files, by name."""
        return [read_result(path) for path in bench_files(self.folder)]

    @functools.cached_property
    def summary(self) -> list[Row]:
        """The rows of summary.json."""
        return summary_rows(self.folder)


def publish(folder: Path, root: Path = Path()) -> list[Path]:
    """Write ``folder/summary.json``, the pictures and every generated block; return the paths.

    Args:
        folder: result files of the GPU that has the pictures and the detailed tables. The folders of other GPUs lie
            beside it and have rows in the small tables.
        root: folder with README.md and docs/.

    Raises:
        RecordError: a result file cannot be read, a page lacks its markers, or the disk refuses a file. Everything is
            computed before anything is written.
    """
    return [write_atomic(path, text.encode()) for path, text in _wanted(Path(folder), Path(root)).items()]


def check_published(folder: Path, root: Path = Path()) -> list[str]:
    """Return one line for each published file that is missing or stale.

    Args:
        folder: as of :func:`publish`.
        root: as of :func:`publish`.

    Raises:
        RecordError: as :func:`publish`.
    """
    lines = (why_stale(path, text) for path, text in _wanted(Path(folder), Path(root)).items())
    return [line for line in lines if line]


def generated_blocks(measured: Measured) -> dict[tuple[str, str], Callable[[], str]]:
    """Return (page, name of the block) -> the block's text, for every page from the root of the repository.

    Args:
        measured: result files of the GPU with the detailed tables.
    """
    folder = measured.folder
    compared = comparison_of(folder)
    blocks: dict[tuple[str, str], Callable[[], str]] = {
        ("README.md", "results"): lambda: _headline(folder),
        ("docs/results/index.md", "results"): lambda: _headline(folder),
        ("docs/results/tables.md", "tables"): lambda: markdown_table(measured.summary, _notes(folder)),
        ("docs/results/method.md", "again"): lambda: again_table(measured.results),
        ("docs/results/transformer.md", "transformer"): lambda: transformer_table(folder),
        ("docs/results/whole-models.md", "whole_models"): lambda: whole_models_block(folder),
        ("docs/results/cutlass.md", "cutlass"): lambda: cutlass_table(folder),
        ("docs/results/ampere-peers.md", "ampere"): lambda: ampere_table(folder.parent),
        ("docs/results/cuda-l2.md", "cuda-l2"): lambda: cuda_l2_table(folder.parent),
        ("docs/use/when-not.md", "weak"): lambda: weak_spots(folder, measured.results),
        ("docs/use/environment-variables.md", "variables"): reference_blocks.variable_table,
        ("docs/kernels/counters.md", "ncu"): lambda: counters_text(folder / COUNTERS),
        ("docs/llm/recipe.md", "cost"): cost_table,
        ("docs/reference/knobs.md", "knobs"): reference_blocks.knob_page,
        ("docs/search/agents.md", "agents"): reference_blocks.agent_table,
        ("docs/search/compare-live.md", "live"): lambda: _live(folder),
        ("docs/search/published-recipe.md", "recipe"): lambda: recipe_block(folder / RECIPE),
    }
    across = across_files(folder.parent)
    if across:
        blocks["docs/search/across-gpus.md", "across"] = lambda: across_block(across)
    if compared is not None:
        picture = f"../img/{COMPARE_PICTURE}"
        blocks["docs/search/agents.md", "compare"] = lambda: compare_block(read_comparison(compared), picture)
    for family in FAMILIES:
        page = f"docs/kernels/{family.replace('_', '-')}.md"
        blocks[page, "knobs"] = functools.partial(reference_blocks.knob_table, family)
    return blocks


def _headline(folder: Path) -> str:
    """Return the small table: every folder beside this one that has result files of a GPU, this one first."""
    folders = {path.parent for path in folder.parent.glob("*/*.parquet") if path.name not in (ACROSS, LIVE)}
    beside = sorted(path for path in folders if path != folder and path.name != ANY_SHAPES)
    every = [Measured(path) for path in (folder, *beside)]
    return headline_table([row for one in every for row in headline_rows(one.folder, one.results)])


def _live(folder: Path) -> str:
    """Return the tables of live comparisons, with the picture of this folder's if it has one."""
    picture = f"../img/{LIVE_PICTURE}" if (folder / LIVE).exists() else None
    return live_block(live_files(folder.parent), picture)


def _notes(folder: Path) -> list[str]:
    about_library = [*notes_of_replaced(folder), *notes_of_earlier_kernels(folder)]
    beside = (notes_of_large_products, notes_of_retune, notes_of_cutlass, notes_of_inductor, notes_of_accuracy)
    return [*about_library, *(line for notes in beside for line in notes(folder))]


def _wanted(folder: Path, root: Path) -> dict[Path, str]:
    """Return path -> text of every published file; a page that is not there has no block."""
    measured = Measured(folder)
    wanted = {folder / "summary.json": summary_text(folder), root / PICTURES / "speedup.svg": picture_text(measured)}
    compared = comparison_of(folder)
    if compared is not None:
        wanted[root / PICTURES / COMPARE_PICTURE] = compare_svg(read_comparison(compared))
    if (folder / LIVE).exists():
        wanted[root / PICTURES / LIVE_PICTURE] = live_svg(folder / LIVE)
    for (page, name), text in generated_blocks(measured).items():
        path = root / page
        if path in wanted or path.exists():
            wanted[path] = with_block(wanted.get(path) or _read(path), name, _block(text, name, folder), page)
    return wanted


def _block(text: Callable[[], str], name: str, folder: Path) -> str:
    """Return a block's text; raise RecordError if a result file lacks a field or has another type in it."""
    try:
        return text()
    except OutblasError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        wrong = f"block {name} cannot be made of the result files of {folder} ({type(error).__name__}: {error})"
        raise RecordError(wrong, "files with every field", "restore the file, or measure it again") from error


def with_block(page: str, name: str, text: str, where: str) -> str:
    """Return a page's text with a block's new text between its markers.

    The markers are lines ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; they stay, and the text has lines of its
    own.

    Args:
        page: the page's text.
        name: the block's name.
        text: the block's new text.
        where: the page's name, for the error.

    Raises:
        RecordError: the page does not have each marker once, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise RecordError(f"{where} has no place for block {name}", f"{begin} and {end} once each", "add the two lines")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(
            f"cannot read {path}: {error.strerror}", "a file of the repository", "run it from there"
        ) from error


def picture_text(measured: Measured) -> str:
    """Return the SVG picture of the speed-ups of grid1000 TN fp16 fp32 offline; without that bench, of the first bench.

    Of several files with it the one with most rows counts.
    """
    best: Any = None
    for result in measured.results:
        for row in result.rows:
            key = tuple(row[c] for c in ("layout", "dtype", "acc", "mode"))
            rank = (result.suite != "grid1000", key != ("TN", "fp16", "fp32", "offline"), -len(result.rows))
            if best is None or rank < best[0]:
                best = (rank, result, key)
    assert best is not None, "bench_files gives at least one file, read_result at least one row"
    _, result, key = best
    kind = (*key, False)  # without and with PDL: constant weights are the table's
    rows = [r for r in result.rows if tuple(r[c] for c in ("layout", "dtype", "acc", "mode", "early")) == kind]
    return speedup_svg(result, rows)
