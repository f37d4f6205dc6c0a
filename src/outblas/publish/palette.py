"""Colours, dashes and ticks that the HTML pages and the published pictures share."""

from __future__ import annotations

GREY, INK, GRID = "#6e7781", "#1f2328", "#e3e7eb"
#: Okabe and Ito's colours, told apart with every common colour blindness (yellow, too light on white, left out); from
#: the eighth agent on they come again, dashed.
AGENT_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
AGENT_DASHES = ("solid", "dash", "dot")


def ratio_ticks(low: float, high: float) -> list[float]:
    """Round ratios within [low, high] for a logarithmic axis, 1.0 among them, at most about eight."""
    if high / low <= 2.2:
        step = 0.05 if high / low <= 1.35 else 0.1
        ticks = [round(1 + i * step, 2) for i in range(-15, 16)]
    elif high / low <= 4:
        ticks = [0.25, 0.33, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0]
    else:
        ticks = [float(f"{b * 10.0**e:.0e}") for e in range(-3, 4) for b in (1, 2, 5)]
    return [t for t in ticks if low <= t <= high]
