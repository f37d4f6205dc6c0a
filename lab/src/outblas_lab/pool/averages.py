"""Averages over the rows of result files. Every published figure is one of these.

A row is a mapping with the columns of :data:`outblas.records.results.COLUMNS`. Means are rounded to six decimals, so
that they are equal on every platform.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outblas.core.stats import MIN_ROUNDS, bootstrap_geomean, flop_weighted, geomean, losses
from outblas.core.suites import LAYER_SUITES
from outblas.records.result_rows import Row, launch_of_row, problem_of

#: Mode -> its way of timing: rounds in which all entries alternate, blocks of one entry alone, or single requests.
PROTOCOLS = {
    "offline": "rounds", "offline_cold": "rounds", "block": "blocks", "server": "requests", "unmeasured": "rounds",
    "learned": "rounds",
}  # fmt: skip
#: A row below this is far behind: beyond the noise between starts.
FAR_BELOW = 0.98
#: Columns of a row of one layout that mean nothing for the best of two.
_OF_ONE_LAYOUT = ("by_start", "torch_full_us", "lt_edges_us", "plain_config", "plain_us", "plain_speedup")
#: Suite of shapes drawn at random: a sample, whose means have an interval over shapes.
DRAWN = "drawn"
#: A product is aligned if N and K are multiples of this: rows of 16 bytes in half precision.
ALIGNED_TO = 8
#: In the llm suite, rows with M up to this count as decode: one token of each request in a batch.
MAX_DECODE_M = 64


def launch_label(row: Mapping[str, Any]) -> str:
    """Return a row's launch option as the column PDL shows it: ``off``, ``on`` or ``on, constant weights``.

    The row needs the keys ``pdl`` and ``early``: ``{"pdl": True, "early": True}`` gives ``on, constant weights``.
    """
    return {"plain": "off", "pdl": "on", "weights": "on, constant weights"}[launch_of_row(row)]


def table_label(suite: str, row: Mapping[str, Any]) -> str:
    """Return the name of a row's table for notes, e.g. ``llm TN fp16/fp32, offline``."""
    return f"{suite} {row['layout']} {row['dtype']}/{row['acc']}, {row['mode']}"


def published_us(row: Mapping[str, Any]) -> float:
    """Return the time, microseconds, of the implementation that the library runs for a row.

    This is the kernel's time, or the fall-back's. If the fall-back was not timed, it is the fastest baseline's time.
    In server mode it is the measured latency of the call, if there is one.
    """
    return float(row["baseline_us"] if row["ours_us"] is None else row["ours_us"])


def figures_of(rows: Sequence[Row]) -> Row:
    """Return the main figures of a set of result rows. A fall-back row counts with what it publishes.

    Args:
        rows: at least one row.

    Returns:
        ``{n, geomean, flop_weighted, losses, fallbacks, min, by_regime: {regime: {n, geomean}}}``. ``losses`` counts
        rows below 0.99; ``min`` is the lowest published speed-up.
    """
    published = [r["published"] for r in rows]
    return {
        "n": len(rows),
        "geomean": _mean(published),
        "flop_weighted": round(flop_weighted(published, [problem_of(r).flops for r in rows]), 6),
        "losses": losses(published),
        "fallbacks": sum(1 for r in rows if r["fallback"]),
        "min": round(min(published), 6),
        "by_regime": figures_by_key(rows, lambda r: str(r["regime"]), regime_order),
    }


