"""Plotly figures as plain JSON: the numbers in them are the recorded rows' own.

Ratios are drawn on logarithmic scales centred at 1.0, so that 2x faster and 2x slower are equally
far from it.
"""

from __future__ import annotations

import math
from typing import Any

from outblas.core.roofline import GPUS, Gpu
from outblas.publish.html.run_data import Group, shape, tflops
from outblas.publish.palette import GREY, GRID, INK, ratio_ticks
from outblas.publish.words import PDL_NAMES
from outblas.records.averages import Row, decade_order, figures_by_key, flop_decade, problem_of, published_us

Figure = dict[str, Any]

SERIES_COLOURS = {False: "#c2570c", True: "#0b5fcc"}
#: Slower is orange, faster is blue: told apart with every common colour blindness.
SCALE = [[0.0, "#b04a06"], [0.25, "#efa26a"], [0.5, "#f7f7f5"], [0.75, "#7db0ee"], [1.0, "#0a4fae"]]
#: Ratio at which the colour scale saturates at most, and at least.
SCALE_MOST, SCALE_LEAST = 2.0, 1.1


def group_figures(group: Group, gpu_name: str) -> dict[str, Figure]:
    """Every figure of a group by name; roofline only where times are GPU times."""
    made = {"curve": curve(group), "histogram": histogram(group), "heat": heat(group), "decades": decades(group)}
    if group.mode != "server":
        made["roofline"] = roofline(group, find_gpu(gpu_name))
    return made


def curve(group: Group) -> Figure:
    """Sorted published speed-ups against the share of problems, one curve per PDL."""
    data = []
    for pdl in group.pdls:
        rows = sorted(group.of_pdl(pdl), key=lambda r: r["published"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": PDL_NAMES[pdl],
                "x": [100 * (i + 0.5) / len(rows) for i in range(len(rows))],
                "y": [r["published"] for r in rows],
                "text": [_hover(r) for r in rows],
                "hovertemplate": "%{text}<extra></extra>",
                "line": {"color": SERIES_COLOURS[pdl], "width": 2.5, "dash": "solid" if pdl else "dot"},
            }
        )
    low, high = _extent([r["published"] for r in group.rows])
    ticks = ratio_ticks(low, high)
    layout = _layout("share of problems, sorted (%)", "speed-up over the best baseline (×)")
    layout["xaxis"] |= {"range": [0, 100]}
    layout["yaxis"] |= {"type": "log", "range": [math.log10(low), math.log10(high)], **_tick(ticks, ticks)}
    layout["shapes"] = [_line(y=1.0)]
    return {"data": data, "layout": layout}


def histogram(group: Group) -> Figure:
    """Problems per bin of log2(published); 1.0 is a bin's edge, bins include their lower edge."""
    low, high = _extent([r["published"] for r in group.rows])
    step = math.log2(high / low) / 40
    data = []
    for pdl in group.pdls:
        counts: dict[int, int] = {}
        for row in group.of_pdl(pdl):
            index = math.floor(math.log2(row["published"]) / step)
            counts[index] = counts.get(index, 0) + 1
        bins = sorted(counts)
        data.append(
            {
                "type": "bar",
                "name": PDL_NAMES[pdl],
                "x": [(b + 0.5) * step for b in bins],
                "y": [counts[b] for b in bins],
                "width": step,
                "text": [f"{2 ** (b * step):.3f}× to {2 ** ((b + 1) * step):.3f}×" for b in bins],
                "textposition": "none",
                "hovertemplate": "%{y} problems<br>%{text}<extra>" + PDL_NAMES[pdl] + "</extra>",
                "marker": {"color": SERIES_COLOURS[pdl], "opacity": 0.6},
            }
        )
    ticks = ratio_ticks(low, high)
    layout = _layout("speed-up over the best baseline (×)", "problems")
    layout["xaxis"] |= {"range": [math.log2(low), math.log2(high)], **_tick([math.log2(t) for t in ticks], ticks)}
    layout |= {"barmode": "overlay", "shapes": [_line(x=0.0)]}
    return {"data": data, "layout": layout}


