"""Words that the HTML pages, the published tables and the command line share."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from outblas.core.config import KernelConfig
from outblas.core.rivals import BASELINE_WORDS
from outblas_lab.compare.compare_result import Comparison
from outblas_lab.compare.splits import held_out_words, is_split

#: Names of the launch option, by whether programmatic dependent launch (PDL) is on.
PDL_NAMES = {False: "without PDL", True: "with PDL"}

#: Rivals of every bench, in words.
ALL_RIVALS = "the fastest of torch, cuBLAS and autotuned cuBLASLt"

_REGIME = re.compile(r"(memory|compute)_1e(\d+)")
_UNITS = ("", "k", "M", "G", "T", "P", "E")


def short_config(config: KernelConfig) -> str:
    """Return the family, the tile and the knobs that differ from their defaults."""
    knobs = [f"{name}={value}" for name, value in config.changed_knobs().items()]
    return " ".join([config.family, f"{config.bm}x{config.bn}", *knobs])


def split_words(comparison: Comparison, split: str) -> str:
    """Return in words how many problems a split holds out, of which kind, and how many were searched and learned.

    Args:
        split: name of one of its splits: ``shapes``, ``families``, ``layout``, an extent, or a part of the choices of
            ``outblas recipe``, which holds shapes out.
    """
    size, count = comparison.meta["splits"][split], searched_count(comparison, split)
    searched = "" if count == size["held_out"] else f", of which {count} were searched"
    held_out = f"{size['held_out']} problems of held-out {held_out_words(split if is_split(split) else 'shapes')}"
    return f"{held_out}{searched}; {size['training']} to learn from"


def searched_count(comparison: Comparison, split: str) -> int:
    """Return the number of searched problems of a split: all held-out ones, unless the file says otherwise."""
    size = comparison.meta["splits"][split]
    return int(size.get("searched", size["held_out"]))


def baseline_words(name: str) -> str:
    """Return a baseline's name in words; an unknown name as it is."""
    return BASELINE_WORDS.get(name, name)


def regime_words(name: str) -> str:
    """Return a regime's name in words: ``memory_1e9`` is "memory-bound, 1 to 10 GFLOP"."""
    if name == "launch":
        return "launch-bound"
    found = _REGIME.fullmatch(name)
    return f"{found[1]}-bound, {decade_words(int(found[2]))}FLOP" if found else name


def decade_words(exponent: int) -> str:
    """Return a decade as a range with a metric prefix: 9 is "1 to 10 G", and 11 is "0.1 to 1 T"."""
    group, step = divmod(exponent + 1, 3)
    if not 0 <= group < len(_UNITS):
        return f"1e{exponent} to 1e{exponent + 1} "
    return f"{10.0 ** (step - 1):g} to {10**step} {_UNITS[group]}"


def date_words(date: Any) -> str:
    """Return dates of ISO 8601 in words: one to the minute in UTC, several as a range of days.

    Args:
        date: one date, or several with ``;`` between. Anything else is returned as it is.
    """
    parts = [part.strip() for part in str(date).split(";")]
    try:
        times = [datetime.fromisoformat(part) for part in parts]
    except ValueError:
        return str(date)
    if len(times) == 1 and "T" in parts[0]:
        utc = times[0].astimezone(UTC) if times[0].tzinfo else times[0]
        return f"{utc.day} {utc:%B %Y, %H:%M} UTC"
    first, last = min(times, key=datetime.date), max(times, key=datetime.date)
    whole = f"{last.day} {last:%B %Y}"
    if first.date() == last.date():
        return whole
    return f"{first.day} to {whole}" if f"{first:%Y%m}" == f"{last:%Y%m}" else f"{first.day} {first:%B %Y} to {whole}"
