"""The result file of ``outblas recipe``: its table, and the notes under it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.plain_files import read_object

FORMAT = 1
KIND = "recipe"
#: Fields of a result that readers need.
_FIELDS = ("provenance", "recording", "settings", "problems", "hit_rates", "faults", "rows", "curves")
#: Outcomes of a choice, see :class:`outblas_lab.recipe.recipe.Choice`.
OUTCOMES = ("faster", "level", "wrong", "none")
#: The compared rewards, the published one first, and their names in the table.
REWARD_NAMES = {"additive": "published", "gated": "gated"}


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the content of a result file of ``outblas recipe``.

    Raises:
        RecordError: it cannot be read, is of another kind or version, or lacks a field.
    """
    do = "recreate it with: outblas recipe"
    data = read_object(path, f"a file of kind {KIND}, format {FORMAT}", do, kind=KIND, format=FORMAT)
    missing = [name for name in _FIELDS if name not in data]
    if missing:
        raise RecordError(f"{path} lacks {', '.join(missing)}", "every field", do)
    return data


def recipe_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the head of the table and its rows: regret by measurements with its interval, and shares of choices.

    Args:
        result: content of a result file of ``outblas recipe``.
    """
    budgets = [r["budget"] for r in result["rows"][0]["regrets"]]
    head = ["kernels", "reward", *(f"regret after {b}" for b in budgets), "mean regret"]
    rows = [[*head, "wrong choices", "choices not faster"]]
    for row in result["rows"]:
        cells = f"{row['faulty']:.0%} faulty" if row["faulty"] else "as recorded"
        regrets = [f"{r['regret']:.1%} [{r['low']:.1%}, {r['high']:.1%}]" for r in row["regrets"]]
        shares = [f"{row['outcomes'][name] / row['choices']:.1%}" for name in ("wrong", "level")]
        rows.append([cells, REWARD_NAMES[row["reward"]], *regrets, f"{row['mean_regret']:.1%}", *shares])
    return rows


def recipe_notes(result: Mapping[str, Any]) -> list[str]:
    """Return lines on problems, budget, hit rates and faults of a result."""
    settings, problems = result["settings"], result["problems"]
    times = f"{settings['seeds']} training{'s' if settings['seeds'] > 1 else ''} of each reward"
    return [
        f"Trained on {problems['trained']} problems ({problems['layout']}), {settings['episodes']} episodes of each, "
        f"{settings['budget']} measurements an episode, {times}.",
        f"Judged on {problems['judged']} problems with other (M, N, K), {problems['tasks']} tasks with launch options.",
        "Regret: time that the choice loses to the fastest correct kernel. In brackets: its 95% interval.",
        "Wrong choices failed a gate. Choices not faster are correct, but not significantly faster than the fastest "
        "baseline. Both are shares of the choices after the last number of measurements.",
        _hit_rate_note(result["hit_rates"]),
        _fault_note(result),
        *(_trial_note(REWARD_NAMES[name], each) for name, each in result.get("tuned", {}).items()),
    ]


def _trial_note(name: str, tuned: Mapping[str, Any]) -> str:
    own = tuned["settings"]
    return (
        f"Settings of the {name} reward by {tuned['trials']} trials: learning rate {own['lr']:.2g}, batch "
        f"{own['batch']}, discount {own['gamma']:.3f}, entropy bonus {own['entropy']:.2g}, {own['budget']} "
        "measurements an episode."
    )


def _hit_rate_note(rates: Mapping[str, Any]) -> str:
    if not rates["measured"]:
        return "All L2 hit rates are modelled (traffic model of the cost model)."
    return (
        f"L2 hit rates: {rates['measured']} cells are measured; all others are modelled. On the measured cells the "
        f"mean error of the model is {100 * rates['error']:.1f} points."
    )


def _fault_note(result: Mapping[str, Any]) -> str:
    faults = result["faults"]
    count = faults["failed_cells"]
    failed = f"{count or 'No'} recorded cell{'s' if count > 1 else ''} failed a gate"
    if not faults["share"]:
        return f"{failed}, and no kernel was injected as faulty."
    return (
        f"{failed}. {faults['kernels']} of {faults['of']} candidates were injected as faulty in the other rows: wrong "
        f"on every problem, and {faults['speed']:.2f} times as fast as recorded."
    )
