"""The published recipe as one experiment: PPO by its reward and by the gated one, and the kernels that each chooses.

Both trainings run from scratch on the same recorded problems: the policy starts without a regressor's belief, and the
last policy counts. Evaluations carry an L2 hit rate, and some kernels are faulty if that is asked.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np

from outblas.core.config import Candidate, KernelConfig, config_name
from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.files import write_json
from outblas.core.journal import Journal
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.core.suites import sample
from outblas.kernels.catalogue import with_launch
from outblas.kernels.config_text import config_from_name
from outblas.kernels.cost.cost_model import modelled_hit_rates
from outblas.predict.features import CANDIDATE_FEATURES, PROBLEM_FEATURES
from outblas.predict.posterior import Regressor
from outblas.records.provenance import source_commit, utc_now
from outblas_lab.compare.compare_result import figures, read_comparison, write_comparison
from outblas_lab.compare.compare_run import about_recording
from outblas_lab.compare.held_out import HeldOutTask, Plan, held_out_tasks
from outblas_lab.recipe.recipe_table import FORMAT, KIND, OUTCOMES, REWARD_NAMES
from outblas_lab.recipe.recipe_trials import tuned_settings
from outblas_lab.recordings.recording import Recording, recording_sha
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator
from outblas_lab.train.policy import Policy
from outblas_lab.train.policy_quality import search_order
from outblas_lab.train.regression import one_thread
from outblas_lab.train.reward import CLAIMED_SPEED, HIT_RATE, reward
from outblas_lab.train.train_ppo import BaseCallback, PpoSettings, TrainingRun, make_learner, torch
from outblas_lab.train.training_part import TrainingPart

#: Hyper-parameters of PPO beside those of the request.
LR, BATCH, GAMMA, ENTROPY = 1e-3, 128, 0.98, 0.01
#: Speed that a faulty kernel claims, over its recorded speed: that of a kernel that leaves out a quarter of K.
FAULT_SPEED = 4 / 3
#: Numbers of measurements after which a choice is judged, up to the budget of an episode.
JUDGED_AFTER = (1, 2, 4, 8)
#: Most points of a curve that are kept.
CURVE_POINTS = 20
#: Choices of a run, in its folder; a comparison whose agents are the rewards.
CHOICES = "choices.parquet"
#: A profiler counts sectors of whole replays, so a rate may come out slightly above 1.
MOST_MEASURED = 1.05
#: (problem, kernel) -> measured L2 hit rate, 0 to 1.
HitRates = Mapping[tuple[Problem, KernelConfig], float]
#: A point of a training: (episodes, mean reward of an episode, mean L2 hit rate, share of failed candidates).
Point = tuple[int, float, float, float]
#: Called with (episodes done, in all, message).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RecipeRequest:
    """Arguments of :func:`run_recipe`.

    Attributes:
        recording: name or path of the recording.
        shapes: problems to train on.
        episodes: episodes of each, on average.
        budget: measurements per episode.
        layout: layout of the problems, ``TN`` or ``NN``.
        judged: number of judged problems, whose (M, N, K) no training has.
        seeds: trainings of each reward.
        faulty: share of kernels that are injected as faulty in a second comparison; 0: there is no second one.
        hit_rates: JSON of measured L2 hit rates; None: all are modelled.
        run: folder of the finished trainings and trials.
        trials: trials of each reward's settings before its trainings; 0: they have fixed settings.
        trial_episodes: episodes of each problem in a trial, on average.

    Raises:
        UsageError: a number is out of range, or ``out`` is a folder.
    """

    recording: str
    shapes: int
    episodes: int
    budget: int
    layout: str
    judged: int
    seeds: int
    faulty: float
    hit_rates: Path | None
    run: Path
    out: Path
    command: str
    trials: int = 0
    trial_episodes: int = 60

    def __post_init__(self) -> None:
        if self.trials < 0:
            raise UsageError(f"--trials is {self.trials}", "0 or more", "correct --trials")
        for name in ("shapes", "episodes", "budget", "judged", "seeds", "trial_episodes"):
            if getattr(self, name) < 1:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is {getattr(self, name)}", "1 or more", f"pass a larger {option}")
        if not 0 <= self.faulty < 1:
            expected = "a fraction of at least 0 and less than 1"
            raise UsageError(f"--faulty is {self.faulty:g}", expected, "pass e.g. --faulty 0.05")
        if self.out.is_dir():
            raise UsageError(f"--out {self.out} is a folder", "a result file", "pass a file in that folder")

    def ppo(self, preset: str, seed: int, tuned: Mapping[str, Any] | None = None) -> PpoSettings:
        """Return the settings of a training under a preset of the reward; ``tuned`` are those of a study."""
        return self._ppo(preset, seed, self.shapes * self.episodes, tuned or {})

    def trial_ppo(self, preset: str, shapes: int, drawn: Mapping[str, Any]) -> PpoSettings:
        """Return the settings of a trial on some problems."""
        return self._ppo(preset, 0, shapes * self.trial_episodes, drawn)

    def _ppo(self, preset: str, seed: int, episodes: int, own: Mapping[str, Any]) -> PpoSettings:
        fixed = {"lr": LR, "batch": BATCH, "gamma": GAMMA, "entropy": ENTROPY, "budget": self.budget}
        chosen, usual = {**fixed, **own}, PpoSettings()
        steps = episodes * chosen["budget"]
        rollout = max(1, min(usual.rollout, steps // usual.envs))  # a short training makes one update at least
        return PpoSettings(**chosen, preset=preset, seed=seed, steps=steps, rollout=rollout)

    def settings(self) -> dict[str, Any]:
        """Return the hyper-parameters as the result file has them."""
        own = {"shapes": self.shapes, "episodes": self.episodes, "budget": self.budget}
        fixed = {**own, "lr": LR, "batch": BATCH, "gamma": GAMMA, "entropy": ENTROPY}
        return {**fixed, "trials": self.trials, "trial_episodes": self.trial_episodes} if self.trials else fixed


def run_recipe(
    request: RecipeRequest, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Train by both rewards, judge their choices, and write the result file; return its content.

    Both rewards have the same problems. They have the same hyper-parameters, too, or those of as many trials
    (:mod:`outblas_lab.recipe.recipe_trials`). A killed run goes on after its last finished trial or training.

    Args:
        progress: called with (episodes done, in all, text).
        say: called with one line after each trial and before each training.

    Raises:
        UsageError: the recording has too few problems, or the folder has a run of other settings.
        RecordError: a file cannot be read or written, or another process uses the folder.
        ToolchainMissing: torch or sb3-contrib is not installed.
    """
    problems = recipe_problems(request)
    measured = {} if request.hit_rates is None else read_hit_rates(request.hit_rates)
    # Seeds and faults may grow: their trainings are added.
    settings = {
        "recording": recording_sha(problems.recording),
        "settings": request.settings(),
        "judged": [list(task.key) for task in problems.tasks],
        "hit_rates": sorted((p.key, str(c), rate) for (p, c), rate in measured.items()),
    }
    journal = Journal(request.run / "recipe.jsonl", settings)
    try:
        tuned = _tuned(request, problems, measured, progress, say) if request.trials else {}
        known = {(e["faulty"], e["reward"], e["seed"]) for e in journal.entries}
        shares = dict.fromkeys((0.0, request.faulty))
        for share, preset, seed in [(f, r, s) for f in shares for r in REWARD_NAMES for s in range(request.seeds)]:
            if (share, preset, seed) not in known:
                if say is not None:
                    kernels = f"{share:.0%} faulty kernels" if share else "recorded kernels"
                    say(f"training: reward {preset}, {kernels}, seed {seed}")
                own = request.ppo(preset, seed, tuned.get(preset, {}).get("settings"))
                journal.append(_train_and_judge(own, problems, share, measured, progress))
        result = _result(request, problems, measured, journal.entries) | ({"tuned": tuned} if tuned else {})
        write_json(request.out, result)
    finally:
        journal.close()
    return result


