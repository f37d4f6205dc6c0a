"""Words that the HTML pages, the published tables and the command line share."""

from __future__ import annotations

from outblas.core.config import KernelConfig
from outblas.search.compare.compare_result import Comparison
from outblas.search.compare.splits import SPLITS

#: How a row was launched: with programmatic dependent launch or without.
PDL_NAMES = {False: "without PDL", True: "with PDL"}


def short_config(config: KernelConfig) -> str:
    """Family, tile and the knobs that differ from their defaults."""
    knobs = [f"{name}={value}" for name, value in config.changed_knobs().items()]
    return " ".join([config.family, f"{config.bm}x{config.bn}", *knobs])


def split_words(comparison: Comparison, split: str) -> str:
    """What a split holds out, in words."""
    size = comparison.meta["splits"][split]
    searched = "" if size["searched"] == size["held_out"] else f", of which {size['searched']} were searched"
    return f"{size['held_out']} problems of held-out {SPLITS[split]}{searched}; {size['training']} to learn from"