def extended_figures(rows: Sequence[Row], suite: str) -> Row:
    """Return further figures of a set of result rows of one mode.

    Args:
        rows: at least one row, all of the same mode.

    Returns:
        A dictionary of these entries.
        ``by_decade``: ``{"1eD": {n, geomean}}`` by decade of FLOP.
        ``geomean_torch``: see :func:`torch_ratio`.
        ``plain_choice``: only if rows have a second winner; ``{n, geomean}``: number of these rows, and the geometric
            mean of all rows if each published its plain choice.
        ``less_clock``: mode offline_cold only, and only if timed; ``{us, geomean}``: the clock's own time (median,
            microseconds), and the geometric mean if it is taken off every time.
        ``geomean_torch_full``: not in server mode, and only if timed; the same over torch without reduced-precision
            reductions.
        ``geomean_lt_edges``: with PDL, and only if timed; the same over cuBLASLt with programmatic edges.
        ``bootstrap``: suite drawn only; see :func:`figures_of_drawn`.
        ``by_alignment``: suite drawn only; see :func:`figures_of_drawn`.
        ``by_m``: suites llm and llm_tp only; ``{"<=64": ..., ">64": ...}``, each ``{n, geomean}``.
        ``p50``: server mode only; ``{geomean, ours_us, baseline_us}`` of the median latency. The last two are geometric
            means in microseconds. None if no row has the latency.
        ``p99``: server mode only; as ``p50``, of the 99th percentile.
        ``p99_torch``: server mode only; as ``p99``, with torch.matmul as the baseline.
        ``geomean_lt_auto``: server mode only; geometric mean of (median latency of a native cuBLASLt call with its
            chosen algorithm / ours). None if not timed.
    """
    found: Row = {"by_decade": figures_by_key(rows, flop_decade, decade_order), "geomean_torch": torch_ratio(rows)}
    if suite == DRAWN:
        found |= figures_of_drawn(rows)
    if suite in LAYER_SUITES:
        found["by_m"] = figures_by_key(
            rows, lambda r: f"<={MAX_DECODE_M}" if r["m"] <= MAX_DECODE_M else f">{MAX_DECODE_M}"
        )
    if second := [row for row in rows if row.get("plain_speedup") is not None]:
        plain = [row["published"] if row.get("plain_speedup") is None else row["plain_speedup"] for row in rows]
        found["plain_choice"] = {"n": len(second), "geomean": _mean(plain)}
    if rows[0]["mode"] == "server":
        found["p50"] = _latencies(rows, "ours_us", "baseline_us")
        found["p99"] = _latencies(rows, "ours_p99_us", "baseline_p99_us")
        found["p99_torch"] = _latencies(rows, "ours_p99_us", "torch_p99_us")
        native = [r["lt_auto_us"] / published_us(r) for r in rows if r.get("lt_auto_us") is not None]
        found["geomean_lt_auto"] = _mean(native) if native else None
        return found
    if rows[0]["mode"] == "offline_cold" and (own := [r for r in rows if r.get("clock_us") is not None]):
        net = [(r["baseline_us"] - r["clock_us"]) / (published_us(r) - r["clock_us"]) for r in own]
        found["less_clock"] = {"us": round(statistics.median(r["clock_us"] for r in own), 3), "geomean": _mean(net)}
    if (full := ratio_over(rows, "torch_full_us")) is not None:
        found["geomean_torch_full"] = full
    if rows[0]["pdl"] and (edges := ratio_over(rows, "lt_edges_us")) is not None:
        found["geomean_lt_edges"] = edges
    return found


def figures_of_drawn(rows: Sequence[Row]) -> Row:
    """Return what a mean over drawn shapes is worth, and what its aligned and unaligned shapes have.

    Returns:
        ``{bootstrap, by_alignment}``. ``bootstrap`` is the 95% interval ``[low, high]`` of the geometric mean over
        shapes; None for fewer than three. ``by_alignment`` is ``{"aligned": ..., "unaligned": ...}``, see
        :data:`ALIGNED_TO`; a part without rows is left out. Each part has the entries of :func:`figures_of` but
        ``by_regime``, and ``below_098``, ``geomean_torch`` and ``bootstrap``.
    """
    parts: dict[str, list[Row]] = {"aligned": [], "unaligned": []}
    for row in rows:
        parts["unaligned" if row["n"] % ALIGNED_TO or row["k"] % ALIGNED_TO else "aligned"].append(row)
    figures = {
        name: {
            **{key: value for key, value in figures_of(part).items() if key != "by_regime"},
            "below_098": losses((row["published"] for row in part), FAR_BELOW),
            "geomean_torch": torch_ratio(part),
            "bootstrap": _bootstrap(part),
        }
        for name, part in parts.items()
        if part
    }
    return {"bootstrap": _bootstrap(rows), "by_alignment": figures}


def _bootstrap(rows: Sequence[Row]) -> list[float] | None:
    """Return the 95% interval of the geometric mean over shapes, rounded as means are; None for too few rows."""
    if len(rows) < MIN_ROUNDS:
        return None
    return [round(end, 6) for end in bootstrap_geomean([row["published"] for row in rows])]


def torch_ratio(rows: Iterable[Row]) -> float | None:
    """Return the geometric mean of (torch.matmul's time / :func:`published_us`); None if no row has torch's time."""
    return ratio_over(rows, "torch_us")


def ratio_over(rows: Iterable[Row], column: str) -> float | None:
    """Return the geometric mean of (another's time / :func:`published_us`); None if no row has the column.

    Args:
        column: column of the other's time, microseconds, e.g. ``torch_us``. Rows without it are left out.
    """
    ratios = [r[column] / published_us(r) for r in rows if r.get(column) is not None]
    return _mean(ratios) if ratios else None


