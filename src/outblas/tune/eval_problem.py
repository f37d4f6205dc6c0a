"""``outblas eval``: find our kernel for one problem, prove it, time it against every baseline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import DeviceError
from outblas.core.evaluation import Evaluation, Status, Timing
from outblas.core.files import write_json
from outblas.core.lab_parts import part
from outblas.core.problem import Problem
from outblas.core.rivals import BASELINE_NAMES
from outblas.core.roofline import Gpu, floor_us
from outblas.dispatch.matmul import use_library
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import candidates
from outblas.kernels.cost.cost_model import rank
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.provenance import collect_provenance, gpu_state
from outblas.runtime.device import gpu_of_device
from outblas.tune.live_evaluator import LiveEvaluator
from outblas.workers.sandbox import STEP_TIMEOUT_S

#: The ranking model's first choices that are tried for a problem, beside the library's kernels, at most two.
CANDIDATES_TRIED = 24

Row = dict[str, Any]
_Won = dict[str, Evaluation]


def run_eval(
    problem: Problem, mode: str, target_qps: float | None, warmup_seconds: float, benchmark_seconds: float,
    base_dir: Path, gpu_index: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Evaluate one problem; write ``<base_dir>/eval_<problem>_<mode>.json``.

    Args:
        target_qps: requests per second, in server mode; else None.
        warmup_seconds: seconds of untimed rounds or requests.
        benchmark_seconds: least seconds of timed ones.

    Returns:
        ``rows`` (one per callable: name, us or p50_us/p99_us, tflops, floor_percent, speedup, low, high,
        detail), ``provenance``, and scalars to print. All that is in the file. The entry ``written``, the file's path
        as text, is not.

    Raises:
        DeviceError: no GPU, or no candidate passes.
        UsageError: server mode without a rate.
        ToolchainMissing: server mode without outblas-lab.
    """
    served = part("serve", "--mode server") if mode == "server" else None
    if served is not None:
        served.check_qps(target_qps)
    gpu = gpu_of_device(gpu_index)
    configs = shortlist_candidates(problem, gpu)
    best, refused = _winners(problem, configs, gpu_index, gpu)
    if served is not None:
        use_library(one_row_library(problem, best, gpu), gpu_index)
        try:
            rows = served.eval_rows(problem, gpu_index, target_qps, warmup_seconds, benchmark_seconds)
        finally:
            use_library(None, gpu_index)
    else:
        rows = _offline(problem, best, gpu_index, gpu, warmup_seconds, benchmark_seconds)
    first = next(iter(best.values()))
    result: dict[str, Any] = {
        "problem": problem.key,
        "mode": mode,
        "rows": rows,
        "proof": f"{first.verdict.status}: {', '.join(first.verdict.gates)}" if first.verdict else "",
        "floor_us": round(floor_us(problem, gpu), 3),
        "candidates_tried": len(configs),
        "refused": "; ".join(refused),
        "provenance": {**collect_provenance("outblas eval", gpu_index), **gpu_state(gpu_index)},
    }
    path = base_dir / f"eval_{problem.key}_{mode}.json"
    write_json(path, result)
    return {**result, "written": str(path)}


def shortlist_candidates(problem: Problem, gpu: Gpu, tried: int = CANDIDATES_TRIED) -> list[KernelConfig]:
    """Return the library's kernels for the problem, then the ranking model's first choices, without repetition.

    The choices are the best ``tried // 2`` without PDL, then the best ``tried // 2`` with PDL. Illegal configs are left
    out.

    Args:
        tried: number of the model's choices, rounded down to an even one. The library's kernels, at most 2, come in
            addition.

    Raises:
        DeviceError: no kernel of ours is legal for the problem on this GPU.
    """
    row = Library.packaged(gpu.name, missing_ok=True).lookup(problem)
    known = [c.config for c in (row.plain, row.pdl) if c is not None] if row else []
    legal = candidates(problem, gpu)
    ranked = [legal[i] for i in rank(problem, legal, gpu)]
    half = tried // 2
    chosen = [c for c in ranked if not c.pdl][:half] + [c for c in ranked if c.pdl][:half]
    found = [c for c in dict.fromkeys([*known, *chosen]) if why_illegal(problem, c, gpu) is None]
    if not found:
        raise DeviceError(f"OutBLAS has no kernel for {problem.key} on sm_{gpu.arch}", "a legal config", "use torch")
    return found