class RecipeProblems(NamedTuple):
    """The problems of a run: the whole recording, its problems of one layout, those of the trainings, judged tasks."""

    whole: Recording
    recording: Recording
    part: TrainingPart
    tasks: list[HeldOutTask]
    budgets: tuple[int, ...]


def recipe_problems(request: RecipeRequest) -> RecipeProblems:
    """Return the problems of a run: those of the trainings, and judged ones with other (M, N, K).

    Raises:
        UsageError: the recording has no problem of the layout, or too few.
    """
    whole = Recording.load(request.recording)
    kept = [p for p in whole.problems if p.layout == request.layout]
    if not kept:
        layouts = ", ".join(sorted({p.layout for p in whole.problems}))
        raise UsageError(f"{request.recording} has no layout {request.layout}", layouts, "pass another --layout")
    recording = whole.restricted_to(kept)
    budgets = tuple(dict.fromkeys([*(b for b in JUDGED_AFTER if b < request.budget), request.budget]))
    split, tasks = held_out_tasks(Plan(request.recording, budgets, sample=request.judged), recording, "shapes")
    if request.shapes > len(split.training):
        raise UsageError(f"--shapes is {request.shapes}", f"1 to {len(split.training)}", "pass a smaller --shapes")
    drawn = tuple(sample(split.training, request.shapes, gpu=recording.gpu))
    return RecipeProblems(whole, recording, TrainingPart(recording, drawn), tasks, budgets)


