"""The finalists of a tuned table: the kernels among which the trials decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import write_json
from outblas.core.plain_files import read_object
from outblas.core.problem import Dtype, Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import BLOCK_FLOP, Table
from outblas.kernels.catalogue import launch_options, with_launch
from outblas.kernels.config_text import config_from_name
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.build_searches import earlier_searches
from outblas_lab.build.build_work import REOPENED_STARTS, BuildFolder
from outblas_lab.build.library_tables import rows_of_table
from outblas_lab.build.refine import tried_by_problem

#: Finalists of each launch option, at most, and how far behind the best of them, as a factor of speed.
PER_LAUNCH, WITHIN = 2, 0.97
#: Finalists of a problem that blocks time, at most: each takes about a second there.
PER_BLOCK_PROBLEM = 3
#: How much more a kernel must gain on the same problem in the other half-precision type to be a finalist here. One
#: type's search may have missed it.
TWIN_AHEAD = 0.01


def finalists(work: BuildFolder, table: Table) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> its finalists, for all problems of a tuned table.

    For each launch option, these are the two fastest kernels of the table's searches, if they are within 3% of each
    other. Kernels that the library installs are finalists, too. Where no kernel with PDL was searched, the best plain
    one with PDL is. A product of mode ``block`` has up to three plain ones, within 3% as well. Kernels that gain more
    in the other half-precision type are finalists. The list is empty if no search found a kernel that passed.

    Trials may have chosen the table already, also those of a library with which the work began. Then rows are left out,
    and keep their choice, if this work did not search them and nothing gains more in the other type.

    The first call writes the lists to ``<stem>_finalists.json``, so that all trials time the same. A later search
    deletes that file.

    Raises:
        UsageError: the table is not tuned.
    """
    path = work.finalists(table)
    if path.exists():
        return read_finalists(path)
    gpu, tried = gpu_of_device(work.gpu_index), earlier_searches(work, table, but="")
    library = work.load()
    part, found = rows_of_table(library, table), {}
    for row in part.rows:
        searched = tried.get(row.problem, [])
        ahead = ahead_in_twin(row, library, gpu) if row.problem.flops < BLOCK_FLOP else []
        if searched or ahead or "chosen_from" not in part.provenance:
            found[row.problem] = list(dict.fromkeys((*_of_row(row, searched, gpu), *ahead)))
    write_json(path, names_of_finalists(found))
    return found


def read_finalists(path: Path) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> its finalists from a file of :func:`names_of_finalists`."""
    do = "move the file elsewhere to choose the finalists again"
    known = read_object(path, "the finalists of a build", do)
    return {Problem.from_key(key): [config_from_name(name) for name in names] for key, names in known.items()}


def names_of_finalists(found: Mapping[Problem, Sequence[KernelConfig]]) -> dict[str, list[str]]:
    """Return problem key -> names of its finalists, as files have them."""
    return {problem.key: [config_name(c) for c in configs] for problem, configs in found.items()}


def _of_row(row: LibraryRow, tried: Sequence[Evaluation], gpu: Gpu) -> list[KernelConfig]:
    """Return the finalists of one problem, fastest first within a launch option."""
    speed = speed_by_kernel(tried)
    for launch in LAUNCHES:
        choice = row.choice(launch)
        if choice is not None:
            speed[choice.config] = max(choice.speedup, speed.get(choice.config, 0.0))
    ranked = sorted(speed, key=lambda config: (-speed[config], config_name(config)))
    if row.problem.flops >= BLOCK_FLOP:
        return near_the_best(ranked, "plain", speed, PER_BLOCK_PROBLEM)
    near = [c for launch in launch_options(row.problem, gpu) for c in near_the_best(ranked, launch, speed)]
    return list(dict.fromkeys((*near, *_with_pdl(row.problem, near, gpu))))


def ahead_in_twin(row: LibraryRow, library: Library, gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels that a library installs for the same problem in fp16 or bf16, the other of the two.

    They are those that gain :data:`TWIN_AHEAD` more there than the row's kernel of the same launch option, or for which
    the row has none. The row's own kernels are left out.
    """
    problem = row.problem
    other: Dtype = "fp16" if problem.dtype == "bf16" else "bf16"
    twin = library.row_of(replace(problem, dtype=other)) if problem.acc == "fp32" else None
    if twin is None:
        return []
    found: list[KernelConfig] = []
    for launch in LAUNCHES:
        theirs, mine = twin.choice(launch), row.choice(launch)
        if theirs is not None and (mine is None or theirs.speedup > mine.speedup + TWIN_AHEAD):
            found.append(theirs.config)
    return [c for c in dict.fromkeys(found) if c not in row.kernels and why_illegal(problem, c, gpu) is None]


