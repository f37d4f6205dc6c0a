"""The plain kernels of a table that its searches found: among them second winners are chosen."""

from __future__ import annotations

from collections.abc import Mapping

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.kernels.catalogue import with_launch
from outblas.kernels.legality import why_illegal
from outblas.records.library_row import LibraryRow
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.build_work import REOPENED_STARTS, BuildFolder
from outblas_lab.build.finalists import finalists, read_finalists


def plain_finalists(
    work: BuildFolder, table: Table, rows: Mapping[Problem, LibraryRow]
) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> its plain kernels, the row's plain choice first.

    They are the finalists of all trials; those of other launch options take part without programmatic dependent launch.

    Args:
        work: directory of the build.
        rows: problem -> its row, for all problems of the table.

    Raises:
        UsageError: the table is not tuned.
    """
    gpu, known = gpu_of_device(work.gpu_index), [finalists(work, table)]
    reopened = (work.reopened_finalists(table, step) for step in REOPENED_STARTS)
    known += [read_finalists(path) for path in reopened if path.exists()]
    found = {}
    for problem, row in rows.items():
        installed = [] if row.plain is None else [row.plain.config]
        listed = [with_launch(config, "plain") for each in known for config in each.get(problem, ())]
        legal = [config for config in listed if why_illegal(problem, config, gpu) is None]
        found[problem] = list(dict.fromkeys([*installed, *legal]))
    return found
