"""``outblas profile``: hardware counters of a tune run's best candidates, into the run's own store.

Counters explain and decide nothing. Readers of the store see them; the search does not when the run is resumed. A
candidate that the run recorded as passed is not proved again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import lock_folder
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.legality import why_illegal
from outblas.records.provenance import collect_provenance
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas.tune.tune_run import measured_on, open_store
from outblas_lab.pool import ncu
from outblas_lab.pool.counters import counters_of
from outblas_lab.pool.ncu_target import ProfiledAlgorithm, Profiler, ProfileWork, cache_of

#: Problems profiled by one start of ncu and recorded together: a start costs seconds, a kill loses as many.
PROBLEMS_AT_ONCE = 8

Pair = tuple[Problem, KernelConfig]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ProfileResult:
    """Result of :func:`run_profile`.

    Attributes:
        counters: (problem, config) -> {name of the counter: value} of every requested pair, in the order of
            :func:`select_pairs`.
        new: number of pairs profiled by this call; the store held the others.
    """

    counters: dict[Pair, dict[str, float]]
    new: int


@dataclass(frozen=True)
class ProfileRequest:
    """Request for one call of :func:`run_profile`.

    Attributes:
        gpu_index: CUDA's index of the GPU.
        top: number of candidates per problem, the fastest that passed; 1 or more. Unused with ``config``.
        mnk: ``M_N_K`` of the problems, e.g. ``["64_4096_64"]``; empty takes all of the run.
        config: a candidate that replaces the fastest, on every problem on which it passed.
        tool: path of ncu; None searches the usual places.
        timeout_s: seconds for each start of ncu.
    """

    path: Path
    gpu_index: int
    top: int = 4
    mnk: Sequence[str] = ()
    config: KernelConfig | None = None
    tool: str | None = None
    timeout_s: float = 600.0
    command: str = "outblas profile"


def run_profile(request: ProfileRequest, progress: Progress | None = None) -> ProfileResult:
    """Profile candidates of a tune run; what its store holds is not profiled again.

    If the store holds all of them, neither a GPU nor ncu is needed.

    Args:
        progress: called after each batch with the number of candidates done, those in the store included, and of all.

    Raises:
        RecordError: no run is there, another process works in it, its store cannot be read or written, or ncu's output
            cannot be read.
        UsageError: ``top`` is below 1, no such problem or candidate in the run, or its figures are of another GPU.
        ToolchainMissing: ncu is not installed.
        DeviceError: no GPU, no permission to read counters, or a launch that failed.
    """
    path, gpu_index = request.path, request.gpu_index
    if request.top < 1:
        raise UsageError(f"--top is {request.top}", "1 or more candidates per problem", "pass a larger --top")
    with open_store(path) as (store, run_id):
        wanted = select_pairs(store.evaluations(run_id), request.top, request.mnk, request.config)
        known = store.counters_by_pair(run_id)
        missing = [pair for pair in wanted if _key(pair) not in known]
        if not missing:
            return ProfileResult({pair: known[_key(pair)] for pair in wanted}, 0)
        with lock_folder(path):
            gpu = gpu_of_device(gpu_index)
            tool = ncu.find_ncu(request.tool)
            about = {**collect_provenance(request.command, gpu_index), "ncu": ncu.version(tool)}
            was, product = measured_on(path), about["gpu"]
            if was is not None and product is not None and product not in was:  # its counters would pass for those
                wrong = f"{path} was measured on {', '.join(was)}, but this GPU is {product}"
                raise UsageError(wrong, "the same GPU", "profile on that GPU")
            for problem, config in missing:
                reason = why_illegal(problem, config, gpu)
                if reason is not None:
                    wrong = f"{config_name(config)} on {problem.key}: {reason}"
                    raise UsageError(wrong, "a legal kernel", "tune again")
            with tempfile.TemporaryDirectory(prefix="outblas-profile-") as scratch:
                profiler = Profiler(tool, Path(scratch), request.timeout_s, gpu_index)
                done = len(wanted) - len(missing)
                for works in _batches(missing, gpu):
                    done += _record(store, run_id, works, profiler, about)
                    if progress is not None:
                        progress(done, len(wanted))
        known = store.counters_by_pair(run_id)
        return ProfileResult({pair: known[_key(pair)] for pair in wanted}, len(missing))


def select_pairs(
    evaluations: Iterator[Evaluation], top: int, mnk: Sequence[str], config: KernelConfig | None
) -> list[Pair]:
    """Return the (problem, config) pairs to profile: of each problem the fastest candidates that passed, fastest first.

    The pairs are one flat list. Problems come in the order in which their first candidate passed; one on which none
    passed is left out. Of equally fast candidates the first by name comes first.

    Args:
        evaluations: evaluations of the run; of a repeated pair only the first counts, even if it failed.
        mnk: ``M_N_K`` of the problems, in any layout, dtype and accumulator; empty: all.
        config: take only this candidate, on each problem on which it passed, however slow; None: the fastest.

    Raises:
        UsageError: the run has no problem of one of the extents, or no such candidate passed on any problem.
        ProblemError: an ``M_N_K`` does not parse.
    """
    asked = {Problem.from_mnk(one).mnk for one in mnk}
    first: dict[Pair, Evaluation] = {}
    for e in evaluations:
        first.setdefault((e.problem, e.template), e)
    odd = sorted(asked - {problem.mnk for problem, _ in first})
    if odd:
        raise UsageError(f"{odd[0]} is not a problem of this run", "a tuned problem", "omit --mnk to profile all")
    passed: dict[Problem, list[tuple[float, KernelConfig]]] = {}
    for (problem, tried), e in first.items():
        if e.status is Status.PASSED and e.timing is not None and (not asked or problem.mnk in asked):
            passed.setdefault(problem, []).append((e.timing.median_us, tried))
    pairs = []
    for problem, times in passed.items():
        order = [one for _, one in sorted(times, key=lambda pair: (pair[0], config_name(pair[1])))]
        pairs += [(problem, one) for one in (order[:top] if config is None else order) if config in (None, one)]
    if not pairs:
        what = "every candidate" if config is None else config_name(config)
        raise UsageError(f"{what} failed on every problem", "a candidate that passed", "see `outblas report`")
    return pairs


def _batches(pairs: Sequence[Pair], gpu: Gpu) -> Iterator[list[ProfileWork]]:
    """A few problems at a time, all of one state of L2."""
    by_problem: dict[Problem, list[KernelConfig]] = {}
    for problem, config in pairs:
        by_problem.setdefault(problem, []).append(config)
    works = [ProfileWork(problem, tuple(configs), cache_of(problem, gpu)) for problem, configs in by_problem.items()]
    for cache in dict.fromkeys(work.l2 for work in works):
        same = [work for work in works if work.l2 == cache]
        for start in range(0, len(same), PROBLEMS_AT_ONCE):
            yield same[start:][:PROBLEMS_AT_ONCE]


def _record(
    store: Store, run_id: str, works: Sequence[ProfileWork], profiler: Profiler, about: Mapping[str, Any]
) -> int:
    """Profile one batch, of one state of L2, and record it; how many candidates that were."""
    found: dict[Pair, dict[str, float]] = {}
    for work, entries in zip(works, profiler.kernels(works), strict=True):
        for config, kernels in zip(work.entries, entries, strict=True):
            assert not isinstance(config, ProfiledAlgorithm)
            if len(kernels) != 1:
                raise RecordError(
                    f"{config_name(config)} launched {len(kernels)} kernels", "one kernel per call", "profile again"
                )
            found[work.problem, config] = counters_of(kernels[0])
    store.add_counters(run_id, found, {**about, "l2": works[0].l2})
    return len(found)


def _key(pair: Pair) -> tuple[str, str]:
    return pair[0].key, config_name(pair[1])
