"""The result file of the recipe: regrets with intervals, and how often a wrong or level kernel is chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outblas.core.config import KernelConfig
from outblas.core.errors import RecordError
from outblas.core.evaluation import Status
from outblas.core.plain_files import read_json
from outblas.core.problem import Problem
from outblas.records.provenance import utc_now
from outblas_lab.compare.compare_result import read_comparison, write_comparison
from outblas_lab.compare.compare_run import about_recording
from outblas_lab.compare.compare_stats import figures
from outblas_lab.recipe.recipe_choices import OUTCOMES
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.train.recipe_evaluator import FAULT_SPEED, Faults, RecipeCells, count_faulty, measured_cells

if TYPE_CHECKING:
    from outblas_lab.recipe.recipe_run import RecipeProblems, RecipeRequest
    from outblas_lab.train.recipe_training import RecipeSettings

FORMAT, KIND = 1, "recipe"
#: Choices of a run, in its folder; a comparison whose agents are the rewards.
CHOICES = "choices.parquet"
#: Fields of a result that readers need.
_FIELDS = ("provenance", "recording", "settings", "problems", "hit_rates", "faults", "rows", "curves")


def recipe_result(
    request: RecipeRequest, problems: RecipeProblems, settings: RecipeSettings,
    measured: Mapping[tuple[Problem, KernelConfig], float], entries: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """Return the content of the result file, and write the choices to the run's folder.

    Args:
        request: settings of the run.
        problems: its problems.
        settings: the hyper-parameters of its trainings.
        measured: (problem, kernel) -> measured L2 hit rate.
        entries: entries of its journal. Those outside the request are left out.
    """
    shares = list(dict.fromkeys((0.0, request.faulty)))
    kept = [e for e in entries if e["faulty"] in shares and e["seed"] < request.seeds]
    about = about_recording(request.recording, problems.whole)
    commits = "; ".join(dict.fromkeys(e["commit"] for e in kept))
    provenance = {**about["provenance"], "date": utc_now(), "commit": commits, "command": request.command}
    path = _write_choices(request, problems, kept, about, provenance)
    return {
        "format": FORMAT,
        "kind": KIND,
        "provenance": provenance,
        "recording": about,
        "settings": {**asdict(settings), "trials": request.trials, "seeds": request.seeds},
        "problems": {
            "layout": request.layout,
            "trained": len(problems.part.problems),
            "judged": len({task.problem for task in problems.tasks}),
            "tasks": len(problems.tasks),
        },
        "hit_rates": _hit_rates(problems, measured),
        "faults": {
            "share": request.faulty,
            "speed": FAULT_SPEED,
            "kernels": count_faulty(problems.recording, Faults(request.faulty)),
            "of": len(problems.recording.catalogue),
            "failed_cells": _failed_cells(problems.recording),
        },
        "rows": _rows(path, shares, problems.budgets, kept),
        "curves": [{key: e[key] for key in ("faulty", "reward", "seed", "train_s", "curve")} for e in kept],
    }


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the content of a result file of ``outblas recipe``.

    Raises:
        RecordError: it cannot be read, is of another kind or version, or lacks a field.
    """
    do = "make it again: outblas recipe"
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read ({error})", "a whole JSON file", do) from error
    if not isinstance(data, dict) or (data.get("format"), data.get("kind")) != (FORMAT, KIND):
        raise RecordError(f"{path} is of another kind or version", f"kind {KIND}, format {FORMAT}", do)
    missing = [name for name in _FIELDS if name not in data]
    if missing:
        raise RecordError(f"{path} lacks {', '.join(missing)}", "every field", do)
    return data


def split_name(share: float) -> str:
    """Return the name of a comparison in the file of choices: ``recorded``, or e.g. ``faulty 0.05``."""
    return f"faulty {share:g}" if share else "recorded"


def _failed_cells(recording: Recording) -> int:
    """Return the number of tried cells that failed a gate."""
    tried = sum(int(recording.recorded_mask(problem).sum()) for problem in recording.problems)
    return tried - int((recording.status == STATUS_CODES[Status.PASSED]).sum())


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
    rewards = list(dict.fromkeys(e["reward"] for e in entries))
    judged = len({task.problem for task in problems.tasks})
    size = {"training": len(problems.part.problems), "held_out": judged, "searched": judged}
    meta = {
        "provenance": provenance,
        "recording": recording,
        "suite": problems.recording.suite,
        "device": f"replay:{request.recording}",
        "agents": rewards,
        "seeds": request.seeds,
        "splits": {split_name(e["faulty"]): size for e in entries},
        "costs": {reward: _cost([e for e in entries if e["reward"] == reward]) for reward in rewards},
    }
    return write_comparison(rows, meta, request.run / CHOICES)


def _cost(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return CPU seconds of a training and CPU milliseconds of a task, on average."""
    tasks = sum(len(e["choices"]) for e in entries)
    return {
        "prepare_s": round(sum(e["train_s"] for e in entries) / len(entries), 3),
        "task_ms": round(1000 * sum(e["judge_s"] for e in entries) / tasks, 3),
    }


def _rows(
    path: Path, shares: Sequence[float], budgets: Sequence[int], entries: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each share of faulty kernels and reward: regrets by budget, and outcomes at the last budget."""
    comparison, rows = read_comparison(path), []
    for share in shares:
        made = figures(comparison, split_name(share))
        for reward in comparison.agents:
            mine = [e for e in entries if (e["faulty"], e["reward"]) == (share, reward)]
            outcomes = Counter(choices[-1][2] for e in mine for _, _, choices in e["choices"])
            regrets = [
                {
                    "budget": budget,
                    "regret": round(made[reward, budget].regret, 6),
                    "low": round(1 / made[reward, budget].high - 1, 6),
                    "high": round(1 / made[reward, budget].low - 1, 6),
                }
                for budget in budgets
            ]
            rows.append(
                {
                    "faulty": share,
                    "reward": reward,
                    "regrets": regrets,
                    "mean_regret": round(float(np.mean([r["regret"] for r in regrets])), 6),
                    "outcomes": {name: outcomes[name] for name in OUTCOMES},
                    "choices": sum(outcomes.values()),
                }
            )
    return rows


def _hit_rates(
    problems: RecipeProblems, measured: Mapping[tuple[Problem, KernelConfig], float]
) -> dict[str, float | int | str | None]:
    """Return the source of the hit rates; with measured ones, the mean absolute error of the model on them."""
    pairs = measured_cells(problems.recording, RecipeCells(measured=measured))
    error = round(float(np.mean([abs(a - b) for a, b in pairs])), 4) if pairs else None
    return {"source": "modelled" if not pairs else "measured and modelled", "measured": len(pairs), "error": error}
