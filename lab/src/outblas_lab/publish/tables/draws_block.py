"""The table of every committed draw of random shapes, from the file that ``tools/drawn_history.py`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.plain_files import read_json
from outblas.records.result_rows import Row
from outblas_lab.pool.averages import FAR_BELOW, figures_by_start, figures_of, figures_of_drawn
from outblas_lab.publish.words import mean_in_words

#: Its name in the folder of the GPUs' folders.
DRAWS = "draws.json"
FORMAT = "outblas-draws-1"
#: Number of draws of a protocol that are also counted together.
POOLED = 3


def figures_of_draw(rows: Sequence[Row]) -> Row:
    """Return the figures of a draw without PDL: ``{n, geomean, min, below_098, bootstrap, by_alignment}``.

    Args:
        rows: rows of one result file. Each part of ``by_alignment`` has ``n``, ``geomean``, ``min`` and ``below_098``.
    """
    plain = [row for row in rows if not row["pdl"]]
    figures = {**figures_of(plain), **figures_by_start(plain), **figures_of_drawn(plain)}
    kept = ("n", "geomean", "min", "below_098")
    parts = {name: {key: part[key] for key in kept} for name, part in figures["by_alignment"].items()}
    return {**{key: figures[key] for key in (*kept, "bootstrap")}, "by_alignment": parts}


def draws_block(path: Path) -> str:
    """Return the table of all draws and the counts of each protocol; one line if the file is missing.

    Args:
        path: the file, e.g. ``results/draws.json``.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    if not path.exists():
        return "No draws are recorded."
    try:
        data = read_json(path)
        if data["format"] != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        return "\n".join(_lines(data["draws"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        wrong = f"{path} cannot be read ({type(error).__name__}: {error})"
        raise RecordError(wrong, "what tools/drawn_history.py writes", "run it again, or restore the file") from error


def _lines(draws: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    head = ["GPU, mode, layout", "measured", "code", "seed", "shapes", "geometric mean"]
    yield "| " + " | ".join([*head, "aligned", "unaligned", "worst", f"below {FAR_BELOW}"]) + " |"
    yield "| --- | --- | --- | ---: |" + " ---: |" * 6
    for draw in draws:
        found = [draw["by_alignment"].get(name) for name in ("aligned", "unaligned")]
        parts = [f"{part['geomean']:.3f}×" if part else "–" for part in found]
        cells = [_protocol(draw), draw["date"][:10], draw["commit"][:7], draw["seed"], draw["n"]]
        cells += [mean_in_words(draw["geomean"], None, draw["bootstrap"]), *parts, f"{draw['min']:.3f}×"]
        yield "| " + " | ".join(map(str, [*cells, draw["below_098"]])) + " |"
    yield ""
    for protocol, group in groupby(draws, _protocol):
        members = list(group)
        counts = ", ".join(str(draw["below_098"]) for draw in members)
        last = f"; the last {POOLED} together {_share(members[-POOLED:])}" if len(members) > POOLED else ""
        yield f"- {protocol}: {counts} below {FAR_BELOW}, together {_share(members)}{last}"


def _protocol(draw: Mapping[str, Any]) -> str:
    return f"{draw['gpu'].removeprefix('NVIDIA ').split(' ')[0]}, {draw['mode']}, {draw['layout']}"


def _share(draws: Sequence[Mapping[str, Any]]) -> str:
    below, of = (sum(draw[key] for draw in draws) for key in ("below_098", "n"))
    return f"{below:,} of {of:,} ({below / of:.1%})"
