"""Averages over result rows: what every published figure is, from rows in hand.

A row is a row of a result file (see :data:`outblas.records.results.COLUMNS`). Means are rounded to six decimals,
so that no platform's logarithm shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outblas.core.config import Launch
from outblas.core.problem import Problem
from outblas.core.stats import flop_weighted, geomean, losses

Row = dict[str, Any]

#: Rows of M at or below it are "decode" in the llm suite: one token each of a batch.
MAX_DECODE_M = 64


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The problem of a result row."""
    return Problem.from_json(dict(row))


def launch_of_row(row: Mapping[str, Any]) -> Launch:
    """The launch option that a result row is of."""
    return "weights" if row["early"] else "pdl" if row["pdl"] else "plain"


def launch_columns(launch: Launch) -> Row:
    """The inverse of :func:`launch_of_row`: what a result row says of its launch option."""
    return {"pdl": launch != "plain", "early": launch == "weights"}


def launch_label(row: Mapping[str, Any]) -> str:
    """The launch option of a result or summary row as tables have it in their column PDL."""
    return {"plain": "off", "pdl": "on", "weights": "on, constant weights"}[launch_of_row(row)]


def table_label(suite: str, row: Mapping[str, Any]) -> str:
    """Which table a result or summary row is of, as notes have it."""
    return f"{suite} {row['layout']} {row['dtype']}/{row['acc']}, {row['mode']}"


def published_us(row: Mapping[str, Any]) -> float:
    """Time of what a library row names: our kernel, or the baseline where it falls back; served: of the call."""
    served = row["mode"] == "server" and row["ours_us"] is not None
    return float(row["baseline_us"] if row["fallback"] and not served else row["ours_us"])


def figures_of(rows: Sequence[Row]) -> Row:
    """The figures of a set of result rows; a fall-back row counts as its published 1.0.

    ``{n, geomean, flop_weighted, losses, fallbacks, min, by_regime: {regime: {n, geomean}}}``.
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
    """Figures of a set of rows of one mode beyond :func:`figures_of`.

    ``by_decade: {"1eD": {n, geomean}}`` of FLOP; ``geomean_torch``, see :func:`torch_ratio` (None without
    torch); for suite llm ``by_m: {"<=64", ">64"}``; for server rows ``p50``, ``p99`` and
    ``p99_torch`` (over torch.matmul), each
    ``{geomean, ours_us, baseline_us}``, the last two geometric means in microseconds, and ``geomean_lt_auto``, of the
    median latency of a native call of cuBLASLt with its algorithm chosen over ours. ``demoted: {n, min}``:
    kernels that this very bench demoted, and the worst speed-up among them; absent where there are none.
    """
    found: Row = {"by_decade": figures_by_key(rows, flop_decade, decade_order), "geomean_torch": torch_ratio(rows)}
    if suite == "llm":
        found["by_m"] = figures_by_key(
            rows, lambda r: f"<={MAX_DECODE_M}" if r["m"] <= MAX_DECODE_M else f">{MAX_DECODE_M}"
        )
    if rows[0]["mode"] == "server":
        found["p50"] = _latencies(rows, "ours_us", "baseline_us")
        found["p99"] = _latencies(rows, "ours_p99_us", "baseline_p99_us")
        found["p99_torch"] = _latencies(rows, "ours_p99_us", "torch_p99_us")
        native = [r["lt_auto_us"] / published_us(r) for r in rows if r.get("lt_auto_us") is not None]
        found["geomean_lt_auto"] = _mean(native) if native else None
        return found
    demoted = [r["speedup"] for r in rows if r["fallback"] and r.get("speedup") is not None]
    if demoted:
        found["demoted"] = {"n": len(demoted), "min": round(min(demoted), 6)}
    return found


def torch_ratio(rows: Iterable[Row]) -> float | None:
    """Geometric mean of torch.matmul's time over that of what the library runs; None if torch was not timed.

    A row that falls back counts with the time of the fastest baseline. outblas.matmul runs that, or autotuned
    cuBLASLt's algorithm where it is within 1% of it (see :attr:`outblas.records.library.LibraryRow.fallback`).
    """
    ratios = [r["torch_us"] / published_us(r) for r in rows if r.get("torch_us") is not None]
    return _mean(ratios) if ratios else None


def figures_by_key(
    rows: Iterable[Row], key: Callable[[Row], str], order: Callable[[str], Any] = lambda name: name
) -> dict[str, Row]:
    """``{key: {n, geomean of published}}``, keys in the given order."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row["published"])
    return {name: {"n": len(groups[name]), "geomean": _mean(groups[name])} for name in sorted(groups, key=order)}


def flop_decade(row: Mapping[str, Any]) -> str:
    """Decade of a row's FLOP: ``1e9`` is 1e9 to 1e10."""
    return f"1e{math.floor(math.log10(problem_of(row).flops))}"


def decade_order(name: str) -> int:
    """Sort key of :func:`flop_decade`'s names."""
    return int(name.removeprefix("1e"))


def regime_order(name: str) -> tuple[int, int, str]:
    """Sort key of regimes: launch, then memory, then compute, each by decade of FLOP."""
    kind, _, power = name.partition("_1e")
    kinds = ("launch", "memory", "compute")
    return (kinds.index(kind) if kind in kinds else len(kinds), int(power) if power.isdigit() else 0, name)


def best_of_layouts(tn: Iterable[Row], nn: Iterable[Row]) -> list[Row]:
    """Rows of the problems that both have: our best time of either layout against the best baseline of either.

    For whoever may choose how B is stored. The two layouts were timed in runs of their own, so these ratios are
    of medians and not paired. A row falls back where the best time of either layout is a baseline's.
    """
    other = {(r["m"], r["n"], r["k"]): r for r in nn}
    pairs = [(r, other[key]) for r in tn if (key := (r["m"], r["n"], r["k"])) in other]
    return [_best_of(pair) for pair in pairs]


def _best_of(pair: tuple[Row, Row]) -> Row:
    ours, base = min(pair, key=published_us), min(pair, key=lambda r: r["baseline_us"])
    torch = [r["torch_us"] for r in pair if r.get("torch_us") is not None]
    return {
        **base,
        "config": ours["config"],
        "fallback": ours["fallback"],
        "speedup": base["speedup"] if base["fallback"] else None,  # of a kernel that was demoted; others were not
        "ours_us": None if ours["fallback"] else ours["ours_us"],
        "torch_us": min(torch, default=None),
        "published": base["baseline_us"] / published_us(ours),
    }


def _latencies(rows: Iterable[Row], ours: str, baseline: str) -> Row | None:
    """A fall-back row's latency is the baseline's where its own was not kept; None where no row has this percentile."""
    known = [r for r in rows if r.get(baseline) is not None and (r["fallback"] or r.get(ours) is not None)]
    if not known:
        return None
    theirs = [r[baseline] for r in known]
    mine = [r[baseline] if r.get(ours) is None else r[ours] for r in known]
    ratios = [b / o for b, o in zip(theirs, mine, strict=True)]
    return {"geomean": _mean(ratios), "ours_us": _mean(mine), "baseline_us": _mean(theirs)}


def _mean(values: Sequence[float]) -> float:
    return round(geomean(values), 6)
