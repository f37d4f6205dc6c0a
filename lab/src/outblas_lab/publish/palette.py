"""Colours, lines and ticks that the HTML pages and the published pictures share."""

from __future__ import annotations

GREY, INK, GRID = "#6e7781", "#1f2328", "#e3e7eb"
#: Colours of the launch options, without and with PDL.
LAUNCH_COLOURS = {False: "#c2570c", True: "#0b5fcc"}
#: Okabe and Ito's colours, which readers with every common colour blindness can tell apart. Yellow is left out: it is
#: too light on white. The eighth agent has the first colour again, dashed.
AGENT_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
#: Matplotlib's styles of lines for the first, second and third use of the colours.
AGENT_STYLES = ("-", "--", ":")
#: Agents whose lines stand out: learned, ranked by a model, Optuna's, and chance.
SHOWN_AGENTS = ("regressor", "heuristic", "tpe", "random")


def shown_agents(agents: tuple[str, ...]) -> tuple[str, ...]:
    """Return the agents whose lines stand out: all if each has a colour, else those of :data:`SHOWN_AGENTS`.

    Without any of them, return the first four of ``agents``.
    """
    found = tuple(agent for agent in SHOWN_AGENTS if agent in agents)
    rest = tuple(agent for agent in agents if agent not in found)
    return found + rest if len(agents) <= len(AGENT_COLOURS) else found or agents[: len(SHOWN_AGENTS)]


def ratio_ticks(low: float, high: float) -> list[float]:
    """Return at most about eight round ratios within [low, high] for a logarithmic axis, in ascending order.

    1.0 is one of them if it is within. Example: ``ratio_ticks(0.9, 1.1)`` gives ``[0.9, 0.95, 1.0, 1.05, 1.1]``.
    """
    if high / low <= 2.2:
        step = 0.05 if high / low <= 1.35 else 0.1
        ticks = [round(1 + i * step, 2) for i in range(-15, 16)]
    elif high / low <= 4:
        ticks = [0.25, 0.33, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0]
    else:
        ticks = [float(f"{b * 10.0**e:.0e}") for e in range(-3, 4) for b in (1, 2, 5)]
    return [t for t in ticks if low <= t <= high]