def _with_pdl(problem: Problem, near: Sequence[KernelConfig], gpu: Gpu) -> list[KernelConfig]:
    """Return the best plain finalist with PDL, for a problem too long for a search among kernels with PDL.

    PDL saves it half a microsecond at least, which decides where it is level with its rivals.
    """
    if "pdl" in launch_options(problem, gpu) or not near or "pdl" not in near[0].knobs():
        return []
    twin = near[0].with_knobs(pdl=True)
    return [twin] if why_illegal(problem, twin, gpu) is None else []


def near_the_best(
    ranked: Sequence[KernelConfig],
    launch: Launch,
    speed: Mapping[KernelConfig, float],
    most: int = PER_LAUNCH,
    within: float = WITHIN,
) -> list[KernelConfig]:
    """Return the first kernels of a launch option that are near its best.

    Args:
        ranked: kernels, fastest first.
        within: least speed, as a factor of the best one's.
    """
    mine = [config for config in ranked if launch_of(config) == launch][:most]
    return [config for config in mine if speed[config] >= within * speed[mine[0]]]


def speed_by_kernel(tried: Iterable[Evaluation]) -> dict[KernelConfig, float]:
    """Return kernel -> its highest speed-up over the fastest rival, of those that passed."""
    found: dict[KernelConfig, float] = {}
    for e in tried:
        if e.status is Status.PASSED and e.speedup is not None:
            found[e.template] = max(e.speedup.ratio, found.get(e.template, 0.0))
    return found


#: Finalists of a launch option, at most, and how far behind the best of them, as a factor of speed.
REOPENED_PER_LAUNCH, REOPENED_WITHIN = {"plain": 3, "pdl": 2, "weights": 1}, 0.98
#: Plain finalists whose twins with PDL are finalists, too.
TWINS = 2


def reopened_finalists(work: BuildFolder, table: Table, step: str) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> its finalists, for the rows in which a step found a new one.

    These are up to three plain kernels, two with PDL and one for constant weights, within 2% of the fastest by that
    search. The two fastest plain kernels are finalists with PDL, too. A row without a new plain kernel among them keeps
    its earlier trials. The first call writes the lists to ``<stem>_<step>_finalists.json``, so that all trials time the
    same.

    Args:
        step: ``reopen`` or ``reopen_again``.

    Raises:
        UsageError: the step was not run.
    """
    path = work.reopened_finalists(table, step)
    if path.exists():
        return read_finalists(path)
    with Store(work.store(table)) as store:
        tried = tried_by_problem(store.evaluations(step))
    if not tried:
        raise UsageError(
            f"no row of {table} was searched again",
            "a search of the rows that earlier trials left open",
            f"run `outblas build-library --work {work.path} --tables {table} --steps {step}`",
        )
    gpu, known = gpu_of_device(work.gpu_index), earlier_finalists(work, table, step)
    found = {problem: finalists_of_search(problem, evaluations, gpu) for problem, evaluations in tried.items()}
    new = {p: cs for p, cs in found.items() if not known[p].issuperset(c for c in cs if launch_of(c) == "plain")}
    write_json(path, names_of_finalists(new))
    return new


def earlier_finalists(work: BuildFolder, table: Table, step: str) -> dict[Problem, set[KernelConfig]]:
    """Return problem -> its finalists before a step; rows without any are missing.

    Args:
        step: ``reopen`` or ``reopen_again``.
    """
    steps = list(REOPENED_STARTS)
    paths = [work.finalists(table), *(work.reopened_finalists(table, s) for s in steps[: steps.index(step)])]
    found: dict[Problem, set[KernelConfig]] = {}
    for path in filter(Path.exists, paths):
        for problem, configs in read_finalists(path).items():
            found.setdefault(problem, set()).update(configs)
    return found


def finalists_of_search(problem: Problem, tried: Sequence[Evaluation], gpu: Gpu) -> list[KernelConfig]:
    """Return the finalists of one problem, each once: plain ones first, fastest first within a launch option."""
    speed = speed_by_kernel(tried)
    ranked = sorted(speed, key=lambda config: (-speed[config], config_name(config)))
    near = {
        launch: near_the_best(ranked, launch, speed, REOPENED_PER_LAUNCH[launch], REOPENED_WITHIN)
        for launch in LAUNCHES
    }
    # PDL saves half a microsecond, which decides where a long product is level; early loads need a short one.
    launches: list[Launch] = ["pdl", "weights"] if "weights" in launch_options(problem, gpu) else ["pdl"]
    twins = [with_launch(config, launch) for launch in launches for config in near["plain"][:TWINS]]
    legal = [twin for twin in twins if why_illegal(problem, twin, gpu) is None]
    return list(dict.fromkeys((*near["plain"], *near["pdl"], *near["weights"], *legal)))


def plain_finalists(
    work: BuildFolder, table: Table, rows: Mapping[Problem, LibraryRow]
) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> its plain kernels, the row's plain choice first.

    They are the finalists of all trials; those of other launch options take part without programmatic dependent launch.

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
