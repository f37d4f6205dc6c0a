"""Search the weak rows of a tuned table once more: step ``again`` of `outblas build-library`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outblas.core.config import LAUNCHES, KernelConfig, launch_of
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import Table
from outblas.kernels.catalogue import first_search_candidates, launch_options, with_launch
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.runtime.device import gpu_of_device
from outblas.tune.agents.transfer import Transfer
from outblas.tune.neighbour_winners import LibraryNeighbours
from outblas_lab.build.build_searches import known_kernels, packaged_kernels, second_search
from outblas_lab.build.build_work import BuildFolder
from outblas_lab.build.library_tables import rows_of_table
from outblas_lab.build.refine import PreferredFirstAgent

#: A search's winner is about 1% slower when it is timed again, so a row below this is about level with its rivals.
WEAK_BELOW = 1.01
#: Measurements of a weak row, beside those of packaged kernels and of twins.
WEAK_BUDGET = 16
#: Winners of shapes nearby that are measured of a weak row.
NEARBY = 8


def search_weak_rows_again(work: BuildFolder, table: Table) -> None:
    """Search the weak rows of a tuned table once more, among untried candidates. The better kernel stays.

    A row is weak if it has no kernel for plain calls or for PDL, or if its plain kernel's speed-up is below
    :data:`WEAK_BELOW`. First come packaged kernels, their neighbours and the row's kernels with the other launch
    options. Kernels of the weight's intervals follow, and eight that won on shapes nearby, in either dtype. Then come
    what won on sister problems and the model's choices, in turns, 16 of them.

    Args:
        work: directory of the build.

    Raises:
        UsageError: the table is not tuned.
    """
    search_again(work, table, [row for row in rows_of_table(work.load(), table).rows if is_weak(row)])


def search_again(work: BuildFolder, table: Table, rows: Sequence[LibraryRow]) -> None:
    """Search some rows of a tuned table once more, as :func:`search_weak_rows_again` does.

    Args:
        work: directory of the build.
        rows: rows of the table in the work's library.
    """
    gpu, library = gpu_of_device(work.gpu_index), work.load()
    known, packaged = known_kernels(work, table, "again"), packaged_kernels(work, gpu)

    def worth_trying(problem: Problem, configs: Iterable[KernelConfig]) -> list[KernelConfig]:
        tried, options = known[problem].tried, launch_options(problem, gpu)
        return [c for c in dict.fromkeys(configs) if c not in tried and launch_of(c) in options]

    nearby = LibraryNeighbours(library)

    def preferred(row: LibraryRow) -> list[KernelConfig]:
        known_here = (*twins(row, gpu), *packaged.get(row.problem, ()), *of_intervals(row.problem, library, gpu))
        near = worth_trying(row.problem, nearby.of(row.problem, gpu))[:NEARBY]
        return worth_trying(row.problem, (*known_here, *near))

    first = {row.problem: preferred(row) for row in rows}
    then = Transfer(0, gpu, work.recorded(), library.installed())
    budget = WEAK_BUDGET + max(map(len, first.values()), default=0)

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        return worth_trying(problem, (*first[problem], *first_search_candidates(problem, gpu)))

    second_search(work, table, "again", list(first), PreferredFirstAgent(first, then), budget, offered)


def is_weak(row: LibraryRow) -> bool:
    """Return True if a row needs another search.

    It does without a kernel for ``plain`` or ``pdl``. It does, too, if the plain one's speed-up over the fastest
    baseline is below 1.01 (:data:`WEAK_BELOW`).
    """
    return row.plain is None or row.plain.speedup < WEAK_BELOW or row.choice("pdl") is None


def of_intervals(problem: Problem, library: Library, gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels of the interval that holds a problem's M, legal ones only, each once; empty without one."""
    interval = library.interval_index.find(problem)
    choices = () if interval is None else map(interval.row.choice, LAUNCHES)
    configs = dict.fromkeys(choice.config for choice in choices if choice is not None)
    return [config for config in configs if why_illegal(problem, config, gpu) is None]


def twins(row: LibraryRow, gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels of a row with each launch option that matters for the problem, legal ones only, each once."""
    options = launch_options(row.problem, gpu)
    installed = [choice.config for launch in LAUNCHES if (choice := row.choice(launch)) is not None]
    found = (with_launch(config, launch) for config in installed for launch in options)
    return [config for config in dict.fromkeys(found) if why_illegal(row.problem, config, gpu) is None]
