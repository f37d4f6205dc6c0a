"""The finalists of rows that were searched once more: the kernels among which the trials 4 to 9 decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import Table
from outblas.kernels.catalogue import launch_options, with_launch
from outblas.kernels.legality import why_illegal
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas_lab.build.build_work import REOPENED_STARTS, BuildFolder
from outblas_lab.build.finalists import names_of_finalists, near_the_best, read_finalists, speed_by_kernel
from outblas_lab.build.refine import tried_by_problem

#: Finalists of a launch option, at most, and how far behind the best of them, as a factor of speed.
PER_LAUNCH, WITHIN = {"plain": 3, "pdl": 2, "weights": 1}, 0.98
#: Plain finalists whose twins with PDL are finalists, too.
TWINS = 2


def reopened_finalists(work: BuildFolder, table: Table, step: str) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> its finalists, for the rows in which a step found a new one.

    These are up to three plain kernels, two with PDL and one for constant weights, within 2% of the fastest by that
    search. The two fastest plain kernels are finalists with PDL, too. A row without a new plain kernel among them keeps
    its earlier trials. The first call writes the lists to ``<stem>_<step>_finalists.json``, so that all trials time the
    same.

    Args:
        work: directory of the build.
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
            "a search of the rows that earlier trials leave open",
            f"run `outblas build-library --work {work.path} --tables {table} --steps {step}`",
        )
    gpu, known = gpu_of_device(work.gpu_index), earlier_finalists(work, table, step)
    found = {problem: finalists_of_search(problem, evaluations, gpu) for problem, evaluations in tried.items()}
    new = {p: configs for p, configs in found.items() if not known[p].issuperset(_plain(configs))}
    write_json(path, names_of_finalists(new))
    return new


def earlier_finalists(work: BuildFolder, table: Table, step: str) -> dict[Problem, set[KernelConfig]]:
    """Return problem -> its finalists before a step; rows without any are missing.

    Args:
        work: directory of the build.
        table: the table; its first finalists are known.
        step: ``reopen`` or ``reopen_again``.
    """
    steps = list(REOPENED_STARTS)
    paths = [work.finalists(table), *(work.reopened_finalists(table, s) for s in steps[: steps.index(step)])]
    found: dict[Problem, set[KernelConfig]] = {}
    for path in filter(Path.exists, paths):
        for problem, configs in read_finalists(path).items():
            found.setdefault(problem, set()).update(configs)
    return found


def _plain(configs: Iterable[KernelConfig]) -> list[KernelConfig]:
    return [config for config in configs if launch_of(config) == "plain"]


def finalists_of_search(problem: Problem, tried: Sequence[Evaluation], gpu: Gpu) -> list[KernelConfig]:
    """Return the finalists of one problem, each once: plain ones first, fastest first within a launch option.

    Args:
        tried: its evaluations in that search.
        gpu: the GPU.
    """
    speed = speed_by_kernel(tried)
    ranked = sorted(speed, key=lambda config: (-speed[config], config_name(config)))
    near = {launch: near_the_best(ranked, launch, speed, PER_LAUNCH[launch], WITHIN) for launch in LAUNCHES}
    twins = [with_launch(config, launch) for launch in _worth_a_twin(problem, gpu) for config in near["plain"][:TWINS]]
    legal = [twin for twin in twins if why_illegal(problem, twin, gpu) is None]
    return list(dict.fromkeys((*near["plain"], *near["pdl"], *near["weights"], *legal)))


def _worth_a_twin(problem: Problem, gpu: Gpu) -> list[Launch]:
    """PDL saves half a microsecond, which decides where a long product is level; early loads need a short one."""
    return ["pdl", "weights"] if "weights" in launch_options(problem, gpu) else ["pdl"]
