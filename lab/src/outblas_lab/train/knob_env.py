"""A Gymnasium environment that builds a kernel knob by knob; every kernel that it can choose is legal.

:meth:`KnobEnv.action_masks` allows an action only if it leads to a legal, untried member of an enumerated space
(:mod:`outblas.kernels.kernel_space`). The masks are those of sb3-contrib's ``MaskablePPO`` (https://sb3-contrib.readthedocs.io/en/master/modules/ppo_mask.html).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import LAUNCHES, Launch, config_name
from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.evaluator import Evaluator
from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem
from outblas.kernels.kernel_space import KernelSpace, kernel_space
from outblas.predict.features import Features, problem_features
from outblas_lab.train.knob_choice import KnobChoice, Offer
from outblas_lab.train.knob_view import MAX_LOG_GAP, KnobView, SearchState
from outblas_lab.train.reward import reward
from outblas_lab.train.samplers import Sampler

try:
    import gymnasium
except ImportError as error:
    raise ToolchainMissing("gymnasium is not installed", "gymnasium", install_hint("rl")) from error

#: Draws an episode's problem (see ``outblas_lab.train.samplers``); or problems to choose from evenly.
Problems = Sampler | Sequence[Problem]
#: Returns the members that may be tried, indices into the space, all of them legal.
Offered = Callable[[Problem, Launch], NDArray[np.intp]]
#: Returns (mean, deviation) of the rewards of a problem's kernels; the deviation is above 0.
RewardScale = Callable[[Problem, Launch], tuple[float, float]]
#: A paid reward is within this many deviations of the problem's mean.
MAX_DEVIATIONS = 3.0
#: Reward of a choice that the mask forbids, in deviations.
FORBIDDEN = -MAX_DEVIATIONS


class KnobEnv(gymnasium.Env[Features, np.int64]):
    """Search of one problem with one launch option per episode: one action per step, one kernel after the last of some.

    Actions: ``Discrete``. An action is a value of the next knob, the family first, among all values of all knobs.
    ``space.knobs`` has them: knob after knob. A knob with one possible value is not asked. The episode ends
    (``terminated``) when the budget is spent or every offered kernel was tried. ``truncated`` is always False.

    Rewards: an action pays 0 until the kernel is measured. The reward of a kernel
    (:func:`outblas_lab.train.reward.reward`) is taken relative to the problem: less the mean of the problem's kernels,
    over their deviation, within +-3. The first kernel pays that, and a later one its improvement over the best so far,
    or 0. So the sum over an episode is that of its best kernel, and a hard problem pays as well as an easy one. An
    action that the mask forbids pays -3, costs a measurement and begins the kernel anew.

    Observation, float32[size]: :meth:`outblas_lab.train.knob_view.KnobView.observe`. It is 0 after the last offered
    kernel was tried.

    ``info`` of a step has ``invalid_action``, ``evaluation``, ``config`` (a name) and ``best``. The second and third
    are None if nothing was measured. ``best`` is the evaluation with the best reward so far, or None.

    Args:
        evaluator: it must answer every offered kernel.
        sampler: draws the problem of an episode. ``reset(options={"problem": ..., "launch": ...})`` takes precedence.
        budget: measurements per episode, 1 or more.
        offered: the members that may be tried. None: every legal member. On a recording, pass
            :func:`recorded_members`.
        scale: mean and deviation of a problem's rewards. None: 0 and 1.
        launches: launch options; each episode draws one of them.
        space: the kernels. None: :func:`outblas.kernels.kernel_space.kernel_space`.

    Raises:
        UsageError: the budget is below 1.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self, evaluator: Evaluator, sampler: Problems, budget: int, offered: Offered | None = None,
        scale: RewardScale | None = None, launches: Sequence[Launch] = LAUNCHES[:2],
        space: KernelSpace | None = None,
    ) -> None:  # fmt: skip
        if budget < 1:
            raise UsageError(f"budget is {budget}", "1 or more measurements per episode", "pass a larger budget")
        self.evaluator, self.budget = evaluator, budget
        self.space = space or kernel_space()
        self.view = KnobView(self.space.knobs)
        self._sampler, self._offered, self._scale, self._launches = sampler, offered, scale, tuple(launches)
        self.action_space = gymnasium.spaces.Discrete(self.view.values)  # type: ignore[assignment]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (self.view.size,), np.float32)
        self.problem: Problem | None = None
        self._over = True
        self._members: NDArray[np.intp] = np.array([], np.intp)  # legal
        self._untried: NDArray[np.bool_] = np.array([], np.bool_)
        self._choice: KnobChoice | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Features, dict[str, Any]]:
        """Begin an episode; no kernel is tried yet.

        Args:
            seed: seed of the draws, as in Gymnasium.
            options: may have ``problem``, a Problem, and ``launch``, a launch option. The rest is drawn.

        Returns:
            The observation, and ``{"problem": key, "launch": launch option}``.

        Raises:
            UsageError: nothing is offered for the problem with this launch option.
        """
        super().reset(seed=seed)
        options = options or {}
        self.problem = problem = options.get("problem") or self._sample()
        drawn = self._launches[int(self.np_random.integers(len(self._launches)))]
        self.launch: Launch = options.get("launch") or drawn
        if self._offered is None:
            left = np.flatnonzero(self.space.legal(problem, self.evaluator.gpu, self.launch))
        else:
            left = np.asarray(self._offered(problem, self.launch), np.intp)
        if not len(left):
            raise UsageError(
                f"nothing that is offered for {problem.key} is legal ({self.launch})", "a legal kernel", "leave it out"
            )
        self._members, self._untried = left, np.ones(len(left), np.bool_)
        self._mean, self._deviation = self._scale(problem, self.launch) if self._scale else (0.0, 1.0)
        self._features = problem_features(problem, self.evaluator.gpu)
        self._best: tuple[float, Evaluation] | None = None
        self._best_us, self._gap, self._made, self._over = math.inf, 0.0, 0, False
        self._best_vector: NDArray[np.int16] | None = None
        self._begin_kernel()
        return self._observe(), {"problem": problem.key, "launch": self.launch}

    def step(self, action: np.int64) -> tuple[Features, float, bool, bool, dict[str, Any]]:
        """Take an action; measure the kernel that it names, if it names one.

        Args:
            action: index of a value among those of all knobs.

        Returns:
            Observation, reward, terminated, False, info; see the class.

        Raises:
            UsageError: the episode is over, or the evaluation has no baselines and so no reward.
            DeviceError: as the evaluator.
            ToolchainMissing: as the evaluator.
        """
        if self._over or self.problem is None:
            raise UsageError("a step after the end of the episode", "an episode that goes on", "call reset first")
        evaluation, paid, forbidden = None, 0.0, not self.action_masks()[int(action)]
        if forbidden:
            paid = FORBIDDEN
            self._made += 1
            self._begin_kernel()
        else:
            assert self._choice is not None  # an episode that goes on has an untried kernel
            member = self._choice.take(int(action))
            if member is not None:
                evaluation, paid = self._measure(member)
                self._begin_kernel()
        self._over = self._made >= self.budget or self._choice is None
        info = {
            "invalid_action": forbidden,
            "evaluation": evaluation,
            "config": evaluation and config_name(evaluation.config),
            "best": self._best and self._best[1],
        }
        return self._observe(), paid, self._over, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return bool[actions]: True for the actions that lead to a legal, untried member.

        After the last offered kernel was tried, all are True: a mask must leave something.

        Raises:
            UsageError: before the first :meth:`reset`.
        """
        if self.problem is None:
            raise UsageError("masks before the first episode", "a problem", "call reset first")
        return np.ones(self.view.values, np.bool_) if self._choice is None else self._choice.mask()

    def chosen(self) -> dict[str, Any]:
        """Return knob -> value of the kernel that is being chosen, ``family`` first; knobs it lacks are left out."""
        return {} if self._choice is None else self._choice.chosen()

    def _sample(self) -> Problem:
        if callable(self._sampler):
            return self._sampler(random.Random(int(self.np_random.integers(2**31))))
        return self._sampler[int(self.np_random.integers(len(self._sampler)))]

    def _begin_kernel(self) -> None:
        """Begin the choice of the next kernel, if one is left."""
        rows = self._members[self._untried]
        if not len(rows):
            self._choice = None
            return
        state = SearchState(self._features, self.launch, self._made, self._best_vector, self._gap)
        self._choice = KnobChoice(self.view, Offer(state, self.space.vectors, rows))

    def _measure(self, place: int) -> tuple[Evaluation, float]:
        """Measure a member; return its evaluation and what it pays."""
        assert self.problem is not None
        config = self.space.config(place, self.launch)
        (evaluation,) = self.evaluator.evaluate([(self.problem, config)])
        self._untried[self._members == place] = False
        self._made += 1
        if evaluation.timing is not None:
            us = evaluation.timing.median_us
            if us < self._best_us:
                self._best_us, self._best_vector = us, self.space.vectors[place]
            self._gap = min(MAX_LOG_GAP, math.log(us / self._best_us))
        relative = (reward(evaluation, "gated") - self._mean) / self._deviation
        value = max(-MAX_DEVIATIONS, min(MAX_DEVIATIONS, relative))
        was = self._best
        if was is None or value > was[0]:
            self._best = value, evaluation
        return evaluation, value if was is None else max(0.0, value - was[0])

    def _observe(self) -> Features:
        return np.zeros(self.view.size, np.float32) if self._choice is None else self._choice.observe()