def _winners(problem: Problem, configs: list[KernelConfig], index: int, gpu: Gpu) -> tuple[_Won, list[str]]:
    """Return the fastest proven candidate without PDL (``ours``) and with it (``ours_pdl``), and those that failed."""
    with LiveEvaluator(index, Options(index, gpu, baselines=())) as evaluator:
        tried = list(evaluator.evaluate([(problem, c) for c in configs]))
    passed = [e for e in tried if e.status is Status.PASSED and e.timing is not None]
    refused = [f"{config_name(e.config)}: {e.status} {e.detail}" for e in tried if e.status is not Status.PASSED]
    if not passed:
        wrong = f"no candidate for {problem.key} passed ({'; '.join(refused[:3])})"
        raise DeviceError(wrong, "a proven kernel", "report this bug")

    def fastest(pdl: bool) -> Evaluation | None:
        group = [e for e in passed if e.config.pdl is pdl]
        return min(group, key=lambda e: e.timing.median_us if e.timing else 0.0, default=None)

    found = {"ours": fastest(False), "ours_pdl": fastest(True)}
    return {name: e for name, e in found.items() if e is not None}, refused


def _offline(
    problem: Problem, best: Mapping[str, Evaluation], gpu_index: int, gpu: Gpu, warmup: float, seconds: float
) -> list[Row]:
    options = Options(
        gpu_index, gpu, seed=1, level="cell", baselines=BASELINE_NAMES, warmup_seconds=warmup, benchmark_seconds=seconds
    )
    with LiveEvaluator(gpu_index, options, step_timeout_s=STEP_TIMEOUT_S + warmup + seconds) as evaluator:
        found = {e.config: e for e in evaluator.evaluate([(problem, e.config) for e in best.values()])}
        report = evaluator.baseline_report(problem)
    rows = []
    for name, chosen in best.items():
        e = found[chosen.config]
        if e.timing is None:
            rows.append({"name": name, "detail": f"{e.status}: {e.detail}"})
            continue
        row = _row(name, problem, gpu, e.timing, config_name(e.config))
        if e.speedup is not None:
            row |= {"speedup": e.speedup.ratio, "low": e.speedup.low, "high": e.speedup.high}
            row["detail"] = f"vs {e.speedup.baseline}; {row['detail']}"
        rows.append(row)
    rows += [_row(n, problem, gpu, t, report.details.get(n, "")) for n, t in report.timings.items()]
    rows += [{"name": n, "detail": f"left out: {why}"} for n, why in report.left_out.items()]
    return rows


def one_row_library(problem: Problem, best: Mapping[str, Evaluation], gpu: Gpu) -> Library:
    """Return a library with one row, by which ``outblas.matmul`` runs the first kernel of ``best`` on the problem.

    Args:
        best: names of entries -> evaluations, at least one.
    """
    plain = next(iter(best.values())).template
    row = LibraryRow(problem, source="outblas eval", plain=LibraryChoice(plain, 1.0, 1.0, 1.0))
    return Library(gpu.name, (row,))


def _row(name: str, problem: Problem, gpu: Gpu, timing: Timing, detail: str) -> Row:
    us = timing.median_us
    return {
        "name": name,
        "us": us,
        "tflops": problem.flops / us / 1e6,
        "floor_percent": 100.0 * floor_us(problem, gpu) / us,
        "spread": timing.spread,
        "rounds": len(timing.samples_us),
        "detail": detail,
    }
