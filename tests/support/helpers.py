"""Stand-ins that the tests share: a small synthetic recording with a known best cell per problem."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outblas.core.config import LAUNCHES, KernelConfig, Launch
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.predict.features import CANDIDATE_FEATURES, PROBLEM_FEATURES
from outblas.predict.posterior import Regressor
from outblas.records.library import Library
from outblas.records.store import Store
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.train.policy import POSTERIOR_INPUTS, SEARCH_INPUTS, Policy

if TYPE_CHECKING:  # the workers of tests import this file, too
    import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Variable PYTHONPATH of processes that import both packages.
SOURCE_PATH = os.pathsep.join(str(ROOT / part) for part in ("src", "lab/src"))


def synthetic_problems(count: int = 12) -> tuple[Problem, ...]:
    return tuple(Problem(64 * (1 + i % 4), 128 * (1 + i // 4), 256) for i in range(count))


def synthetic_catalogue(count: int = 10) -> tuple[KernelConfig, ...]:
    """Half sm90 and half sm80; of both every second one with PDL."""
    configs: list[KernelConfig] = []
    for i in range(count):
        step = i // 4
        if i % 4 < 2:
            configs.append(Sm90WgmmaConfig(64 + 64 * (step % 2), 8 * (1 + step), stages=3, pdl=i % 2 == 1))
        else:
            configs.append(Sm80MmaConfig(16 * (1 + step), 64, pdl=i % 2 == 1))
    assert len(set(configs)) == count
    return tuple(configs)


def synthetic_recording(problems: int = 12, candidates: int = 10, seed: int = 7) -> Recording:
    """Times of 1..3 us against baselines near 2 us; about one cell in seven failed or is not offered.

    Candidate 0 passes on every problem, so that each has a best cell.
    """
    rng = np.random.default_rng(seed)
    shape = (problems, candidates)
    status = np.full(shape, STATUS_CODES[Status.PASSED], np.int8)
    draw = rng.random(shape)
    for low, bad in ((0.0, Status.WRONG), (0.04, Status.ILLEGAL), (0.08, Status.LEFT_OUT), (0.12, Status.FAULT)):
        status[(draw >= low) & (draw < low + 0.04)] = STATUS_CODES[bad]
    status[:, 0] = STATUS_CODES[Status.PASSED]
    passed = status == STATUS_CODES[Status.PASSED]
    blas = rng.uniform(1.8, 2.2, problems).astype(np.float32)
    spread = np.full(problems, 0.01, np.float32)
    return Recording(
        "synthetic",
        synthetic_problems(problems),
        synthetic_catalogue(candidates),
        status,
        np.where(passed, rng.uniform(1, 3, shape), np.nan).astype(np.float32),
        np.where(passed, 0.01, np.nan).astype(np.float32),
        np.where(passed, 7, 0).astype(np.int16),
        {"lt_auto": blas, "torch": (blas * 1.1).astype(np.float32)},
        {"lt_auto": spread, "torch": spread},
        {"lt_auto": tuple(f"algo {i}" for i in range(problems)), "torch": ("",) * problems},
        {"gpu": "NVIDIA H200", "driver": "0", "toolchain": "0", "date": "2000-01-01", "commit": "0", "command": "test"},
    )


def passed_evaluation(problem: Problem, config: KernelConfig, low: float = 1.1, ratio: float = 1.2) -> Evaluation:
    return Evaluation(
        problem,
        config,
        Status.PASSED,
        verdict=Verdict(Status.PASSED, ("compiles", "exact"), max_err_ratio=0.5),
        timing=Timing("offline", (1.0, 2.0, 3.0), 2.0, 0.1, 32, 4),
        baselines_us={"lt_auto": 2.0 * ratio},
        speedup=Speedup("lt_auto", ratio, low, ratio * ratio / low),
        counters={"l2_hit_rate": 0.5},
    )


def failed_evaluation(problem: Problem, config: KernelConfig, status: Status = Status.WRONG) -> Evaluation:
    return Evaluation(problem, config, status, "gate 3: 1 of 4096", Verdict(status, ("compiles",), "gate 3"))


def random_policy(seed: int = 0, width: int = 8) -> Policy:
    """A policy that was never trained."""
    rng = np.random.default_rng(seed)
    inputs, wide = (
        len(PROBLEM_FEATURES) + len(CANDIDATE_FEATURES),
        len(CANDIDATE_FEATURES) + len(POSTERIOR_INPUTS) + len(PROBLEM_FEATURES) + len(SEARCH_INPUTS),
    )

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.2, shape).astype(np.float32)

    regressor = Regressor(
        draw(inputs), np.ones(inputs, np.float32), (draw(2, inputs, 8), draw(2, 8, 1)), (draw(2, 1, 8), draw(2, 1, 1))
    )
    scorer = {"w0": draw(wide, width), "b0": draw(width), "w1": draw(width, width), "b1": draw(width)}
    return Policy(regressor, {**scorer, "w2": draw(width, 1), "b2": draw(1), "greed": np.float32(1.0)}, "about")


def running(pid: int) -> bool:
    """Return whether a process exists and is no zombie. (init reaps zombies once the driver is dead.)"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def without_kernels(library: Library, kernels: Iterable[tuple[Problem, Launch]]) -> Library:
    """Return a library without some kernels, given as (problem, launch option)."""
    lost = set(kernels)
    rows = (replace(row, **{n: None for n in LAUNCHES if (row.problem, n) in lost}) for row in library.rows)
    return replace(library, rows=tuple(rows))


def module_of_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a file that lies in no package, such as a tool; for the time of the test it has the file's name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def half_of_pairs(first: Iterable[Any], second: Sequence[Any]) -> list[Any]:
    """Return all pairs as parameters of a test. Every second one is slow, so that `make test` sees each value.

    Args:
        first: values of the first parameter.
        second: two values of the second one.
    """
    import pytest

    return [
        pytest.param(one, other, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements and the branches that stand directly inside a node, not their expressions."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, block, ())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements inside it, at any depth."""
    yield node
    for child in statements_in(node):
        yield from statements(child)


def timed(problem: Problem, config: KernelConfig, us: float, blas: float = 10.0, rounds: int = 11) -> Evaluation:
    """A proven kernel with a time in microseconds."""
    e = passed_evaluation(problem, config)
    assert e.timing is not None
    timing = replace(e.timing, samples_us=(us,) * rounds, median_us=us)
    return replace(e, timing=timing, baselines_us={"torch": blas, "lt_auto": blas})


def store(path: Path, **runs: list[Evaluation]) -> Path:
    """A store with runs of the given names."""
    with Store(path) as made:
        for run, evaluations in runs.items():
            made.begin(run, {})
            made.extend(run, evaluations)
    return path


def needed_c(problem: Problem, a: Any, b: Any, result: Any) -> float:
    """Return the smallest c with which ``result`` is within the bound of the proof, at least 0.0.

    A result is right if this is at most 4 for fp32 accumulation, or at most 8 for fp16.

    Args:
        a: (M, K).
        b: B as stored.
        result: what a kernel wrote, (M, N).
    """
    from outblas.judge.reference import error_bound, fp64_product, magnitudes

    reference = fp64_product(problem, a, b)
    magnitude, q = magnitudes(problem, a, b)
    base = error_bound(problem, reference, magnitude, q, c=0.0)
    unit = error_bound(problem, reference, magnitude, q, c=1.0) - base
    return max(0.0, float((((result.double() - reference).abs() - base) / unit.clamp_min(1e-300)).max()))
