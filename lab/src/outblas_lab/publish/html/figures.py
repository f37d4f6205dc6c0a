"""Charts of a group of result rows: sorted speed-ups, histogram, means by decade, roofline.

Ratios are drawn on logarithmic scales, so that 2x faster and 2x slower are equally far from 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from outblas.core.gpu_records import gpu_of_product, reference_gpu
from outblas.core.roofline import Gpu
from outblas.records.result_rows import Row, problem_of
from outblas_lab.pool.averages import decade_order, figures_by_key, flop_decade, published_us
from outblas_lab.publish.html.charts import Axis, Chart, Series
from outblas_lab.publish.html.run_data import Group, tflops
from outblas_lab.publish.palette import GREY, INK, ratio_ticks
from outblas_lab.publish.words import decade_words

SERIES_COLOURS = {False: "#c2570c", True: "#0b5fcc"}
#: Bins of the histogram.
_BINS = 40


def group_charts(group: Group, gpu_name: str) -> dict[str, Chart]:
    """Return the charts of a group by name; a roofline only if the times are GPU times."""
    made = {"curve": curve(group), "histogram": histogram(group), "decades": decades(group)}
    if group.mode != "server":
        made["roofline"] = roofline(group, find_gpu(gpu_name))
    return made


def curve(group: Group) -> Chart:
    """Return sorted published speed-ups against the share of problems, a line per launch option."""
    numbers = _numbers(group)
    series = []
    for pdl in group.pdls:
        rows = sorted(group.of_pdl(pdl), key=lambda r: r["published"])
        series.append(
            Series(
                group.launch_name(pdl),
                "line",
                SERIES_COLOURS[pdl],
                x=[100 * (i + 0.5) / len(rows) for i in range(len(rows))],
                y=[r["published"] for r in rows],
                rows=[numbers[id(r)] for r in rows],
                dash="" if pdl else "2 4",
            )
        )
    low, high = _extent(r["published"] for r in group.rows)
    shares = [(float(share), f"{share}%") for share in (0, 25, 50, 75, 100)]
    return Chart(
        Axis("share of problems, sorted by speed-up", 0, 100, shares),
        Axis("speed-up over the best baseline (×)", low, high, _ratios(low, high), log=True),
        series,
        marked_y=1.0,
    )


def histogram(group: Group) -> Chart:
    """Return problems per bin of the speed-up's logarithm; 1.0 is a bin's edge, and a bin has its lower edge."""
    low, high = _extent(r["published"] for r in group.rows)
    step = math.log2(high / low) / _BINS
    series = []
    for pdl in group.pdls:
        counts: dict[int, int] = {}
        for row in group.of_pdl(pdl):
            place = math.floor(math.log2(row["published"]) / step)
            counts[place] = counts.get(place, 0) + 1
        bins = sorted(counts)
        series.append(
            Series(
                group.launch_name(pdl),
                "bars",
                SERIES_COLOURS[pdl],
                x=[(b + 0.5) * step for b in bins],
                y=[float(counts[b]) for b in bins],
                base=[0.0] * len(bins),
                bar_width=step,
                tips=[
                    f"{counts[b]} problems {group.launch_name(pdl)}: "
                    f"{2 ** (b * step):.3f}× to {2 ** ((b + 1) * step):.3f}×"
                    for b in bins
                ],
                opacity=0.6,
            )
        )
    most = max(y for s in series for y in s.y if y is not None)
    ticks = [(math.log2(t), text) for t, text in _ratios(low, high)]
    return Chart(
        Axis("speed-up over the best baseline (×)", math.log2(low), math.log2(high), ticks),
        Axis("problems", 0, 1.05 * most, [(t, f"{t:g}") for t in round_ticks(0, 1.05 * most)]),
        series,
        marked_x=0.0,
    )


def decades(group: Group) -> Chart:
    """Return bars of the geometric mean by decade of FLOP, drawn from the line at 1; one per launch option."""
    means = {pdl: figures_by_key(group.of_pdl(pdl), flop_decade, decade_order) for pdl in group.pdls}
    names = sorted({name for found in means.values() for name in found}, key=decade_order)
    width = 0.8 / len(group.pdls)
    series = []
    for place, pdl in enumerate(group.pdls):
        found = means[pdl]
        offset = (place - (len(group.pdls) - 1) / 2) * width
        series.append(
            Series(
                group.launch_name(pdl),
                "bars",
                SERIES_COLOURS[pdl],
                x=[names.index(name) + offset for name in found],
                y=[mean["geomean"] for mean in found.values()],
                base=[1.0] * len(found),
                bar_width=width,
                tips=[
                    f"{mean['geomean']:.3f}× {group.launch_name(pdl)}, {mean['n']} problems" for mean in found.values()
                ],
            )
        )
    low, high = _extent(y for s in series for y in s.y if y is not None)
    ticks = [(float(i), decade_words(decade_order(name)).replace(" to ", "–")) for i, name in enumerate(names)]
    return Chart(
        Axis("floating-point operations of the problem (2MNK)", -0.5, len(names) - 0.5, ticks, grid=False),
        Axis("geometric mean of the speed-up (×)", low, high, _ratios(low, high), log=True),
        series,
        marked_y=1.0,
    )


def roofline(group: Group, gpu: Gpu | None) -> Chart:
    """Return achieved TFLOP/s against arithmetic intensity; OutBLAS is drawn first, the rest if the reader chooses."""
    once = group.of_pdl(group.pdls[0])
    drawn = [
        (
            f"OutBLAS {group.launch_name(pdl)}",
            SERIES_COLOURS[pdl],
            group.of_pdl(pdl),
            [published_us(r) for r in group.of_pdl(pdl)],
        )
        for pdl in group.pdls
    ]
    drawn.append(("best baseline", INK, once, [r["baseline_us"] for r in once]))
    drawn.append(("floor", GREY, once, [r["floor_us"] for r in once]))
    numbers = _numbers(group)
    series = [
        Series(
            name,
            "dots",
            colour,
            x=[_intensity(r) for r in rows],
            y=[tflops(r, us) for r, us in zip(rows, times, strict=True)],
            rows=[numbers[id(r)] for r in rows],
            size=5,
            opacity=0.55,
            shown=place == 0,
        )
        for place, (name, colour, rows, times) in enumerate(drawn)
    ]
    xs = [x for s in series for x in s.x]
    ys = [y for s in series for y in s.y if y is not None]
    low, high = min(xs) / 1.3, max(xs) * 1.3
    if gpu is not None:
        ridge = gpu.tflops / gpu.hbm_tbs
        ends = [low, *([ridge] if low < ridge < high else []), high]
        roof = [min(gpu.tflops, gpu.hbm_tbs * intensity) for intensity in ends]
        ys += roof
        series.append(Series("roof of memory and arithmetic", "line", INK, ends, roof, size=1.5))
    bottom, top = min(ys) / 1.3, max(ys) * 1.3
    return Chart(
        Axis("arithmetic intensity (FLOP per byte)", low, high, _powers(low, high), log=True),
        Axis("TFLOP/s", bottom, top, _powers(bottom, top), log=True),
        series,
    )


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU with a record for a product name or short name; None if no record names it.

    Several names may be joined by ``; ``. The first with a record counts. Example: ``"NVIDIA H200"`` gives ``h200``.
    """
    return next(filter(None, map(gpu_of_product, name.split("; "))), None)


