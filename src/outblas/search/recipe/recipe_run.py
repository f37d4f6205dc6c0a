"""The published reward beside the gated one: trainings on the same problems and budget, to one result file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.files import write_json
from outblas.core.journal import Journal
from outblas.core.suites import sample
from outblas.learn.train.hit_rate_file import read_hit_rates
from outblas.learn.train.recipe_evaluator import Faults, RecipeCells, RecipeEvaluator
from outblas.learn.train.recipe_sweep import search_recipe
from outblas.learn.train.recipe_training import RecipeSettings, train_by_reward
from outblas.learn.train.train_ppo import TrainingRun
from outblas.learn.train.training_part import TrainingPart
from outblas.records.provenance import source_commit
from outblas.records.recording import Recording, recording_sha
from outblas.search.compare.held_out import HeldOutTask, Plan, held_out_tasks
from outblas.search.recipe.recipe_choices import judge_policy
from outblas.search.recipe.recipe_result import recipe_result

#: The compared rewards, the published one first.
REWARDS = ("additive", "gated")
#: Numbers of measurements after which a choice is judged, up to the budget of an episode.
JUDGED_AFTER = (1, 2, 4, 8)
#: Called with (done, in all, message).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class RecipeRequest:
    """Arguments of :func:`run_recipe`.

    Attributes:
        recording: name or path of the recording.
        settings: shapes, episodes, budget and hyper-parameters.
        layout: layout of the problems, ``TN`` or ``NN``.
        judged: number of judged problems, whose (M, N, K) no training has.
        seeds: trainings of each reward.
        faulty: share of kernels that are injected as faulty in a second comparison; 0: there is no second one.
        hit_rates: file of measured L2 hit rates; None: all are modelled.
        trials: trials of Optuna under the published reward; 0: the settings are taken as they are.
        wandb: True logs each training to Weights & Biases, offline.
        run: folder of checkpoints and logs.
        out: the result file, JSON.
        command: the command line, for provenance.
    """

    recording: str
    settings: RecipeSettings
    layout: str
    judged: int
    seeds: int
    faulty: float
    hit_rates: Path | None
    trials: int
    wandb: bool
    run: Path
    out: Path
    command: str


@dataclass(frozen=True)
class RecipeProblems:
    """The problems of a run.

    Attributes:
        whole: the recording, with all layouts.
        recording: its problems of one layout.
        part: problems of the trainings.
        tasks: judged problems and launch options.
        budgets: numbers of measurements after which a choice is judged.
    """

    whole: Recording
    recording: Recording
    part: TrainingPart
    tasks: list[HeldOutTask]
    budgets: tuple[int, ...]


def run_recipe(
    request: RecipeRequest, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Train by both rewards, judge their choices, and write the result file; return its content.

    Both rewards have the same problems, budget and hyper-parameters. If trials are asked, Optuna searches the
    hyper-parameters under the published reward. A killed run resumes from the run's folder.

    Args:
        request: settings of the run.
        progress: called with (episodes or trials done, in all, text).
        say: called with one line before each training.

    Raises:
        UsageError: a number is out of range, the recording has too few problems, or the folder has a run of other
            settings.
        RecordError: a file cannot be read or written, or another process uses the folder.
        ToolchainMissing: torch, sb3-contrib, optuna or wandb is needed and not installed.
    """
    _check(request)
    problems = recipe_problems(request)
    measured = {} if request.hit_rates is None else read_hit_rates(request.hit_rates)
    journal = Journal(request.run / "recipe.jsonl", _journal_settings(request, problems, measured))
    try:
        settings = _settings(request, problems, RecipeCells(measured=measured), progress)
        known = {(e["faulty"], e["reward"], e["seed"]) for e in journal.entries}
        for share, preset, seed in _trainings(request):
            if (share, preset, seed) not in known:
                if say is not None:
                    say(f"training: {_named(share, preset, seed)}")
                cells = RecipeCells(Faults(share), measured)
                journal.append(_train_and_judge(request, problems, settings, cells, preset, seed, progress))
        result = recipe_result(request, problems, settings, measured, journal.entries)
        write_json(request.out, result)
    finally:
        journal.close()
    return result