def _tuned(
    request: RecipeRequest, problems: RecipeProblems, measured: HitRates, progress: Progress | None,
    say: Callable[[str], None] | None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return reward -> the best of its trials, which have recorded kernels only."""
    evaluator_of = partial(RecipeEvaluator, measured=measured)
    evaluator = evaluator_of(problems.recording)

    def train(part: TrainingPart, settings: PpoSettings, told: Progress | None) -> Policy:
        return train_by_reward(part, settings, evaluator_of, told)[0]

    def score(policy: Policy, tasks: Sequence[HeldOutTask], preset: str) -> float:
        judged = judge_policy(policy, evaluator, tasks, preset, problems.budgets)
        return float(np.mean([choice.reward for _, choices in judged for choice in choices]))

    return tuned_settings(request, problems.part, train, score, progress, say)


def _train_and_judge(
    settings: PpoSettings, problems: RecipeProblems, share: float, measured: HitRates, progress: Progress | None
) -> dict[str, Any]:
    """Return the journal's entry of one training: its curve, and its choices on the judged tasks."""
    evaluator_of, start = partial(RecipeEvaluator, faulty=share, measured=measured), process_time()
    policy, curve = train_by_reward(problems.part, settings, evaluator_of, progress)
    prepared = process_time()
    judged = judge_policy(policy, evaluator_of(problems.recording), problems.tasks, settings.preset, problems.budgets)
    return {
        "faulty": share,
        "reward": settings.preset,
        "seed": settings.seed,
        "commit": source_commit(),
        "train_s": round(prepared - start, 3),
        "judge_s": round(process_time() - prepared, 3),
        "curve": curve,
        "choices": [[*key, [[c.quality, c.right, c.outcome] for c in chosen]] for key, chosen in judged],
    }


class RecipeEvaluator(ReplayEvaluator):
    """Answers from a recording, with an L2 hit rate in every evaluation.

    A faulty kernel has status ``wrong`` and no time. Counter ``unproven_speedup`` then has the speed over cuBLAS that
    it claims: 4/3 of the recorded one.

    Args:
        faulty: share of the kernels that are injected as faulty, 0 to below 1.
        measured: measured L2 hit rates. The traffic model gives the others.
    """

    def __init__(self, recording: Recording, faulty: float = 0.0, measured: HitRates | None = None) -> None:
        super().__init__(recording)
        self._measured = measured or {}
        self._faulty = [is_faulty(config, faulty) for config in recording.catalogue]
        self._modelled: dict[Problem, dict[KernelConfig, float]] = {}

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> list[Evaluation]:
        return [self._completed(evaluation) for evaluation in super().evaluate(pairs)]

    def hit_rate(self, problem: Problem, config: KernelConfig) -> float:
        """Return the L2 hit rate of a recorded cell, 0 to 1: the measured one, else the modelled one."""
        if (problem, config) in self._measured:
            return self._measured[problem, config]
        if problem not in self._modelled:
            offered = self.candidates(problem)
            rates = modelled_hit_rates(problem, offered, self.gpu).tolist()
            self._modelled[problem] = dict(zip(offered, rates, strict=True))
        return self._modelled[problem][config]

    def _completed(self, evaluation: Evaluation) -> Evaluation:
        config = evaluation.template
        counters = {HIT_RATE: self.hit_rate(evaluation.problem, config)}
        column = self.recording.catalogue_index(config)
        if evaluation.timing is None or column is None or not self._faulty[column]:
            return replace(evaluation, counters=counters)
        # Only the catalogue's kernels are faulty; the claim is over cuBLAS, or over the fastest if that was not timed.
        cublas = evaluation.baselines_us.get("cublas", min(evaluation.baselines_us.values()))
        counters[CLAIMED_SPEED] = FAULT_SPEED * cublas / evaluation.timing.median_us
        return replace(
            evaluation, status=Status.WRONG, detail="injected fault", verdict=Verdict(Status.WRONG), timing=None,
            speedup=None, counters=counters,
        )  # fmt: skip


def is_faulty(config: KernelConfig, share: float, seed: int = 0) -> bool:
    """Return True if a kernel is among those injected as faulty. With and without PDL it is one kernel.

    Args:
        share: share of the kernels, 0 to below 1.
    """
    name = config_name(with_launch(config, "plain"))
    return random.Random(f"{seed}/{name}").random() < share


def read_hit_rates(path: Path) -> dict[tuple[Problem, KernelConfig], float]:
    """Return (problem, kernel) -> measured L2 hit rate, 0 to 1, of our rows with one kernel.

    Args:
        path: JSON of ``benchmarks/profile_regimes.py``. A rate up to 1.05 counts as 1.

    Raises:
        RecordError: the file cannot be read, has no such row or one twice, or has a kernel, problem or rate that
            cannot be.
    """
    try:
        rows = [
            (Problem.from_key(row["problem"]), config_from_name(row["name"]), row["kernels"][0]["l2_hit_pct"] / 100)
            for row in json.loads(read_plain_file(path).decode())["rows"]
            if row["side"] == "ours" and len(row["kernels"]) == 1
        ]
        bad = [rate for _, _, rate in rows if not (math.isfinite(rate) and 0 <= rate <= MOST_MEASURED)]
        if bad:
            raise ValueError(f"a hit rate is {bad[0]:g}, not from 0 to 1")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OutblasError) as error:
        wrong, expected = f"hit rates {path} cannot be read ({error})", "JSON from benchmarks/profile_regimes.py"
        raise RecordError(wrong, expected, "correct the file") from error
    rates = {(problem, config): min(rate, 1.0) for problem, config, rate in rows}
    if len(rates) != len(rows) or not rows:
        what = "a duplicate cell" if rows else "no cells"
        raise RecordError(f"hit rates {path} have {what}", "one row per problem and kernel", "correct the file")
    return rates


