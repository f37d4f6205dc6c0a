"""A Gymnasium environment over the knobs: an action is a whole kernel configuration, which an evaluator then tries.

An episode is a problem and a budget of measurements. The masks are those of sb3-contrib's ``MaskablePPO``, per knob
(https://sb3-contrib.readthedocs.io/en/master/modules/ppo_mask.html). Choices that are each possible may still form an
illegal kernel. Such an action costs a measurement and earns the reward of an illegal config.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.evaluator import Evaluator
from outblas.core.install_hint import install_hint
from outblas.core.problem import Acc, Dtype, Layout, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.knobs import Knobs, all_knobs
from outblas.kernels.legality import why_illegal
from outblas.learn.reward import reward
from outblas.learn.samplers import Sampler
from outblas.runtime.counters import COUNTERS

try:
    import gymnasium
except ImportError as error:
    raise ToolchainMissing("gymnasium is not installed", "gymnasium", install_hint("rl")) from error

#: Draws an episode's problem (see ``outblas.learn.samplers``); or problems to choose from evenly.
Problems = Sampler | Sequence[Problem]
Observation = dict[str, NDArray[np.float32]]

#: Logs of speed-ups are observed within this of 0.
MAX_LOG_SPEEDUP = 4.0
#: Registers of a thread, which a live evaluator always tells, then what Nsight Compute does.
COUNTER_NAMES = ("registers", *(counter.name for counter in COUNTERS))
_STATUSES = tuple(Status)


class KnobEnv(gymnasium.Env):
    """Search of one problem per episode, one measurement per step.

    Actions: ``MultiDiscrete``, the choice of every knob (:class:`outblas.kernels.knobs.Knobs`). The episode ends when
    the budget is spent, or when every offered config was tried.

    Rewards: the improvement of the best :func:`outblas.learn.reward.reward` so far, or 0. The first measurement earns
    its own reward. An illegal config earns its own reward (-2 by the gated preset) every time and improves nothing. A
    repeated config gets its earlier evaluation and reward 0. Both cost a measurement. So the sum over an episode is its
    best reward plus the negative rewards of illegal configs.

    Observations, float32, by name:

    - ``problem`` [10]: log2 of M, N, K (/ 32); one-hot layout, dtype, accumulator; log2 of FLOP per byte (+ 2, / 32).
    - ``gpu`` [4]: log2 of SMs (/ 16), of L2 bytes, HBM bytes/s and peak FLOP/s (/ 64).
    - ``best``, ``last`` [knobs]: index of each knob's value, scaled to 0..1; -1 if no config yet, or without the knob.
    - ``speedups`` [2]: log speed-up of best and last; 0 if unknown.
    - ``best_status``, ``last_status`` [statuses]: one-hot; zeros at the start.
    - ``counters`` [2 x :data:`COUNTER_NAMES`]: of the last config, 0 to 1; then 1 for each that is known.
    - ``budget`` [1]: share of the measurements that is left.

    ``info`` of a step: ``evaluation``, ``config`` (its name), ``invalid_action``, ``repeated``, and ``best`` (the best
    evaluation so far; None before a legal config was tried).

    Args:
        evaluator: A live one. It must answer any legal config, and a recording answers recorded cells only.
        sampler: Draws the problem of an episode. ``reset(options={"problem": ...})`` takes precedence.
        budget: Measurements per episode, 1 or more.
        offered: Returns the configs that the masks allow. None: ``evaluator.candidates``.
            :func:`outblas.kernels.knobs.all_legal_configs` offers more.
        preset: Name of the reward.
        knobs: The action space. None: :func:`outblas.kernels.knobs.all_knobs`. Offered values that it lacks need
            :func:`outblas.kernels.knobs.knobs_of`.

    Raises:
        UsageError: the budget is below 1.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self, evaluator: Evaluator, sampler: Problems, budget: int,
        offered: Callable[[Problem, Gpu], Sequence[KernelConfig]] | None = None,
        preset: str = "gated", knobs: Knobs | None = None,
    ) -> None:  # fmt: skip
        if budget < 1:
            raise UsageError(f"budget is {budget}", "1 or more measurements per episode", "pass a larger budget")
        self.evaluator, self.budget, self.preset = evaluator, budget, preset
        self.knobs = knobs or all_knobs()
        self._sampler, self._offered = sampler, offered
        self.action_space = gymnasium.spaces.MultiDiscrete(self.knobs.nvec)
        self.observation_space = _space(len(self.knobs.nvec))
        self.problem: Problem | None = None
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; no config is tried yet.

        Args:
            seed: seed of the sampler, as in Gymnasium.
            options: ``{"problem": Problem}`` chooses the problem; None lets the sampler draw it.

        Returns:
            The observation, and ``{"problem": key}``.

        Raises:
            UsageError: no offered config is legal for the problem.
        """
        super().reset(seed=seed)
        self.problem = problem = (options or {}).get("problem") or self._sample()
        gpu = self.evaluator.gpu
        found = self.evaluator.candidates(problem) if self._offered is None else self._offered(problem, gpu)
        self.pool = [c for c in dict.fromkeys(found) if why_illegal(problem, c, gpu) is None]
        if not self.pool:
            raise UsageError(f"nothing that is offered for {problem.key} is legal", "a legal config", "leave it out")
        self._vectors = np.stack([self.knobs.encode(config) for config in self.pool])
        self._index = {config: i for i, config in enumerate(self.pool)}
        self._untried = np.ones(len(self.pool), np.bool_)
        self._known: dict[KernelConfig, Evaluation] = {}
        self._best: tuple[float, Evaluation] | None = None
        self._last: Evaluation | None = None
        self._steps, self._over = 0, False
        return self._observe(), {"problem": problem.key}

    def step(self, action: NDArray[np.int64]) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Try a config.

        Args:
            action: integers, one choice per knob, as :meth:`encode` returns them.

        Returns:
            Observation, reward, terminated, False, info; see the class.

        Raises:
            UsageError: the episode is over, the action is invalid, or the evaluation has no baselines and so no reward.
            DeviceError: as the evaluator.
            ToolchainMissing: as the evaluator.
        """
        if self._over or self.problem is None:
            raise UsageError("a step after the end of the episode", "an episode that goes on", "call reset first")
        config = self.knobs.decode(action)
        reason = why_illegal(self.problem, config, self.evaluator.gpu)
        repeated = config in self._known
        if reason is not None:
            evaluation = Evaluation(
                self.problem, config, Status.ILLEGAL, reason, Verdict(Status.ILLEGAL, (), reason)
            )  # fmt: skip
            paid = reward(evaluation, self.preset)
        elif repeated:
            evaluation, paid = self._known[config], 0.0
        else:
            (evaluation,) = self.evaluator.evaluate([(self.problem, config)])
            paid = self._improvement(evaluation)
            self._known[config] = evaluation
            if config in self._index:
                self._untried[self._index[config]] = False
        self._last = evaluation
        self._steps += 1
        self._over = self._steps >= self.budget or not self._untried.any()
        info = {
            "evaluation": evaluation,
            "config": config_name(config),
            "invalid_action": reason is not None,
            "repeated": repeated,
            "best": self._best and self._best[1],
        }
        return self._observe(), paid, self._over, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return bool[sum of nvec], knob after knob: True for each choice that an untried offered config makes.

        Offered configs that are illegal for the problem do not count. Once all are tried, the choices of all count: the
        episode is over, and a mask must leave something.

        Raises:
            UsageError: before the first :meth:`reset`.
        """
        if self.problem is None:
            raise UsageError("masks before the first episode", "a problem", "call reset first")
        return self.knobs.mask(self._vectors[self._untried] if self._untried.any() else self._vectors)

    def decode(self, action: NDArray[np.int64]) -> KernelConfig:
        """Return the config of an action. It may be illegal for every problem.

        Args:
            action: integers, one per knob; entry i is in 0..nvec[i] - 1. Entries of knobs that the family lacks are
                ignored.

        Raises:
            UsageError: wrong length, values that are not integers, or an entry out of range.
        """
        return self.knobs.decode(action)

    def encode(self, config: KernelConfig) -> NDArray[np.int64]:
        """Return the action of a config, int64[knobs]: per knob the index of the config's value.

        Entry 0 is the family. A knob that the family lacks has 0. :meth:`decode` inverts it.

        Raises:
            UsageError: a value is not among the knob's.
        """
        return self.knobs.encode(config)

    def _sample(self) -> Problem:
        if callable(self._sampler):
            return self._sampler(random.Random(int(self.np_random.integers(2**31))))
        return self._sampler[int(self.np_random.integers(len(self._sampler)))]

    def _improvement(self, evaluation: Evaluation) -> float:
        value = reward(evaluation, self.preset)
        was = self._best
        if was is None or value > was[0]:
            self._best = (value, evaluation)
        return value if was is None else max(0.0, value - was[0])

    def _observe(self) -> Observation:
        assert self.problem is not None
        best, last = self._best and self._best[1], self._last
        found = {
            "problem": _of_problem(self.problem),
            "gpu": _of_gpu(self.evaluator.gpu),
            "best": self._of_config(best),
            "last": self._of_config(last),
            "speedups": [_log_speedup(best), _log_speedup(last)],
            "best_status": [best is not None and best.status is status for status in _STATUSES],
            "last_status": [last is not None and last.status is status for status in _STATUSES],
            "counters": _of_counters({} if last is None else last.counters),
            "budget": [1 - self._steps / self.budget],
        }
        return {name: np.asarray(values, np.float32) for name, values in found.items()}

    def _of_config(self, evaluation: Evaluation | None) -> NDArray[np.float64]:
        if evaluation is None:
            return np.full(len(self.knobs.nvec), -1.0)
        positions = self.knobs.encode(evaluation.template) / np.maximum(1, self.knobs.nvec - 1)
        return np.where(self.knobs.applies(evaluation.template), positions, -1.0)


def _space(knobs: int) -> Any:
    box = gymnasium.spaces.Box
    sizes = {"problem": 10, "gpu": 4, "best_status": len(_STATUSES), "last_status": len(_STATUSES)}
    sizes |= {"counters": 2 * len(COUNTER_NAMES), "budget": 1}
    spaces = {name: box(0.0, 1.0, (size,), np.float32) for name, size in sizes.items()}
    spaces |= {name: box(-1.0, 1.0, (knobs,), np.float32) for name in ("best", "last")}
    spaces["speedups"] = box(-MAX_LOG_SPEEDUP, MAX_LOG_SPEEDUP, (2,), np.float32)
    return gymnasium.spaces.Dict(spaces)


def _of_problem(p: Problem) -> list[float]:
    kinds = ((p.layout, get_args(Layout)), (p.dtype, get_args(Dtype)), (p.acc, get_args(Acc)))
    one_hot = [float(value == one) for value, values in kinds for one in values]
    intensity = (math.log2(p.flops / p.bytes) + 2) / 32  # 1 x 1 x 1 has a third of a FLOP per byte
    return [*(math.log2(extent) / 32 for extent in (p.m, p.n, p.k)), *one_hot, intensity]


def _of_gpu(gpu: Gpu) -> list[float]:
    wide = (gpu.l2_bytes, gpu.hbm_tbs * 1e12, gpu.tflops * 1e12)
    return [math.log2(gpu.sms) / 16, *(math.log2(value) / 64 for value in wide)]


def _log_speedup(evaluation: Evaluation | None) -> float:
    if evaluation is None or evaluation.speedup is None:
        return 0.0
    return max(-MAX_LOG_SPEEDUP, min(MAX_LOG_SPEEDUP, math.log(evaluation.speedup.ratio)))


def _of_counters(counters: dict[str, float]) -> list[float]:
    known = [float(name in counters) for name in COUNTER_NAMES]
    return [*(_scaled(name, counters.get(name, 0.0)) for name in COUNTER_NAMES), *known]


def _scaled(name: str, value: float) -> float:
    """Scale a counter to 0..1: shares unchanged, registers / 255, stalls s / (1 + s), counts log2 / 64."""
    if name == "registers":
        scaled = value / 255
    elif name.startswith("stall_"):
        scaled = value / (1 + value) if value > 0 else 0.0
    elif _UNITS[name] == "0 to 1":
        scaled = value
    else:
        scaled = math.log2(1 + max(0.0, value)) / 64
    return max(0.0, min(1.0, scaled))


_UNITS = {counter.name: counter.unit for counter in COUNTERS}
