"""A Gymnasium environment: an episode is one problem and a number of measurements, an action is a candidate.

Actions index the catalogue. :meth:`TuningEnv.action_masks` (the convention of sb3-contrib) marks those that are legal,
offered and not tried yet. On a recording, only recorded cells are offered, since nothing is interpolated. An
observation describes every candidate by features, so a policy scores candidates and not positions.

Importing this module registers ``outblas/Tuning-v0``. Gymnasium has no plug-ins since 1.0, so its id names the module:
``gymnasium.make("outblas_lab.train.env:outblas/Tuning-v0")``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import LAUNCHES, KernelConfig, Launch, launch_of
from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator
from outblas.core.gpu_records import nearest_with_data, reference_gpu
from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem
from outblas.predict.features import CANDIDATE_FEATURES, PROBLEM_FEATURES, SWITCHES, Features
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import CHOICE_CODES
from outblas_lab.recordings.replay import ReplayEvaluator
from outblas_lab.train.policy import LOG_TIME_UNIT, POSTERIOR_INPUTS, SEARCH_INPUTS, CandidateView, Policy
from outblas_lab.train.reward import reward

try:
    import gymnasium
except ImportError as error:
    raise ToolchainMissing("gymnasium is not installed", "gymnasium >= 1.0", install_hint("rl")) from error

#: Counters of the last candidate that are shown, where it was profiled (``outblas profile``).
COUNTERS = ("l2_hit_rate", "tensor_pipe", "dram", "occupancy")
#: Entries of the observation on the search itself. They are the share of the budget that is left, and the log speed-ups
#: of the best and the last candidate. Status and counters of the last one follow.
STATE_INPUTS = (
    *("budget_left", "best", "last", "has_counters"),
    *(f"last_{status}" for status in Status),
    *COUNTERS,
)
#: Log speed-ups are shown within these bounds.
LOG_SPEEDUP_BOUND = 4.0
#: Entries without bounds of their own are clipped to this magnitude, which is a factor e^10 between two times. Counters
#: are among them: a profiler's share may come out slightly above 1.
ENTRY_BOUND = 10 / LOG_TIME_UNIT
#: Entries from 0 to 1.
_SHARES = (
    *(name for name in CANDIDATE_FEATURES if name.startswith("family_")), *SWITCHES, "last_wave", "used_m", "used_n",
    "tried", "offered", "layout_nn", "bf16", "acc_fp16", "from_hbm", "any_proven", "budget_left", "has_counters",
    *(f"last_{status}" for status in Status),
)  # fmt: skip
_BOUNDS = dict.fromkeys(_SHARES, (0.0, 1.0)) | dict.fromkeys(("best", "last"), (-LOG_SPEEDUP_BOUND, LOG_SPEEDUP_BOUND))


class TuningEnv(gymnasium.Env[dict[str, NDArray[np.float32]], np.int64]):
    """Gymnasium environment that tunes one problem per episode and measures one candidate per step.

    Reward: the increase of the best :func:`outblas_lab.train.reward.reward` so far, or 0. The first measurement of an
    offered candidate pays its own reward. The sum over such an episode is thus the reward of the best candidate found.
    An action that is not offered, or was tried before, costs a measurement. It pays the reward of an illegal
    candidate, -2 with the preset ``gated``.

    An episode ends (``terminated``) when the budget is spent or every offered candidate was tried. ``truncated`` is
    always False.

    Observation, float32, by name:

    - ``candidates`` [C, features + posterior + 1]; the last column is 1 for offered candidates, other rows are 0.
    - ``problem`` [19], ``search`` [2], ``state`` (:data:`STATE_INPUTS`).
    - ``best``, ``last``: features of those candidates; 0 before the first.

    Each entry has finite bounds in ``observation_space``, and is clipped to them.

    ``info`` of a step has ``invalid_action``, ``status`` (a string), ``best_speedup`` and ``counters``.

    Args:
        evaluator: measures candidates. None: a replay of the packaged recording ``h200``.
        catalogue: the candidates. None: those of the evaluator's recording, or of ``h200`` on a GPU.
        problems: one or more problems; each episode draws one uniformly. None: as for ``catalogue``.
        policy: its regressor provides the guesses; its scores are not used. None: that of the most similar GPU.
        budget: measurements per episode, at least 1.
        launches: launch options. Each episode draws one for which the problem has a candidate.
        places: for problems with candidates of their own: number of actions, at least the most candidates of an
            episode (:func:`most_offered`). An action is then a place among them, and C is this number. None: an action
            is an index of the catalogue.

    Raises:
        UsageError: the budget is below 1, there are no problems, or a problem has more candidates than ``places``. An
            unknown preset raises it at the first step.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(
        self, evaluator: Evaluator | None = None, catalogue: Sequence[KernelConfig] | None = None,
        problems: Sequence[Problem] | None = None, policy: Policy | None = None, budget: int = 8,
        launches: Sequence[Launch] = LAUNCHES[:2], preset: str = "gated", places: int | None = None,
    ) -> None:  # fmt: skip
        if budget < 1:
            raise UsageError(f"budget is {budget}", "1 or more measurements per episode", "pass a larger budget")
        evaluator = evaluator or ReplayEvaluator(Recording.load(reference_gpu().name))
        if catalogue is None or problems is None:
            recording = getattr(evaluator, "recording", None) or Recording.load(reference_gpu().name)
            catalogue = recording.catalogue if catalogue is None else catalogue
            problems = recording.problems if problems is None else problems
        self.evaluator, self.catalogue, self.budget = evaluator, tuple(catalogue), budget
        policy = policy or Policy.load(nearest_with_data(evaluator.gpu, "policies", ".npz"))
        if not problems:
            raise UsageError("there are no problems to draw from", "at least one problem", "pass some problems")
        self._problems, self._policy, self._launches, self._preset = problems, policy, tuple(launches), preset
        self._column = {config: i for i, config in enumerate(self.catalogue)}
        self._places, self._actions = places, len(self.catalogue) if places is None else places
        self._views: dict[tuple[Problem, Launch], _Seen] = {}
        self._drawn_launches: dict[Problem, tuple[Launch, ...]] = {}
        self._rng = random.Random(0)
        candidate = (*CANDIDATE_FEATURES, *POSTERIOR_INPUTS, "offered")
        spaces = {
            "candidates": _box(candidate, self._actions),
            "problem": _box(PROBLEM_FEATURES),
            "search": _box(SEARCH_INPUTS),
            "state": _box(STATE_INPUTS),
            "best": _box(CANDIDATE_FEATURES),
            "last": _box(CANDIDATE_FEATURES),
        }
        self._spaces, self.observation_space = spaces, gymnasium.spaces.Dict(spaces)  # type: ignore[assignment]
        self.action_space = gymnasium.spaces.Discrete(self._actions)  # type: ignore[assignment]

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seed of the following draws of problems and launch options. None continues the current sequence.
            options: may have ``problem``, a Problem, and ``launch``, a launch option. Missing ones are drawn.

        Returns:
            The observation, and ``{"problem": key of the problem, "launch": launch option}``.

        Raises:
            UsageError: the problem has no candidate with this launch option.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._rng = random.Random(seed)
        options = options or {}
        self.problem: Problem = options.get("problem") or self._rng.choice(self._problems)
        launch: Launch = options.get("launch") or self._rng.choice(self._launches_of(self.problem))
        self._view, self._columns, self._configs = self._seen(self.problem, launch)
        self._place = {int(column): i for i, column in enumerate(self._columns)}
        self._place_of = {config: i for i, config in enumerate(self._configs)}
        self.history: list[Evaluation] = []
        self._tried: list[int] = []
        self._best = -math.inf
        return self._observation(), {"problem": self.problem.key, "launch": launch}

    def step(self, action: np.int64) -> tuple[dict[str, NDArray[np.float32]], float, bool, bool, dict[str, Any]]:
        """Measure a candidate.

        A candidate that the mask forbids does not run. It costs a measurement, and ``info["invalid_action"]`` is True.

        Raises:
            IndexError: there is no such action.
        """
        place = self._place.get(int(action))
        if place is None or place in self._tried:
            named = self.catalogue if self._places is None else self._configs[-1:] * self._places
            evaluation = Evaluation(self.problem, named[int(action)], Status.ILLEGAL, "not offered")
            gain = reward(evaluation, self._preset)
        else:
            (evaluation,) = self.evaluator.evaluate([(self.problem, self._configs[place])])
            self._tried.append(place)
            paid = reward(evaluation, self._preset)
            gain = paid if math.isinf(self._best) else max(0.0, paid - self._best)
            self._best = max(self._best, paid)
        self.history.append(evaluation)
        done = len(self.history) >= self.budget or len(self._tried) == len(self._columns)
        info = {
            "invalid_action": evaluation.status is Status.ILLEGAL,
            "status": evaluation.status.value,
            "best_speedup": self.best_speedup(),
            "counters": dict(evaluation.counters),
        }
        return self._observation(), float(gain), done, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return bool[C]: True for each candidate that is offered and not tried in this episode."""
        mask = np.zeros(self._actions, dtype=bool)
        mask[self._columns] = True
        mask[self._columns[self._tried]] = False
        return mask

    def best_speedup(self) -> float:
        """Return the best speedup over the fastest baseline in this episode, or 0.0 if no candidate was proven."""
        return max((e.speedup.ratio for e in self.history if e.speedup is not None), default=0.0)

    def _offered(self, problem: Problem, launch: Launch) -> list[KernelConfig]:
        return [c for c in self.evaluator.candidates(problem) if launch_of(c) == launch and c in self._column]

    def _launches_of(self, problem: Problem) -> tuple[Launch, ...]:
        """Return the launch options with a candidate of the problem; all of them if none has any."""
        if problem not in self._drawn_launches:
            found = tuple(launch for launch in self._launches if self._offered(problem, launch))
            self._drawn_launches[problem] = found or self._launches
        return self._drawn_launches[problem]

    def _seen(self, problem: Problem, launch: Launch) -> _Seen:
        known = self._views.get((problem, launch))
        if known is None:
            offered = self._offered(problem, launch)
            if not offered:
                raise UsageError(
                    f"{problem.key} has no candidate with launch option {launch}", "a candidate", "use other problems"
                )
            if len(offered) > self._actions:
                wrong = f"{problem.key} has {len(offered)} candidates with launch option {launch}"
                raise UsageError(wrong, f"at most {self._actions} (places)", "pass more places")
            columns = np.array([self._column[c] for c in offered], dtype=np.intp)
            if self._places is not None:
                columns = np.arange(len(offered))
            view = self._policy.view(problem, offered, self.evaluator.gpu)
            known = self._views[problem, launch] = _Seen(view, columns, offered)
        return known

    def _observation(self) -> dict[str, NDArray[np.float32]]:
        view, columns = self._view, self._columns
        proven = [(self._place_of[e.template], e) for e in self.history if e.timing is not None]
        log_us = [math.log(e.timing.median_us) for _, e in proven if e.timing is not None]
        x, search = view.inputs(self._tried, [place for place, _ in proven], log_us)
        table = np.zeros((self._actions, x.shape[1] + 1), dtype=np.float32)
        table[columns, :-1], table[columns, -1] = x, 1.0
        best = min(proven, key=lambda pair: pair[1].timing.median_us, default=None)  # type: ignore[union-attr]
        entries = {
            "candidates": table,
            "problem": view.problem,
            "search": search,
            "state": self._state(),
            "best": self._described(None if best is None else best[1]),
            "last": self._described(self.history[-1] if self.history else None),
        }
        return {name: np.clip(x, self._spaces[name].low, self._spaces[name].high) for name, x in entries.items()}

    def _state(self) -> NDArray[np.float32]:
        last = self.history[-1] if self.history else None
        counters = last.counters if last is not None else {}
        shown = {
            "budget_left": 1 - len(self.history) / self.budget,
            "best": _log(self.best_speedup()),
            "last": _log(last.speedup.ratio if last is not None and last.speedup is not None else 0.0),
            "has_counters": float(any(name in counters for name in COUNTERS)),
            **{name: counters.get(name, 0.0) for name in COUNTERS},
        }
        if last is not None:
            shown[f"last_{last.status}"] = 1.0
        return np.array([shown.get(name, 0.0) for name in STATE_INPUTS], dtype=np.float32)

    def _described(self, evaluation: Evaluation | None) -> Features:
        place = None if evaluation is None else self._place_of.get(evaluation.template)
        return np.zeros(len(CANDIDATE_FEATURES), np.float32) if place is None else self._view.candidates[place]


class _Seen(NamedTuple):
    """The offer of an episode: view, actions and configs of a problem and a launch option, in one order."""

    view: CandidateView
    actions: NDArray[np.intp]
    configs: list[KernelConfig]


def most_offered(recording: Recording, problems: Sequence[Problem]) -> int | None:
    """Return the most candidates that an episode of these problems offers; None if all are of one catalogue."""
    if not (recording.chosen == CHOICE_CODES["none"]).any():
        return None
    return max(len(columns) for problem in problems for columns in recording.by_launch(problem).values())


def _log(speedup: float) -> float:
    return float(np.clip(math.log(speedup), -LOG_SPEEDUP_BOUND, LOG_SPEEDUP_BOUND)) if speedup > 0 else 0.0


def _box(names: Sequence[str], rows: int | None = None) -> Any:
    """Return the space of entries with these names: float32[names], or float32[rows, names]."""
    bounds = np.array([_BOUNDS.get(name, (-ENTRY_BOUND, ENTRY_BOUND)) for name in names], dtype=np.float32)
    low, high = bounds.T if rows is None else np.repeat(bounds.T[:, None], rows, axis=1)
    return gymnasium.spaces.Box(low, high, dtype=np.float32)


gymnasium.register("outblas/Tuning-v0", f"{__name__}:TuningEnv")