def figures_by_start(rows: Sequence[Row], starts: int | None = None) -> Row:
    """Return the figures that say how far a mean can be trusted.

    Args:
        starts: number of different starts of the machine, as the provenance has it (``Result.starts``). None: each
            figure of ``by_start`` is of another start.

    Returns:
        ``{protocol, starts, below_098, interval}``. ``protocol`` is the way of timing, see :data:`PROTOCOLS`.
        ``starts`` is the number of starts of the machine. ``below_098`` counts rows that publish less than 0.98.
        ``interval`` is the least and the greatest geometric mean of a start. It is None if there was one start, or if
        several means are of the same start.
    """
    each = list(zip(*(row["by_start"] for row in rows), strict=True)) if all(r.get("by_start") for r in rows) else []
    means = [_mean(start) for start in each]
    if starts is not None and starts < len(means):
        means = []
    return {
        "protocol": PROTOCOLS[rows[0]["mode"]],
        "starts": len(means) or starts or 1,
        "below_098": losses((row["published"] for row in rows), FAR_BELOW),
        "interval": [min(means), max(means)] if means else None,
    }


def figures_by_key(
    rows: Iterable[Row], key: Callable[[Row], str], order: Callable[[str], Any] = lambda name: name
) -> dict[str, Row]:
    """Return ``{key: {n, geomean of published}}`` of rows grouped by a key."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row["published"])
    return {name: {"n": len(groups[name]), "geomean": _mean(groups[name])} for name in sorted(groups, key=order)}


def flop_decade(row: Mapping[str, Any]) -> str:
    """Return the decade of a row's FLOP, e.g. ``1e9`` for 1e9 up to 1e10. The row needs the problem's six columns."""
    return f"1e{math.floor(math.log10(problem_of(row).flops))}"


def decade_order(name: str) -> int:
    """Return the exponent in a name of :func:`flop_decade`, as a sort key: ``"1e9"`` gives 9."""
    return int(name.removeprefix("1e"))


def regime_order(name: str) -> tuple[int, int, str]:
    """Return a sort key for regimes: launch, then memory, then compute; each by decade of FLOP.

    Example: ``"memory_1e9"`` gives ``(1, 9, "memory_1e9")``. Other names come last.
    """
    kind, _, power = name.partition("_1e")
    kinds = ("launch", "memory", "compute")
    return (kinds.index(kind) if kind in kinds else len(kinds), int(power) if power.isdigit() else 0, name)


def best_of_layouts(tn: Iterable[Row], nn: Iterable[Row]) -> list[Row]:
    """Return rows that take, per problem, our best time of either layout against the best baseline of either layout.

    The rows answer for callers who control B's layout. The two layouts were timed in separate runs, so the ratios are
    of medians and not paired. A row falls back if the best time belongs to a baseline.

    Args:
        nn: result rows of layout NN. Problems that are missing on either side are left out.
    """
    other = {(r["m"], r["n"], r["k"]): r for r in nn}
    found = []
    for pair in [(r, other[key]) for r in tn if (key := (r["m"], r["n"], r["k"])) in other]:
        ours, base = min(pair, key=published_us), min(pair, key=lambda r: r["baseline_us"])
        torch = [r["torch_us"] for r in pair if r.get("torch_us") is not None]
        row = {name: value for name, value in base.items() if name not in _OF_ONE_LAYOUT}
        row |= {name: ours.get(name) for name in ("config", "ran", "fallback", "ours_us")}
        row |= {"speedup": None, "torch_us": min(torch, default=None)}
        found.append({**row, "published": base["baseline_us"] / published_us(ours)})
    return found


def _latencies(rows: Iterable[Row], ours: str, baseline: str) -> Row | None:
    """Return ``{geomean, ours_us, baseline_us}`` of two columns of latencies, microseconds.

    A fall-back row without a latency of its own counts with the baseline's. Return None if no row has both columns.
    """
    known = [r for r in rows if r.get(baseline) is not None and (r["fallback"] or r.get(ours) is not None)]
    if not known:
        return None
    theirs = [r[baseline] for r in known]
    mine = [r[baseline] if r.get(ours) is None else r[ours] for r in known]
    ratios = [b / o for b, o in zip(theirs, mine, strict=True)]
    return {"geomean": _mean(ratios), "ours_us": _mean(mine), "baseline_us": _mean(theirs)}


def _mean(values: Sequence[float]) -> float:
    return round(geomean(values), 6)
