"""Report of a mutation run: the share of mutants that the tests kill, with an interval, and the survivors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutation.mutant_list import Mutant, Plan
from mutation.mutant_runs import KILLED, SURVIVED, TIMED_OUT, MutantResult

from outblas.core.errors import RecordError
from outblas.core.stats import wilson_interval

EQUIVALENT = Path(__file__).with_name("equivalent.json")
#: Fields of an entry of that file, a mutant's key and why no test can tell it from the original.
KEY_FIELDS = ("file", "function", "operator", "was", "becomes")
IS_EQUIVALENT, NOT_RUN = "equivalent", "not run"
OUTCOMES = (KILLED, TIMED_OUT, SURVIVED, IS_EQUIVALENT, NOT_RUN)


def read_equivalent(path: Path) -> dict[tuple[str, ...], str]:
    """Return the reviewed reasons by the mutants' keys.

    Raises:
        RecordError: the file is no such list, or an entry lacks a field or its reason.
    """
    try:
        entries = json.loads(path.read_text())
        found = {tuple(str(entry[name]) for name in KEY_FIELDS): str(entry["reason"]) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(
            f"{path} cannot be read ({error!r})", f"a list of {', '.join(KEY_FIELDS)}, reason", "mend the entry"
        ) from error
    if not all(reason.strip() for reason in found.values()):
        raise RecordError(f"{path} has an entry without a reason", "why no test can tell it", "write the reason")
    return found


def outcomes_of(
    plan: Plan,
    results: Mapping[tuple[str, str], MutantResult],
    equivalent: Mapping[tuple[str, ...], str],
    suite: str,
) -> dict[str, str]:
    """Return the outcome of each mutant. One that the tests kill is not equivalent, whatever the list says."""
    found = {}
    for mutant in plan.mutants:
        result = results.get((mutant.id, suite))
        outcome = NOT_RUN if result is None else result.outcome
        found[mutant.id] = IS_EQUIVALENT if outcome == SURVIVED and mutant.key in equivalent else outcome
    return found


def _rate(outcomes: Iterable[str]) -> dict[str, Any]:
    counts = Counter(outcomes)
    dead = counts[KILLED] + counts[TIMED_OUT]
    of = dead + counts[SURVIVED]
    low, high = wilson_interval(dead, of)
    share = dead / of if of else None
    return {**{name: counts[name] for name in OUTCOMES}, "rate": share, "low": low, "high": high}


def report(
    plan: Plan,
    results: Mapping[tuple[str, str], MutantResult],
    equivalent: Mapping[tuple[str, ...], str],
    suite: str = "cpu",
    other: str = "gpu",
) -> dict[str, Any]:
    """Return the report. The rate is of all mutants that were run and are not equivalent; a timeout counts as killed.

    What the suite `other` kills among the survivors is named, and not counted.
    """
    outcomes = outcomes_of(plan, results, equivalent, suite)
    drawn = {mutant.key for mutant in plan.mutants}
    run = [results[mutant.id, suite] for mutant in plan.mutants if (mutant.id, suite) in results]

    def row(mutant: Mutant) -> dict[str, Any]:
        elsewhere = results.get((mutant.id, other))
        return {
            "id": mutant.id,
            **dict(zip(KEY_FIELDS, mutant.key, strict=True)),
            "tests": results[mutant.id, suite].tests,
            other: "" if elsewhere is None else elsewhere.outcome,
            f"{other}_by": "" if elsewhere is None else elsewhere.by,
            "diff": mutant.diff,
        }

    return {
        "about": dict(plan.about),
        "mutants": len(plan.mutants),
        "all": _rate(outcomes.values()),
        "areas": {
            area: _rate(outcomes[mutant.id] for mutant in plan.mutants if mutant.area == area)
            for area in sorted({mutant.area for mutant in plan.mutants})
        },
        "seconds": round(sum(result.seconds for result in run), 1),
        "no_test": sum(outcomes[result.id] == SURVIVED and not result.tests for result in run),
        "survivors": [row(mutant) for mutant in plan.mutants if outcomes[mutant.id] == SURVIVED],
        "equivalent": [
            {"id": mutant.id, "reason": equivalent[mutant.key]}
            for mutant in plan.mutants
            if outcomes[mutant.id] == IS_EQUIVALENT
        ],
        "killed_though_listed": [
            mutant.id
            for mutant in plan.mutants
            if mutant.key in equivalent and outcomes[mutant.id] in (KILLED, TIMED_OUT)
        ],
        "listed_not_drawn": [list(key) for key in equivalent if key not in drawn],
        "results": {
            result.id: {"outcome": outcomes[result.id], "by": result.by, "seconds": result.seconds} for result in run
        },
    }


def report_text(found: Mapping[str, Any], other: str = "gpu") -> str:
    """Return a report as text: the counts, a line for each area, and a diff of each survivor."""
    about = found["about"]
    files = len(about["files"])
    lines = [
        f"Mutation run of commit {about['commit']}, drawn {about['drawn']}, seed {about['seed']}",
        f"{found['mutants']} mutants, each with the same chance, of {about['candidates']} candidates in {files} files",
        *(f"  left out when drawn: {count}, {why}" for why, count in sorted(about["left_out"].items())),
        "",
        f"{'area':12}" + "".join(f"{name:>12}" for name in OUTCOMES) + f"{'rate':>8}   95% interval",
        *(_line(area, rate) for area, rate in found["areas"].items()),
        _line("all", found["all"]),
        "",
        "rate: killed and timed out, of these and the survivors. Intervals: Wilson.",
        f"{found['no_test']} survivors are on lines that no test was seen to run.",
        f"{found['seconds']:.0f} seconds of work, for all processes together.",
        *(f"listed as equivalent, but killed: {name}" for name in found["killed_though_listed"]),
    ]
    for row in found["survivors"]:
        by = f"; {other}: {row[other]} {row[f'{other}_by']}".rstrip() if row[other] else ""
        lines += ["", f"survived: {row['id']} ({row['tests']} tests{by})", row["diff"]]
    return "\n".join(lines) + "\n"


def _line(name: str, rate: Mapping[str, Any]) -> str:
    share = "-" if rate["rate"] is None else f"{rate['rate']:.3f}"
    counts = "".join(f"{rate[outcome]:>12}" for outcome in OUTCOMES)
    return f"{name:12}{counts}{share:>8}   {rate['low']:.3f} to {rate['high']:.3f}"


def survivors_of(plan: Plan, results: Mapping[tuple[str, str], MutantResult], suite: str) -> Sequence[Mutant]:
    """Return the mutants of the plan that a suite let live, equivalent ones included."""
    alive = {key[0] for key, result in results.items() if key[1] == suite and result.outcome == SURVIVED}
    return [mutant for mutant in plan.mutants if mutant.id in alive]
