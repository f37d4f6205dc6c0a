"""A tune run as a result file: what its library installs, against the baselines, in the bench format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from outblas.core.config import Launch, config_name
from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator
from outblas.core.roofline import floor_us, regime
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice
from outblas.records.library_row import LibraryRow as LibraryRow
from outblas.records.result_rows import launch_columns
from outblas.records.results import COLUMNS, Row
from outblas.records.store import Store


def result_rows(library: Library, store: Store, run_id: str, evaluator: Evaluator) -> Iterator[Row]:
    """Yield the result rows of a tuned library: one for each problem and launch option, in the library's order.

    The options are ``plain`` and ``pdl``, and ``weights`` if any problem has a kernel for it. A problem without a
    winner has a row with ``fallback`` True. The times come from the evaluations that chose the library, so a row
    carries the bias of selection. ``outblas bench`` times the winners again on fresh inputs.

    Args:
        library: the tuned library.
        store: store of the run's evaluations.
        run_id: name of the run.
        evaluator: evaluator of the run, for baselines that the store lacks.

    Raises:
        RecordError: a problem has no baseline, or the store lacks an evaluation that was installed.
    """
    for row in library.rows:
        known = store.recorded(run_id, row.problem)
        recorded = next((e.baselines_us for e in known.values() if e.baselines_us), None)
        baselines = evaluator.baselines(row.problem) if recorded is None else recorded
        for launch in library.launches:
            choice = row.choice(launch)
            yield (
                _fallback_row(row, launch, known.values(), baselines, evaluator)
                if choice is None
                else _winner_row(row, launch, choice, known.get(choice.config), evaluator)
            )


def _winner_row(
    row: LibraryRow, launch: Launch, choice: LibraryChoice, e: Evaluation | None, evaluator: Evaluator
) -> Row:
    if e is None or e.timing is None or e.speedup is None:
        raise RecordError(f"the winner of {row.problem.key} has no evaluation", "one in the store", "tune again")
    name = e.speedup.baseline
    return {
        **_common(row, launch, name, e.baselines_us, evaluator),
        "config": config_name(e.config),
        "status": e.status.value,
        "fallback": False,
        "ours_us": e.timing.median_us,
        "ours_spread": e.timing.spread,
        "speedup": choice.speedup,
        "low": choice.low,
        "high": choice.high,
        "published": choice.speedup,
        "rounds": len(e.timing.samples_us) or None,
        "repeats": e.timing.repeats if e.timing.samples_us else None,
        "operand_sets": e.timing.operand_sets if e.timing.samples_us else None,
        "sm_clock_mhz": e.counters.get("sm_clock_mhz"),
        "temperature_c": e.counters.get("temperature_c"),
    }


def _fallback_row(
    row: LibraryRow, launch: Launch, tried: Iterable[Evaluation], baselines: Mapping[str, float], evaluator: Evaluator
) -> Row:
    """``status`` is the furthest that any candidate came: ``passed`` when ours was right but not surely faster."""
    order = list(Status)
    reached = max((e.status for e in tried), key=order.index, default=Status.LEFT_OUT)
    return {
        **_common(row, launch, row.baseline, baselines, evaluator),
        "config": "",
        "status": reached.value,
        "fallback": True,
        "published": 1.0,
    }


def _common(row: LibraryRow, launch: Launch, name: str, baselines: Mapping[str, float], evaluator: Evaluator) -> Row:
    problem = row.problem
    if name not in baselines:
        raise RecordError(f"no baseline was timed for {problem.key}", "at least one", "time the baselines in the run")
    return {
        **problem.to_json(),
        "mode": "offline",
        **launch_columns(launch),
        "baseline": name,
        "baseline_us": baselines[name],
        "baseline_detail": evaluator.baseline_detail(problem, name) or None,
        "lt_auto_detail": row.algorithm or None,
        "floor_us": floor_us(problem, evaluator.gpu),
        "regime": regime(problem, evaluator.gpu),
        **{f"{one}_us": us for one, us in baselines.items() if f"{one}_us" in COLUMNS},
    }
