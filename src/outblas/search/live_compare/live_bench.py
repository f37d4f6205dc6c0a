"""Evaluators of a live comparison on one GPU: one measures for the agents, the other judges their choices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from outblas.bench.live_evaluator import LiveEvaluator
from outblas.core.config import KernelConfig, config_name
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.judge.bench_cell import Options
from outblas.records.recording import Recording
from outblas.records.replay import ReplayEvaluator
from outblas.runtime.device import gpu_of_device

#: Rounds of a measurement for agents, and of the judgement of their choices.
SEARCH_ROUNDS, JUDGED_ROUNDS = 7, 15
#: Choices that are judged in the same rounds. Each such group has the rivals in its rounds, too.
JUDGED_TOGETHER = 64
#: Seed of the operands' data and of the order of the rounds, for agents and for the judgement.
SEARCH_SEED, JUDGED_SEED = 0, 1


@dataclass(frozen=True)
class LiveBench:
    """Evaluators of one GPU.

    Attributes:
        search: measures for the agents. A kernel is proved on the timed operands only.
        judge: judges choices: full proof, other data, more rounds, beside all rivals.
    """

    search: Evaluator
    judge: Evaluator


@contextmanager
def open_bench(gpu_index: int) -> Iterator[LiveBench]:
    """Open a real GPU; its workers end with the ``with`` block.

    Args:
        gpu_index: CUDA index.

    Yields:
        The evaluators.
    """
    gpu = gpu_of_device(gpu_index)
    search = Options(gpu_index, gpu, rounds=SEARCH_ROUNDS, seed=SEARCH_SEED, level="cell", baselines=RIVALS)
    judge = replace(search, rounds=JUDGED_ROUNDS, seed=JUDGED_SEED, level="full", chunk=JUDGED_TOGETHER)
    with LiveEvaluator(gpu_index, search) as searching, LiveEvaluator(gpu_index, judge) as judging:
        yield LiveBench(searching, judging)


@contextmanager
def rehearsal_bench(recording: Recording) -> Iterator[LiveBench]:
    """Answer from a recording in place of a GPU.

    Args:
        recording: the recording.

    Yields:
        The evaluators. The judge repeats the recorded times.
    """
    replay = ReplayEvaluator(recording)
    yield LiveBench(replay, replay)


def judged_choices(problem: Problem, configs: Sequence[KernelConfig], judge: Evaluator) -> dict[str, Any]:
    """Time the choices of all agents together, in interleaved rounds with the rivals.

    Args:
        problem: the problem.
        configs: the different choices.
        judge: an evaluator that measured nothing for the agents.

    Returns:
        A dictionary of JSON values. ``kernels``: config -> ``speedup``, ``low`` and ``high`` over ``baseline``, the
        fastest rival of the same rounds, and the times ``us`` and ``baseline_us``. ``failed``: config -> status, of
        those that did not pass or have no rival. ``seconds``: seconds of the GPU.
    """
    begin, kernels, failed = time.monotonic(), dict[str, Any](), dict[str, str]()
    for e in judge.evaluate([(problem, config) for config in configs]):
        if e.timing is None or e.speedup is None:
            failed[config_name(e.config)] = e.status.value if e.timing is None else "no rival was timed"
            continue
        s = e.speedup
        kernels[config_name(e.config)] = {
            "speedup": s.ratio, "low": s.low, "high": s.high, "us": e.timing.median_us, "baseline": s.baseline,
            "baseline_us": e.baselines_us[s.baseline],
        }  # fmt: skip
    return {"kernels": kernels, "failed": failed, "seconds": time.monotonic() - begin}