def recipe_problems(request: RecipeRequest) -> RecipeProblems:
    """Return the problems of a run: those of the trainings, and judged ones with other (M, N, K).

    Raises:
        UsageError: the recording has no problem of the layout, or too few.
    """
    whole = Recording.load(request.recording)
    kept = [p for p in whole.problems if p.layout == request.layout]
    if not kept:
        found = ", ".join(sorted({p.layout for p in whole.problems}))
        raise UsageError(f"layout {request.layout} of recording {request.recording}", found, "pass another --layout")
    recording = whole.restricted_to(kept)
    last = request.settings.budget
    budgets = tuple(dict.fromkeys([*(b for b in JUDGED_AFTER if b < last), last]))
    split, tasks = held_out_tasks(Plan(request.recording, budgets, sample=request.judged), recording, "shapes")
    shapes = request.settings.shapes
    if shapes > len(split.training):
        raise UsageError(f"--shapes is {shapes}", f"1 to {len(split.training)}", "pass a smaller --shapes")
    drawn = tuple(sample(split.training, shapes, gpu=recording.gpu))
    return RecipeProblems(whole, recording, TrainingPart(recording, drawn), tasks, budgets)


def _check(request: RecipeRequest) -> None:
    for name, value, least in (
        ("--judged", request.judged, 1), ("--seeds", request.seeds, 1), ("--trials", request.trials, 0)
    ):  # fmt: skip
        if value < least:
            raise UsageError(f"{name} is {value}", f"an integer of {least} or more", f"pass a larger {name}")
    Faults(request.faulty)
    request.settings.ppo(REWARDS[0], 0)
    if request.out.is_dir():
        raise UsageError(f"--out {request.out} is a folder", "a result file", "name a file in it")


def _journal_settings(request: RecipeRequest, problems: RecipeProblems, measured: dict[Any, float]) -> dict[str, Any]:
    """Return the settings on which every entry depends. Seeds and faults may grow: their trainings are added."""
    return {
        "recording": recording_sha(problems.recording),
        "settings": asdict(request.settings),
        "judged": [list(task.key) for task in problems.tasks],
        "trials": request.trials,
        "hit_rates": sorted((p.key, str(c), rate) for (p, c), rate in measured.items()),
    }


def _trainings(request: RecipeRequest) -> Iterator[tuple[float, str, int]]:
    """Yield (share of faulty kernels, reward, seed) of every training in order."""
    for share in dict.fromkeys((0.0, request.faulty)):
        for preset in REWARDS:
            for seed in range(request.seeds):
                yield share, preset, seed


def _named(share: float, preset: str, seed: int) -> str:
    cells = f"{share:.0%} faulty kernels" if share else "recorded kernels"
    return f"reward {preset}, {cells}, seed {seed}"


def _settings(
    request: RecipeRequest, problems: RecipeProblems, cells: RecipeCells, progress: Progress | None
) -> RecipeSettings:
    """Return the hyper-parameters: the request's, or those that Optuna finds."""
    if not request.trials:
        return request.settings
    folder = request.run / "sweep"
    return search_recipe(problems.part, request.trials, folder, request.settings, cells, progress=progress)[0]


def _train_and_judge(
    request: RecipeRequest, problems: RecipeProblems, settings: RecipeSettings, cells: RecipeCells, preset: str,
    seed: int, progress: Progress | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the journal's entry of one training: its course, and its choices on the judged tasks."""
    share, start = cells.faults.share, process_time()
    run = TrainingRun(request.run / f"{preset}-faulty{share:g}-seed{seed}", wandb=request.wandb)
    trained = train_by_reward(problems.part, settings.ppo(preset, seed), cells, run, progress)
    prepared = process_time()
    evaluator = RecipeEvaluator(problems.recording, cells)
    judged = judge_policy(trained.policy, evaluator, problems.tasks, preset, problems.budgets)
    return {
        "faulty": share,
        "reward": preset,
        "seed": seed,
        "commit": source_commit(),
        "train_s": round(prepared - start, 3),
        "judge_s": round(process_time() - prepared, 3),
        "curve": trained.curve,
        "choices": [[*task.key, [[c.quality, c.right, c.outcome] for c in task.choices]] for task in judged],
    }