def blank_regressor() -> Regressor:
    """Return a regressor that believes every candidate to be equally fast."""
    inputs = len(PROBLEM_FEATURES) + len(CANDIDATE_FEATURES)
    nothing = np.zeros(inputs, np.float32)
    return Regressor(nothing, nothing, (np.zeros((1, inputs, 1), np.float32),), (np.zeros((1, 1, 1), np.float32),))


def train_by_reward(
    part: TrainingPart, settings: PpoSettings, evaluator_of: Callable[[Recording], RecipeEvaluator],
    progress: Progress | None = None,
) -> tuple[Policy, list[Point]]:  # fmt: skip
    """Train a policy on recorded problems under ``settings.preset``.

    The result is the same for the same seed. torch has one thread meanwhile.

    Args:
        settings: hyper-parameters. The steps are those of all episodes.
        progress: called after each update with (episodes done, episodes, text).

    Returns:
        The last policy, and at most 20 points of its training. A point is of the episodes and measurements since the
        one before.
    """
    with one_thread():
        torch.manual_seed(settings.seed)
        begun = Policy(blank_regressor(), {})
        model, _ = make_learner([part], settings, begun, TrainingRun(), evaluator_of)
        watch = _Watch(settings, progress)
        model.learn(settings.steps, callback=watch)
    every = max(1, -(-len(watch.curve) // CURVE_POINTS))
    return Policy(begun.regressor, model.policy.features_extractor.arrays()), watch.curve[every - 1 :: every]


class _Watch(BaseCallback):
    """Record a point of the curve after every update."""

    def __init__(self, settings: PpoSettings, progress: Progress | None) -> None:
        super().__init__()
        self._settings, self._progress = settings, progress
        self._rates: list[float] = []
        self._failed = 0
        self.curve: list[Point] = []

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            self._rates.append(info["counters"].get(HIT_RATE, 0.0))
            self._failed += info["status"] != Status.PASSED.value
        return True

    def _on_rollout_end(self) -> None:
        episodes = self.num_timesteps // self._settings.budget
        paid = [e["r"] for e in self.model.ep_info_buffer or ()]
        mean_reward, rate = float(np.mean(paid)) if paid else 0.0, float(np.mean(self._rates))
        failed = self._failed / len(self._rates)
        self.curve.append((episodes, round(mean_reward, 5), round(rate, 5), round(failed, 5)))
        self._rates, self._failed = [], 0
        if self._progress is not None:
            total = self._settings.steps // self._settings.budget
            said = f"reward {mean_reward:.3f}, L2 hits {rate:.1%}, failed {failed:.1%}"
            self._progress(min(episodes, total), total, said)


class Choice(NamedTuple):
    """The candidate with the highest reward after a number of measurements.

    Attributes:
        quality: time of the task's fastest right candidate / time of the choice, above 0, at most 1. A choice that
            failed counts as the slowest right candidate.
        right: True if the choice passes.
        outcome: ``none``: its reward is 0 or less, so cuBLAS stays. ``wrong``: the choice failed a gate. ``level``: it
            is right, and not significantly faster than the fastest baseline (the lower bound of its speed-up is 1 or
            less). ``faster``: it is right and significantly faster.
        reward: its reward, or 0 if cuBLAS stays.
    """

    quality: float
    right: bool
    outcome: str
    reward: float


def judge_policy(
    policy: Policy, evaluator: RecipeEvaluator, tasks: Sequence[HeldOutTask], preset: str, budgets: Sequence[int]
) -> list[tuple[tuple[str, str], list[Choice]]]:
    """Let a policy search tasks, and choose by the reward of its training.

    Args:
        policy: the policy. It measures its highest score every time.
        tasks: problems and launch options. One without a right candidate is left out.
        budgets: numbers of measurements, ascending, 1 or more.

    Returns:
        The key of each task, and its choice after each budget.
    """
    judged = []
    for task in tasks:
        evaluations = evaluator.evaluate((task.problem, config) for config in task.candidates)
        us = np.array([e.timing.median_us if e.timing is not None else np.inf for e in evaluations])
        if np.isfinite(us).any():
            view = policy.view(task.problem, task.candidates, evaluator.gpu)
            order = search_order(policy, view, us, min(budgets[-1], len(us)))
            judged.append((task.key, [_choice(evaluations, us, order[:b], preset) for b in budgets]))
    return judged


def _choice(evaluations: Sequence[Evaluation], us: np.ndarray, measured: Sequence[int], preset: str) -> Choice:
    """Return the choice among measured candidates; of equal rewards the first counts."""
    rewards = [reward(evaluations[i], preset) for i in measured]
    best = measured[int(np.argmax(rewards))]
    passed, speedup, right = bool(np.isfinite(us[best])), evaluations[best].speedup, us[np.isfinite(us)]
    quality = float(right.min() / (us[best] if passed else right.max()))
    if max(rewards) <= 0:
        outcome = "none"
    elif evaluations[best].status is not Status.PASSED:
        outcome = "wrong"
    else:
        outcome = "faster" if speedup is not None and speedup.low > 1 else "level"
    return Choice(quality, passed, outcome, max(0.0, *rewards))


def _result(
    request: RecipeRequest, problems: RecipeProblems, measured: HitRates, entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the content of the result file, and write the choices to the run's folder."""
    shares = list(dict.fromkeys((0.0, request.faulty)))
    kept = [e for e in entries if e["faulty"] in shares and e["seed"] < request.seeds]
    about, recording = about_recording(request.recording, problems.whole), problems.recording
    commits = "; ".join(dict.fromkeys(e["commit"] for e in kept))
    provenance = {**about["provenance"], "date": utc_now(), "commit": commits, "command": request.command}
    judged = len({task.problem for task in problems.tasks})
    path = _write_choices(request, problems, kept, about, provenance)
    tried = sum(int(recording.recorded_mask(problem).sum()) for problem in recording.problems)
    return {
        "format": FORMAT,
        "kind": KIND,
        "provenance": provenance,
        "recording": about,
        "settings": {**request.settings(), "seeds": request.seeds},
        "problems": {
            "layout": request.layout,
            "trained": len(problems.part.problems),
            "judged": judged,
            "tasks": len(problems.tasks),
        },
        "hit_rates": hit_rate_errors(recording, measured),
        "faults": {
            "share": request.faulty,
            "speed": FAULT_SPEED,
            "kernels": sum(is_faulty(config, request.faulty) for config in recording.catalogue),
            "of": len(recording.catalogue),
            "failed_cells": tried - int((recording.status == STATUS_CODES[Status.PASSED]).sum()),
        },
        "rows": _rows(path, shares, problems.budgets, kept),
        "curves": [{key: e[key] for key in ("faulty", "reward", "seed", "train_s", "curve")} for e in kept],
    }


def split_name(share: float) -> str:
    """Return the name of a comparison in the file of choices: ``recorded``, or e.g. ``faulty 0.05``."""
    return f"faulty {share:g}" if share else "recorded"


def _write_choices(
    request: RecipeRequest, problems: RecipeProblems, entries: Sequence[Mapping[str, Any]],
    recording: Mapping[str, Any], provenance: Mapping[str, Any],
) -> Path:  # fmt: skip
    """Write the choices as a comparison of the rewards, so that its statistics and its page apply. Return its path."""
    rows = [
        (split_name(e["faulty"]), e["reward"], e["seed"], problem, launch, budget, quality, right)
        for e in entries
        for problem, launch, choices in e["choices"]
        for budget, (quality, right, _) in zip(problems.budgets, choices, strict=True)
    ]
    judged = len({task.problem for task in problems.tasks})
    size = {"training": len(problems.part.problems), "held_out": judged, "searched": judged}
    costs = {}
    for name in dict.fromkeys(e["reward"] for e in entries):
        own = [e for e in entries if e["reward"] == name]
        tasks = sum(len(e["choices"]) for e in own)
        costs[name] = {
            "prepare_s": round(sum(e["train_s"] for e in own) / len(own), 3),
            "task_ms": round(1000 * sum(e["judge_s"] for e in own) / tasks, 3),
        }
    meta = {
        "provenance": provenance,
        "recording": recording,
        "suite": problems.recording.suite,
        "device": f"replay:{request.recording}",
        "agents": list(costs),
        "seeds": request.seeds,
        "splits": {split_name(e["faulty"]): size for e in entries},
        "costs": costs,
    }
    return write_comparison(rows, meta, request.run / CHOICES)


def _rows(
    path: Path, shares: Sequence[float], budgets: Sequence[int], entries: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each share of faulty kernels and reward: regrets by budget, and outcomes at the last budget."""
    comparison, rows = read_comparison(path), []
    for share in shares:
        by_budget = figures(comparison, split_name(share))
        for name in comparison.agents:
            own = [e for e in entries if (e["faulty"], e["reward"]) == (share, name)]
            outcomes = Counter(choices[-1][2] for e in own for _, _, choices in e["choices"])
            regrets = [
                {
                    "budget": budget,
                    "regret": round(by_budget[name, budget].regret, 6),
                    "low": round(1 / by_budget[name, budget].high - 1, 6),
                    "high": round(1 / by_budget[name, budget].low - 1, 6),
                }
                for budget in budgets
            ]
            rows.append(
                {
                    "faulty": share,
                    "reward": name,
                    "regrets": regrets,
                    "mean_regret": round(float(np.mean([r["regret"] for r in regrets])), 6),
                    "outcomes": {outcome: outcomes[outcome] for outcome in OUTCOMES},
                    "choices": sum(outcomes.values()),
                }
            )
    return rows


def hit_rate_errors(recording: Recording, measured: HitRates) -> dict[str, float | int | str | None]:
    """Return the source of the hit rates, the number of measured recorded cells, and the model's error on them.

    The error is the mean absolute one, in shares of 1; None without a measured cell.
    """
    modelled, errors = RecipeEvaluator(recording), []
    for (problem, config), rate in measured.items():
        column = recording.catalogue_index(config)
        if problem in recording.problems and column is not None and recording.recorded_mask(problem)[column]:
            errors.append(abs(rate - modelled.hit_rate(problem, config)))
    return {
        "source": "measured and modelled" if errors else "modelled",
        "measured": len(errors),
        "error": round(float(np.mean(errors)), 4) if errors else None,
    }