def gpu_or_reference(name: str) -> Gpu:
    """Return the GPU of a product name or short name, by :func:`find_gpu`; the reference GPU if no record names it."""
    return find_gpu(name) or reference_gpu()


def round_ticks(low: float, high: float) -> list[float]:
    """Return three to eight round values from ``low`` to ``high`` on a linear axis: 0 to 10 gives ``[0.0, 2.0, 4.0,
    ...]``.
    """
    rough = (high - low) / 6
    step = 10.0 ** math.floor(math.log10(rough))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _numbers(group: Group) -> dict[int, int]:
    """Return the place of each row in its group, by the row's identity."""
    return {id(row): number for number, row in enumerate(group.rows)}


def _intensity(row: Row) -> float:
    problem = problem_of(row)
    return problem.flops / problem.bytes


def _extent(values: Iterable[float]) -> tuple[float, float]:
    """Return a little more than the range of some ratios, with 1.0 well inside."""
    known = list(values)
    low, high = min(*known, 0.97), max(*known, 1.03)
    pad = (high / low) ** 0.03
    return low / pad, high * pad


def _ratios(low: float, high: float) -> list[tuple[float, str]]:
    return [(t, f"{t:g}") for t in ratio_ticks(low, high)]


def _powers(low: float, high: float) -> list[tuple[float, str]]:
    """Return the powers of ten within a range; in a range of less than three decades also 2 and 5 times them."""
    digits = (1, 2, 5) if high / low < 1e3 else (1,)
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    ticks = [digit * 10.0**e for e in range(first, last + 1) for digit in digits]
    return [(t, f"{t:g}") for t in ticks if low <= t <= high]
