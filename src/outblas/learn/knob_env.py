"""A Gymnasium environment that builds a kernel knob by knob; every kernel that it can build is legal.

An action chooses a value of the next knob, the family first. :meth:`KnobEnv.action_masks` allows a value only if a
legal, untried member of an enumerated space (:mod:`outblas.kernels.kernel_space`) has it together with the values
chosen so far. A knob with one such value is not asked. After the last knob the kernel is measured. The masks are those
of sb3-contrib's ``MaskablePPO`` (https://sb3-contrib.readthedocs.io/en/master/modules/ppo_mask.html).
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
from outblas.learn.features import Features, problem_features
from outblas.learn.knob_policy import MAX_LOG_GAP, KnobView, SearchState
from outblas.learn.reward import reward
from outblas.learn.samplers import Sampler

try:
    import gymnasium
except ImportError as error:
    raise ToolchainMissing("gymnasium is not installed", "gymnasium", install_hint("rl")) from error

#: Draws an episode's problem (see ``outblas.learn.samplers``); or problems to choose from evenly.
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
    """Search of one problem with one launch option per episode: one choice per step, one kernel after the last choice.

    Actions: ``Discrete(V)``, a value of a knob among all V values of all knobs. ``space.knobs`` has them: knob after
    knob. The episode ends (``terminated``) when the budget is spent or every offered kernel was tried. ``truncated`` is
    always False.

    Rewards: a choice pays 0 until the kernel is measured. The reward of a kernel
    (:func:`outblas.learn.reward.reward`) is taken relative to the problem: less the mean of the problem's kernels, over
    their deviation, within +-3. The first kernel pays that, and a later one its improvement over the best so far, or 0.
    So the sum over an episode is that of its best kernel, and a hard problem pays as well as an easy one. A choice that
    the mask forbids pays -3, costs a measurement and begins the kernel anew.

    Observation, float32[size]: see :meth:`outblas.learn.knob_policy.KnobView.observe`.

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
        preset: name of the reward.
        space: the kernels. None: :func:`outblas.kernels.kernel_space.kernel_space`.

    Raises:
        UsageError: the budget is below 1.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self, evaluator: Evaluator, sampler: Problems, budget: int, offered: Offered | None = None,
        scale: RewardScale | None = None, launches: Sequence[Launch] = LAUNCHES[:2], preset: str = "gated",
        space: KernelSpace | None = None,
    ) -> None:  # fmt: skip
        if budget < 1:
            raise UsageError(f"budget is {budget}", "1 or more measurements per episode", "pass a larger budget")
        self.evaluator, self.budget, self.preset = evaluator, budget, preset
        self.space = space or kernel_space()
        self.view = KnobView(self.space.knobs)
        self._sampler, self._offered, self._scale, self._launches = sampler, offered, scale, tuple(launches)
        self.action_space = gymnasium.spaces.Discrete(self.view.values)  # type: ignore[assignment]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (self.view.size,), np.float32)
        self.problem: Problem | None = None
        self._over = True
        self._left: NDArray[np.intp] = np.array([], np.intp)  # legal and untried
        self._rows, self._knob = self._left, 0

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
        self._left = left
        self._mean, self._deviation = self._scale(problem, self.launch) if self._scale else (0.0, 1.0)
        self._features = problem_features(problem, self.evaluator.gpu)
        self._best: tuple[float, Evaluation] | None = None
        self._best_us, self._gap, self._made, self._over = math.inf, 0.0, 0, False
        self._best_vector: NDArray[np.int16] | None = None
        self._begin_kernel()
        return self._observe(), {"problem": problem.key, "launch": self.launch}

    def step(self, action: np.int64) -> tuple[Features, float, bool, bool, dict[str, Any]]:
        """Choose a value of the next knob; measure the kernel after its last choice.

        Args:
            action: index among all V values, 0 to V - 1.

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
            column = self.space.vectors[self._rows, self._knob]
            self._rows = self._rows[column == int(action) - self.view.starts[self._knob]]
            self._knob += 1
            if not self._next_choice():
                evaluation, paid = self._measure(int(self._rows[0]))
                self._begin_kernel()
        self._over = self._made >= self.budget or not len(self._left)
        info = {
            "invalid_action": forbidden,
            "evaluation": evaluation,
            "config": evaluation and config_name(evaluation.config),
            "best": self._best and self._best[1],
        }
        return self._observe(), paid, self._over, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return bool[V]: True for the values of the next knob that a legal, untried member has.

        The member also has the values that were chosen so far. Values of other knobs are False. After the last
        offered kernel was tried, the values of the first knob are all True: a mask must leave something.

        Raises:
            UsageError: before the first :meth:`reset`.
        """
        if self.problem is None:
            raise UsageError("masks before the first episode", "a problem", "call reset first")
        found = np.zeros(self.view.values, np.bool_)
        start = int(self.view.starts[self._knob])
        if len(self._rows):
            found[start : start + int(self.space.knobs.nvec[self._knob])] = self._counts() > 0
        else:
            found[: int(self.space.knobs.nvec[0])] = True
        return found

    def chosen(self) -> dict[str, Any]:
        """Return knob -> value of the kernel that is being built, ``family`` first; knobs it lacks are left out."""
        row = self.space.vectors[self._rows[0]] if len(self._rows) else ()
        knobs = self.space.knobs.knobs[: self._knob]
        named = {knob.name: (knob, knob.values[i]) for knob, i in zip(knobs, row, strict=False)}
        family = named["family"][1] if named else ""
        return {name: value for name, (knob, value) in named.items() if family in knob.families}

    def _sample(self) -> Problem:
        if callable(self._sampler):
            return self._sampler(random.Random(int(self.np_random.integers(2**31))))
        return self._sampler[int(self.np_random.integers(len(self._sampler)))]

    def _begin_kernel(self) -> None:
        """Begin with no knob chosen. A kernel without any choice is left to a step that allows its family alone."""
        self._rows, self._knob = self._left, 0
        if len(self._rows) > 1:
            self._next_choice()

    def _next_choice(self) -> bool:
        """Go on to the next knob with two values or more; return False if none is left."""
        while self._knob < len(self.space.knobs.nvec):
            if np.count_nonzero(self._counts()) > 1:
                return True
            self._knob += 1
        return False

    def _counts(self) -> NDArray[np.intp]:
        """Return, for each value of the next knob, the number of rows that have it."""
        column = self.space.vectors[:, self._knob]
        return np.bincount(column[self._rows], minlength=int(self.space.knobs.nvec[self._knob]))

    def _measure(self, place: int) -> tuple[Evaluation, float]:
        """Measure a member; return its evaluation and what it pays."""
        assert self.problem is not None
        config = self.space.config(place, self.launch)
        (evaluation,) = self.evaluator.evaluate([(self.problem, config)])
        self._left = self._left[self._left != place]
        self._made += 1
        if evaluation.timing is not None:
            us = evaluation.timing.median_us
            if us < self._best_us:
                self._best_us, self._best_vector = us, self.space.vectors[place]
            self._gap = min(MAX_LOG_GAP, math.log(us / self._best_us))
        relative = (reward(evaluation, self.preset) - self._mean) / self._deviation
        value = max(-MAX_DEVIATIONS, min(MAX_DEVIATIONS, relative))
        was = self._best
        if was is None or value > was[0]:
            self._best = value, evaluation
        return evaluation, value if was is None else max(0.0, value - was[0])

    def _observe(self) -> Features:
        state = SearchState(self._features, self.launch, self._made, self._best_vector, self._gap)
        row = self._rows[0] if len(self._rows) else 0
        return self.view.observe(state, self.space.vectors[row : row + 1], self._knob)[0]
