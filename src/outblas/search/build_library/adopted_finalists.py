"""Begin a GPU's tables with the finalists of another GPU's build: the trials here decide among them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outblas.core.config import KernelConfig, launch_of
from outblas.core.errors import UsageError
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import BLOCK_FLOP, Table
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.library_tables import rows_of_table, with_table_rows
from outblas.records.provenance import collect_provenance
from outblas.runtime.device import gpu_of_device
from outblas.search.build_library.build_work import REOPENED_STARTS, BuildFolder
from outblas.search.build_library.finalists import names_of_finalists, read_finalists


def adopt(work: BuildFolder, other: Path, tables: Sequence[Table]) -> None:
    """Give tables that a directory lacks the finalists of another GPU's build, in place of a search.

    Of each row the last list of finalists counts, since a later search tries the earlier one's best again. The kernels
    that the other library installs are finalists, too. Kernels that are illegal on this GPU are left out.

    The new rows have no kernel: nothing was timed here. The steps ``trial`` and ``choose`` give them theirs. Each table
    is one printed line, e.g. ``adopt llm:TN:fp16:fp32: 1318 finalists of h200``.

    Args:
        work: directory of the build; its library and its lists of finalists are saved.
        other: directory of the other build, with ``library.json`` and, if it has trials, its lists of finalists.
        tables: the tables to begin; those that work has stay.

    Raises:
        UsageError: ``other`` has no library, is of the same kind of GPU, or lacks a table.
    """
    source = BuildFolder(other)
    if not source.library.exists():
        raise UsageError(f"{other} has no library.json", "the directory of another GPU's build", "name that")
    gpu, library, theirs = gpu_of_device(work.gpu_index), work.load(), Library.load(source.library)
    if theirs.gpu == gpu.name:
        raise UsageError(
            f"{other} is of this kind of GPU, {gpu.name}", "another one", "use --begin-with for its tables"
        )
    for table in tables:
        if str(table) in library.provenance["tables"]:
            continue
        found = _finalists_here(source, rows_of_table(theirs, table), table, gpu)
        write_json(work.finalists(table), names_of_finalists(found))
        about = {key: theirs.provenance[key] for key in ("date", "commit")}
        measured = {**collect_provenance(f"adopt {table}", work.gpu_index), "adopted": {"gpu": theirs.gpu, **about}}
        fresh = [LibraryRow(p) for p in found if library.row_of(p) is None]
        library = with_table_rows(library, fresh, table, measured)
        library.save(work.library)
        print(f"adopt {table}: {sum(map(len, found.values()))} finalists of {theirs.gpu}", flush=True)


def _finalists_here(source: BuildFolder, part: Library, table: Table, gpu: Gpu) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> the finalists that another build has for it and that are legal here."""
    last: dict[Problem, list[KernelConfig]] = {}
    lists = (source.finalists(table), *(source.reopened_finalists(table, step) for step in REOPENED_STARTS))
    for path in filter(Path.exists, lists):
        last |= read_finalists(path)
    found = {p: dict.fromkeys((*last.get(p, ()), *configs)) for p, configs in part.installed().items()}
    return {p: [c for c in configs if _can_win(p, c, gpu)] for p, configs in found.items()}


def _can_win(problem: Problem, config: KernelConfig, gpu: Gpu) -> bool:
    """Blocks choose large products, and among plain kernels only."""
    fitting = problem.flops < BLOCK_FLOP or launch_of(config) == "plain"
    return fitting and why_illegal(problem, config, gpu) is None
