"""Charts of a group of result rows: sorted speed-ups, histogram, means by decade, roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from outblas.core.roofline import Gpu
from outblas_lab.pool.averages import decade_order, figures_by_key, flop_decade, problem_of, published_us
from outblas_lab.publish.drawing import drawing
from outblas_lab.publish.html.charts import Chart
from outblas_lab.publish.html.run_data import Group, find_gpu, tflops
from outblas_lab.publish.palette import GREY, INK, LAUNCH_COLOURS, ratio_ticks
from outblas_lab.publish.words import decade_words

#: Bins of the histogram.
_BINS = 20
_SPEEDUP = "speed-up over the best baseline (×)"


@drawing()
def group_charts(group: Group, gpu_name: str) -> dict[str, Chart]:
    """Return the charts of a group by name; a roofline only if the times are GPU times."""
    made = {"curve": _curve(group), "histogram": _histogram(group), "decades": _decades(group)}
    if group.mode != "server":
        made["roofline"] = _roofline(group, find_gpu(gpu_name))
    return made


def _curve(group: Group) -> Chart:
    """Return sorted published speed-ups against the share of problems, a line per launch option."""
    chart, numbers = Chart("share of problems, sorted by speed-up", _SPEEDUP), _numbers(group)
    for pdl in group.pdls:
        rows = sorted(group.of_pdl(pdl), key=lambda r: r["published"])
        shares = [100 * (i + 0.5) / len(rows) for i in range(len(rows))]
        colour, style = LAUNCH_COLOURS[pdl], "-" if pdl else ":"
        line = chart.axes.plot(shares, [r["published"] for r in rows], style, color=colour)
        mark = "line" if pdl else "dashed"
        chart.add(group.launch_name(pdl), line, colour, mark, rows=[numbers[id(r)] for r in rows])
    chart.axes.set(xlim=(0, 100), xticks=range(0, 101, 25))
    chart.axes.xaxis.set_major_formatter("{x:g}%")
    low, high = _extent(r["published"] for r in group.rows)
    chart.ratio_axis("y", low, high, ratio_ticks(low, high))
    return chart


def _histogram(group: Group) -> Chart:
    """Return problems per bin of the speed-up's logarithm; 1.0 is a bin's edge, and a bin has its lower edge.

    The launch options share a bin side by side, because bars over each other would have a colour of their own.
    """
    chart = Chart(_SPEEDUP, "problems")
    low, high = _extent(r["published"] for r in group.rows)
    step = math.log2(high / low) / _BINS
    edges = 2 ** (step * np.arange(math.floor(math.log2(low) / step), math.ceil(math.log2(high) / step) + 1))
    share = 2 ** (step / len(group.pdls))
    for place, pdl in enumerate(group.pdls):
        counts, _ = np.histogram([r["published"] for r in group.of_pdl(pdl)], edges)
        bins = [(int(n), *ends) for n, ends in zip(counts, zip(edges, edges[1:], strict=False), strict=True) if n]
        heights, lows, _ = zip(*bins, strict=True)
        left = np.multiply(lows, share**place)
        colour, name = LAUNCH_COLOURS[pdl], group.launch_name(pdl)
        bars = chart.axes.bar(left, heights, left * (share - 1), align="edge", color=colour)
        tips = [f"{n} problems {name}: {start:.3f}× to {end:.3f}×" for n, start, end in bins]
        chart.add(name, bars, colour, "bars", tips=tips)
    chart.ratio_axis("x", edges[0], edges[-1], ratio_ticks(edges[0], edges[-1]))
    return chart


def _decades(group: Group) -> Chart:
    """Return bars of the geometric mean by decade of FLOP, drawn from the line at 1; one per launch option."""
    chart = Chart("floating-point operations of the problem (2MNK)", "geometric mean of the speed-up (×)", height=400)
    means = {pdl: figures_by_key(group.of_pdl(pdl), flop_decade, decade_order) for pdl in group.pdls}
    names = sorted({name for found in means.values() for name in found}, key=decade_order)
    width = 0.8 / len(group.pdls)
    for place, (pdl, found) in enumerate(means.items()):
        centres = [names.index(name) + (place - (len(group.pdls) - 1) / 2) * width for name in found]
        heights = [mean["geomean"] - 1 for mean in found.values()]
        colour, name = LAUNCH_COLOURS[pdl], group.launch_name(pdl)
        tips = [f"{mean['geomean']:.3f}× {name}, {mean['n']} problems" for mean in found.values()]
        chart.add(name, chart.axes.bar(centres, heights, width, 1.0, color=colour), colour, "bars", tips=tips)
    words = [decade_words(decade_order(name)).replace(" to ", "–").replace(" ", "\n") + "FLOP" for name in names]
    chart.axes.set_xticks(range(len(names)), words)
    chart.axes.grid(axis="x", visible=False)
    low, high = _extent(mean["geomean"] for found in means.values() for mean in found.values())
    chart.ratio_axis("y", low, high, ratio_ticks(low, high))
    return chart


def _roofline(group: Group, gpu: Gpu | None) -> Chart:
    """Return achieved TFLOP/s against arithmetic intensity; OutBLAS is drawn first, the rest if the reader chooses."""
    from matplotlib.ticker import LogLocator

    chart, numbers = Chart("arithmetic intensity (FLOP per byte)", "TFLOP/s", height=400), _numbers(group)
    once = group.of_pdl(group.pdls[0])
    drawn = [
        (f"OutBLAS {group.launch_name(pdl)}", LAUNCH_COLOURS[pdl], [(r, published_us(r)) for r in group.of_pdl(pdl)])
        for pdl in group.pdls
    ]
    drawn.append(("best baseline", INK, [(r, r["baseline_us"]) for r in once]))
    drawn.append(("floor", GREY, [(r, r["floor_us"]) for r in once]))
    xs, ys = list[float](), list[float]()
    for place, (name, colour, times) in enumerate(drawn):
        x, y = [(p := problem_of(r)).flops / p.bytes for r, _ in times], [tflops(r, us) for r, us in times]
        dots = chart.axes.plot(x, y, "o", color=colour, markersize=4.5, alpha=0.55, markeredgewidth=0)
        chart.add(name, dots, colour, "dots", rows=[numbers[id(r)] for r, _ in times], shown=place == 0)
        xs, ys = xs + x, ys + y
    low, high = min(xs) / 1.3, max(xs) * 1.3
    if gpu is not None:
        ends = sorted({low, min(max(gpu.tflops / gpu.hbm_tbs, low), high), high})
        roof = [min(gpu.tflops, gpu.hbm_tbs * intensity) for intensity in ends]
        chart.add("roof of memory and arithmetic", chart.axes.plot(ends, roof, color=INK, linewidth=1.5), INK)
        ys += roof
    chart.axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(min(ys) / 1.3, max(ys) * 1.3))
    for axis, ratio in ((chart.axes.xaxis, high / low), (chart.axes.yaxis, max(ys) / min(ys))):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 1e3 else (1,), numticks=20))
        axis.set_major_formatter("{x:g}")
        axis.set_ticks([], minor=True)
    return chart


def _numbers(group: Group) -> dict[int, int]:
    """Return the place of each row in its group, by the row's identity."""
    return {id(row): number for number, row in enumerate(group.rows)}


def _extent(values: Iterable[float]) -> tuple[float, float]:
    """Return a little more than the range of some ratios, with 1.0 well inside."""
    known = list(values)
    low, high = min(*known, 0.97), max(*known, 1.03)
    pad = (high / low) ** 0.03
    return low / pad, high * pad