def decades(group: Group) -> Figure:
    """Bars of the geometric mean by decade of FLOP, drawn from the line at 1; one per PDL."""
    data = []
    for pdl in group.pdls:
        means = figures_by_key(group.of_pdl(pdl), flop_decade, decade_order)
        data.append(
            {
                "type": "bar",
                "name": PDL_NAMES[pdl],
                "x": list(means),
                "base": 1.0,
                "y": [mean["geomean"] - 1.0 for mean in means.values()],
                "customdata": [[mean["geomean"], mean["n"]] for mean in means.values()],
                "hovertemplate": "%{customdata[0]:.3f}×, %{customdata[1]} problems<extra>"
                + PDL_NAMES[pdl]
                + "</extra>",
                "marker": {"color": SERIES_COLOURS[pdl]},
            }
        )
    layout = _layout("FLOP of the problem (decade)", "geometric mean of the speed-up (×)")
    layout["xaxis"] |= {"type": "category"}
    layout |= {"barmode": "group", "shapes": [_line(y=1.0)]}
    return {"data": data, "layout": layout}


def heat(group: Group) -> Figure:
    """One heat-map trace per (K, PDL) over M and N; the page shows the one that is chosen.

    A trace's ``z`` is log2 of the published speed-up, its ``customdata`` the speed-up itself and
    whether it is a fall-back, ``null`` where a problem was not measured.
    """
    top = max(SCALE_LEAST, min(SCALE_MOST, max(max(r["published"], 1 / r["published"]) for r in group.rows)))
    limit = math.log2(top)
    ks = sorted({r["k"] for r in group.rows})
    data: list[Figure] = []
    for k in ks:
        for pdl in group.pdls:
            trace = _heat_trace([r for r in group.of_pdl(pdl) if r["k"] == k], limit)
            data.append({**trace, "visible": not data, "meta": {"k": k, "pdl": pdl}})
    layout = _layout("N", "M")
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "category", "showgrid": False, "ticks": ""}
    layout["showlegend"] = False
    return {"data": data, "layout": layout, "ks": ks, "pdls": group.pdls}


def roofline(group: Group, gpu: Gpu | None) -> Figure:
    """Achieved TFLOP/s against arithmetic intensity: ours, the best baseline and the floor."""
    rows = [r for r in group.rows if r["pdl"] == group.pdls[0]]
    intensity = [_intensity(r) for r in rows]
    data = [
        _points("floor", rows, intensity, [r["floor_us"] for r in rows], GREY, "triangle-down-open"),
        _points("best baseline", rows, intensity, [r["baseline_us"] for r in rows], "#111418", "x-thin-open"),
    ]
    for pdl in group.pdls:
        ours = group.of_pdl(pdl)
        times = [published_us(r) for r in ours]
        data.append(
            _points(
                f"OutBLAS {PDL_NAMES[pdl]}",
                ours,
                [_intensity(r) for r in ours],
                times,
                SERIES_COLOURS[pdl],
                "circle-open",
            )
        )
    if gpu is not None:
        data.append(_roof(gpu, min(intensity), max(intensity)))
    layout = _layout("arithmetic intensity (FLOP per byte)", "TFLOP/s")
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    return {"data": data, "layout": layout}


def find_gpu(name: str) -> Gpu | None:
    """The GPU record whose short name occurs in a marketing name, or None."""
    return next((gpu for short, gpu in GPUS.items() if short in name.lower()), None)


