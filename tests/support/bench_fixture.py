"""Synthetic bench results: shaped like real ones, and labelled so that nobody takes them for such."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import config_name
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us, regime
from outblas.core.suites import suite
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.results import write_result
from outblas_lab.compare.compare_result import Comparison, read_comparison, write_comparison
from support.gpus.known import H200

SMALL = (64, 512, 4096, 16384)
META: dict[str, Any] = {
    "suite": "grid1000",
    "provenance": {
        "gpu": "NVIDIA H200 (test fixture)",
        "driver": "0.0",
        "toolchain": "none",
        "date": "2000-01-02",
        "commit": "0000000",
        "command": "tests/bench_fixture.py <invented figures & no GPU>",
    },
}


def make_rows(
    sizes: Sequence[int] = SMALL, *, seed: int = 0, pdls: Sequence[bool] = (False, True)
) -> list[dict[str, Any]]:
    """Rows of every M, N, K of ``sizes``: mostly wins, some fall-backs, a few losses below 0.99."""
    problems = [p for p in suite("grid1000") if {p.m, p.n, p.k} <= set(sizes)]
    rng = random.Random(seed)
    made = [make_row(problem, pdl, rng) for problem in problems for pdl in pdls]
    for row in made[11::200]:  # whatever the seed: some losses
        us = row["baseline_us"]
        row |= {"config": "sm90_wgmma_gemm:", "status": "passed", "fallback": False, "ours_us": us / 0.97}
        row |= {"speedup": 0.97, "low": 0.96, "high": 0.98, "published": 0.97}
    return made


def make_row(problem: Problem, pdl: bool, rng: random.Random) -> dict[str, Any]:
    """Return an invented row: small problems win more, and PDL helps if launch time matters."""
    where = regime(problem, H200)
    centre = 0.03 + (0.25 if where == "launch" else 0.06) * (1 + pdl) / 2
    speedup = 2.718281828 ** rng.gauss(centre, 0.05)
    fallback = speedup < 1.0 and rng.random() < 0.9
    base_us = floor_us(problem, H200) * (1.5 + rng.random())
    config = Sm90WgmmaConfig(128, 128, pdl=pdl)
    return {
        **problem.to_json(),
        "mode": "offline",
        "pdl": pdl,
        "early": False,
        "config": "" if fallback else config_name(config),
        "status": "left_out" if fallback else "passed",
        "fallback": fallback,
        "ours_us": None if fallback else base_us / speedup,
        "ours_spread": None if fallback else 0.01,
        "baseline": rng.choice(("lt_auto", "cublaslt_heuristic", "torch")),
        "baseline_us": base_us,
        "baseline_detail": "algo 7",
        "speedup": None if fallback else speedup,
        "low": None if fallback else speedup * 0.99,
        "high": None if fallback else speedup * 1.01,
        "published": 1.0 if fallback else speedup,
        "floor_us": floor_us(problem, H200),
        "regime": where,
        "torch_us": base_us * 1.05,
        "lt_auto_us": base_us,
        "rounds": 7,
        "repeats": 32,
        "operand_sets": 4,
        "sm_clock_mhz": 1700.0,
        "temperature_c": 45.0,
    }


def write_bench(path: Path, sizes: Sequence[int] = SMALL, **kwargs: Any) -> list[dict[str, Any]]:
    """Write such a file and return its rows."""
    rows = make_rows(sizes, **kwargs)
    write_result(rows, META, path)
    return rows


PROVENANCE = {
    "gpu": "NVIDIA H200 (test fixture)",
    "driver": "0.0",
    "toolchain": "none",
    "date": "2000-01-02",
    "commit": "0000000",
    "command": "tests/support/bench_fixture.py <invented figures & no GPU>",
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
