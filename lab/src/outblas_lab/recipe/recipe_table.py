"""The table of the recipe's result file, and the notes under it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Names of the rewards in the table.
REWARD_NAMES = {"additive": "published", "gated": "gated"}


def recipe_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the head of the table and its rows: regret by measurements with its interval, and shares of choices.

    Args:
        result: content of a result file of ``outblas recipe``.
    """
    budgets = [r["budget"] for r in result["rows"][0]["regrets"]]
    head = ["kernels", "reward", *(f"regret after {b}" for b in budgets), "mean regret"]
    rows = [[*head, "wrong chosen", "level chosen"]]
    for row in result["rows"]:
        cells = f"{row['faulty']:.0%} faulty" if row["faulty"] else "as recorded"
        regrets = [f"{r['regret']:.1%} [{r['low']:.1%}, {r['high']:.1%}]" for r in row["regrets"]]
        shares = [f"{row['outcomes'][name] / row['choices']:.1%}" for name in ("wrong", "level")]
        rows.append([cells, REWARD_NAMES[row["reward"]], *regrets, f"{row['mean_regret']:.1%}", *shares])
    return rows


def recipe_notes(result: Mapping[str, Any]) -> list[str]:
    """Return lines on problems, budget, hit rates and faults of a result.

    Args:
        result: content of a result file of ``outblas recipe``.
    """
    settings, problems = result["settings"], result["problems"]
    times = f"{settings['seeds']} training{'s' if settings['seeds'] > 1 else ''} of each reward"
    trials = f"; {settings['trials']} trials of Optuna chose the settings" if settings["trials"] else ""
    return [
        f"Trained on {problems['trained']} problems ({problems['layout']}), {settings['episodes']} episodes of each, "
        f"{settings['budget']} measurements an episode, {times}{trials}.",
        f"Judged on {problems['judged']} problems with other (M, N, K), {problems['tasks']} tasks with launch options.",
        "Shares are of the choices after the last number of measurements.",
        _hit_rate_note(result["hit_rates"]),
        _fault_note(result),
    ]


def _hit_rate_note(rates: Mapping[str, Any]) -> str:
    if not rates["measured"]:
        return "L2 hit rates are modelled (traffic model of the cost model), none is measured."
    return (
        f"L2 hit rates: {rates['measured']} cells are measured, all others are modelled. On the measured cells the "
        f"model is off by {100 * rates['error']:.1f} points in the mean."
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