def _heat_trace(rows: list[Row], limit: float) -> Figure:
    ms, ns = sorted({r["m"] for r in rows}), sorted({r["n"] for r in rows})
    cells = {(r["m"], r["n"]): r for r in rows}
    grid = [[cells.get((m, n)) for n in ns] for m in ms]
    ends = [-limit, -limit / 2, 0.0, limit / 2, limit]
    labels = [f"{2**z:.2f}" for z in ends]
    labels[0], labels[-1] = f"≤ {labels[0]}", f"≥ {labels[-1]}"
    bar = {"orientation": "h", "thickness": 12, "len": 0.9, "y": 1.02, "yanchor": "bottom", "x": 0.5}
    return {
        "type": "heatmap",
        "x": [str(n) for n in ns],
        "y": [str(m) for m in ms],
        "z": [[math.log2(r["published"]) if r else None for r in line] for line in grid],
        "customdata": [[[r["published"], r["fallback"]] if r else None for r in line] for line in grid],
        "text": [[f"{r['published']:.2f}" if r else "" for r in line] for line in grid],
        "hovertext": [[_hover(r) if r else "not measured" for r in line] for line in grid],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "texttemplate": "%{text}",
        "textfont": {"size": 10},
        "colorscale": SCALE,
        "zmin": -limit,
        "zmax": limit,
        "zmid": 0.0,
        "xgap": 1,
        "ygap": 1,
        "colorbar": {**bar, "tickvals": ends, "ticktext": labels, "outlinewidth": 0},
    }


def _points(name: str, rows: list[Row], x: list[float], times: list[float], colour: str, symbol: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": x,
        "y": [tflops(r, us) for r, us in zip(rows, times, strict=True)],
        "text": [f"{shape(r)}: {us:.2f} µs" for r, us in zip(rows, times, strict=True)],
        "hovertemplate": "%{text}<br>%{y:.1f} TFLOP/s<extra>" + name + "</extra>",
        "marker": {
            "color": colour,
            "symbol": symbol,
            "size": 5,
            "opacity": 0.8,
            "line": {"width": 1, "color": colour},
        },
    }


def _roof(gpu: Gpu, low: float, high: float) -> Figure:
    ridge = gpu.tflops / gpu.hbm_tbs
    x = [low, *([ridge] if low < ridge < high else []), high]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "roof of HBM and arithmetic",
        "x": x,
        "y": [min(gpu.tflops, gpu.hbm_tbs * ai) for ai in x],
        "hoverinfo": "skip",
        "line": {"color": INK, "width": 1.5},
    }


def _intensity(row: Row) -> float:
    problem = problem_of(row)
    return problem.flops / problem.bytes


def _hover(row: Row) -> str:
    """Plotly reads a little markup in hover text, so names from the file are stripped of ``<&``."""
    ours = "falls back to it" if row["fallback"] else f"ours {row['ours_us']:.2f} µs"
    span = "" if row["low"] is None or row["high"] is None else f" ({row['low']:.3f} to {row['high']:.3f})"
    baseline = row["baseline"].translate(str.maketrans("<>&", "   "))
    return f"{shape(row)}: {row['published']:.3f}×{span}<br>{baseline} {row['baseline_us']:.2f} µs, {ours}"


def _extent(values: list[float]) -> tuple[float, float]:
    """A little more than the range of some ratios, 1.0 well inside."""
    low, high = min(*values, 0.97), max(*values, 1.03)
    pad = (high / low) ** 0.03
    return low / pad, high * pad


def _layout(x: str, y: str) -> Figure:
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True, "fixedrange": False}
    return {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 12, "t": 36, "b": 44},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}},
    }


def _tick(values: list[float], ratios: list[float]) -> Figure:
    return {"tickmode": "array", "tickvals": values, "ticktext": [f"{r:g}" for r in ratios]}


def _line(x: float | None = None, y: float | None = None) -> Figure:
    across = {"y0": y, "y1": y, "xref": "paper", "x0": 0, "x1": 1}
    at = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1} if y is None else across
    return {"type": "line", "layer": "below", "line": {"color": GREY, "width": 1.5}, **at}
