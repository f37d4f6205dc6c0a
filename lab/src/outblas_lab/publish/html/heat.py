"""Heat maps of the speed-up over M and N as HTML tables: one per K and launch option, of which one is shown."""

from __future__ import annotations

import math

from outblas.records.result_rows import Row
from outblas_lab.publish.html.run_data import Group

#: Slower is orange, faster is blue: readers with every common colour blindness can tell them apart.
SCALE = ("#b04a06", "#efa26a", "#f7f7f5", "#7db0ee", "#0a4fae")
#: Ratios at which the colour scale ends: at most, and at least.
SCALE_MOST, SCALE_LEAST = 2.0, 1.1
#: Steps of colour on each side of 1.
STEPS = 10
#: Problems per K below which a heat map would be nearly empty.
MIN_PROBLEMS_PER_K = 4


def heat_html(group: Group, index: int) -> str:
    """Return the heat maps of a group with their controls, as HTML; a paragraph if the problems form no grid.

    Args:
        group: rows of one table.
        index: number of the group on the page.
    """
    ks = sorted({r["k"] for r in group.rows})
    once = group.of_pdl(group.pdls[0])
    if len(once) < MIN_PROBLEMS_PER_K * len(ks):
        return "<p class='note'>These problems form no grid over M, N and K, so no heat map is drawn.</p>"
    fullest = max(ks, key=lambda k: sum(r["k"] == k for r in once))
    numbers = {id(row): number for number, row in enumerate(group.rows)}
    limit = heat_limit(group)
    shown = (fullest, group.pdls[0])
    maps = [_map(group, (k, pdl), limit, numbers, (k, pdl) == shown) for k in ks for pdl in group.pdls]
    return (
        f"<div class='controls'>{_controls(group, ks, ks.index(fullest), index)}{_scale(limit)}</div>"
        f"<div class='heats' data-heats='{index}' data-ks='{' '.join(map(str, ks))}'>{''.join(maps)}</div>"
        "<p class='note'>A row is an M, a column is an N. Blue is faster than the best baseline, orange is slower. "
        "The scale is logarithmic. A cell of 1.00 runs the baseline, or is level with it.</p>"
    )


def heat_limit(group: Group) -> float:
    """Return the ratio at which the colour scale ends: the largest of p and 1 / p over the rows, within 1.1 to 2.0."""
    return max(SCALE_LEAST, min(SCALE_MOST, max(max(r["published"], 1 / r["published"]) for r in group.rows)))


def heat_level(published: float, limit: float) -> int:
    """Return the step of colour of a speed-up: from -10 to 10, 0 at 1, by its logarithm.

    Example: ``heat_level(2.0, 2.0)`` is 10, ``heat_level(0.5, 2.0)`` is -10. Beyond the limit it stays there.

    Args:
        published: the speed-up.
        limit: ratio of the last step, above 1.
    """
    level = round(STEPS * math.log(published) / math.log(limit))
    return max(-STEPS, min(STEPS, level))


def heat_css() -> str:
    """Return CSS, a rule a line per step of colour: from ``.heat .h0{background:...}`` (slowest) to ``.heat .h20``."""
    return "\n".join(
        f".heat .h{level + STEPS}{{background:{_colour(level)}{';color:#fff' if abs(level) >= 8 else ''}}}"
        for level in range(-STEPS, STEPS + 1)
    )


def _controls(group: Group, ks: list[int], chosen: int, index: int) -> str:
    slider = (
        f"<label>K = <output id='heat-k-{index}'>{ks[chosen]}</output> <input type='range' min='0' max='{len(ks) - 1}' "
        f"step='1' value='{chosen}' data-k='{index}' aria-label='K'></label>"
    )
    toggle = f"<label><input type='checkbox' data-pdl-toggle='{index}'> with PDL</label>"
    chosen_k = slider if len(ks) > 1 else f"<span>K = {ks[0]}</span>"
    return chosen_k + (toggle if len(group.pdls) > 1 else f"<span>{group.launch_name(group.pdls[0])}</span>")


def _scale(limit: float) -> str:
    return (
        f"<span class='scale'>≤ {1 / limit:.2f}×<i style='background:linear-gradient(90deg,{','.join(SCALE)})'></i>"
        f"≥ {limit:.2f}×</span>"
    )


def _map(group: Group, place: tuple[int, bool], limit: float, numbers: dict[int, int], shown: bool) -> str:
    """Return the table of one K and launch option."""
    k, pdl = place
    rows = [r for r in group.of_pdl(pdl) if r["k"] == k]
    ms, ns = sorted({r["m"] for r in rows}), sorted({r["n"] for r in rows})
    cells = {(r["m"], r["n"]): r for r in rows}
    head = "".join(f"<th scope='col'>{n}</th>" for n in ns)
    lines = [
        f"<tr><th scope='row'>{m}</th>{''.join(_cell(cells.get((m, n)), limit, numbers) for n in ns)}</tr>" for m in ms
    ]
    caption = f"Speed-up at K = {k}, {group.launch_name(pdl)}"
    columns = len(ns) + 1
    return (
        f"<div class='scroll heatbox' data-at='{k} {'on' if pdl else 'off'}' tabindex='0' role='region' "
        f"aria-label='{caption}'{'' if shown else ' hidden'}>"
        f"<table class='heat' style='min-width:{2.1 * columns:.1f}rem;max-width:{30 * columns}rem'>"
        f"<caption class='quiet'>{caption}</caption><thead><tr><th scope='col'>M \\ N</th>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(row: Row | None, limit: float, numbers: dict[int, int]) -> str:
    if row is None:
        return "<td></td>"
    level = heat_level(row["published"], limit) + STEPS
    return f"<td class='h{level}' data-row='{numbers[id(row)]}'>{row['published']:.2f}</td>"


def _colour(level: int) -> str:
    place = (level + STEPS) / (2 * STEPS) * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    share = place - low
    mixed = [
        round((1 - share) * int(SCALE[low][i : i + 2], 16) + share * int(SCALE[low + 1][i : i + 2], 16))
        for i in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in mixed)
