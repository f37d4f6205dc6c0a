"""Invented comparisons of agents, labelled so that nobody takes them for measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.problem import Problem
from outblas.search.compare.compare_result import Comparison, read_comparison, write_comparison

PROVENANCE = {
    "gpu": "Synthetic H200 (test fixture)",
    "driver": "0.0",
    "toolchain": "none",
    "date": "2000-01-02",
    "commit": "0000000",
    "command": "tests/compare_fixture.py <invented figures & no GPU>",
}
PROBLEMS = tuple(Problem(64 * 4**i, 512, 64 * 4**j) for i in range(5) for j in range(4))


def made_rows(
    level: Mapping[str, float],
    splits: Sequence[str] = ("shapes", "families"),
    budgets: Sequence[int] = (0, 1, 4, 16),
    seeds: int = 2,
    noise: float = 0.2,
) -> list[tuple[Any, ...]]:
    """Quality around exp(-level / (1 + budget)), a share of the noise being the problem's own."""
    rng, rows = np.random.default_rng(0), list[tuple[Any, ...]]()
    for split in splits:
        for agent, shortfall in level.items():
            for seed in range(seeds):
                for problem in PROBLEMS:
                    for launch in ("plain", "pdl"):
                        luck = shortfall * np.exp(noise * rng.standard_normal())
                        rows += [
                            (split, agent, seed, problem.key, launch, b, float(np.exp(-luck / (1 + b))), b > 0)
                            for b in budgets
                        ]
    return rows


def made_meta(agents: Sequence[str], splits: Sequence[str] = ("shapes", "families"), seeds: int = 2) -> dict[str, Any]:
    size = {"training": 80, "held_out": 40, "searched": len(PROBLEMS), "tasks": 2 * len(PROBLEMS)}
    return {
        "suite": "synthetic",
        "device": "replay:synthetic",
        "recording": {"name": "synthetic", "provenance": PROVENANCE},
        "provenance": {**PROVENANCE, "commit": "1111111"},
        "agents": list(agents),
        "splits": dict.fromkeys(splits, size),
        "seeds": seeds,
        "costs": {agent: {"prepare_s": 1.5, "task_ms": 2.5} for agent in agents},
    }


def write_made(path: Path, level: Mapping[str, float], **changes: Any) -> Comparison:
    splits = changes.get("splits", ("shapes", "families"))
    write_comparison(made_rows(level, **changes), made_meta(list(level), splits), path)
    return read_comparison(path)
