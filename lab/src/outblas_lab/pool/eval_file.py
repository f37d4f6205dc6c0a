"""``outblas eval --file``: one free kernel on one problem, live where there is a GPU, else compiled only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outblas.core.errors import ContractError, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import write_json
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us
from outblas.records.evaluation_json import evaluation_to_json
from outblas_lab.custom.free_kernel import MAX_TEXT_BYTES, FreeKernel
from outblas_lab.jail.offline_evaluators import CompileOnlyEvaluator


def read_kernel(path: Path) -> FreeKernel:
    """Read a free kernel from a CUDA C++ file.

    Raises:
        UsageError: the file cannot be read.
        ContractError: its text is not UTF-8, or not a free kernel.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read --file {path} ({error.strerror})", "a CUDA C++ file", "check --file") from error
    try:
        return FreeKernel.parse(data.decode())
    except UnicodeDecodeError as error:
        raise ContractError(f"{path} is not UTF-8", "CUDA C++ text", "convert it to UTF-8") from error


def eval_file(problem: Problem, path: Path, gpu_index: int | None, base_dir: Path) -> dict[str, Any]:
    """Evaluate a file's kernel; write ``<base_dir>/eval_<problem>_<kernel>.json`` and return the printed result.

    Args:
        gpu_index: CUDA ordinal; None: no GPU, so the kernel is only compiled and inspected.

    Raises:
        UsageError: the file cannot be used.
        ContractError: the file breaks the contract of kernels.
        ToolchainMissing: a compiler is not installed.
        DeviceError: the GPU's worker cannot start.
        RecordError: the result cannot be written; OSError may be raised instead.
    """
    kernel = read_kernel(path)
    evaluation, source, gpu = _evaluated(problem, kernel, gpu_index)
    target = base_dir / f"eval_{problem.key}_{kernel.name}.json"
    write_json(target, {"source": source, **evaluation_to_json(evaluation)})
    return {**_result_of(problem, evaluation, gpu), "evaluated_by": source, "written": str(target)}


def _evaluated(problem: Problem, kernel: FreeKernel, gpu_index: int | None) -> tuple[Evaluation, str, Gpu]:
    if gpu_index is None:
        by = CompileOnlyEvaluator(reference_gpu())
        (found,) = by.evaluate([(problem, kernel)])
        return found, by.source, by.gpu
    from outblas.tune.live_evaluator import LiveEvaluator
    from outblas_lab.jail.jailed_evaluator import FreeOptions

    with LiveEvaluator(gpu_index, free=FreeOptions(prepare=None)) as live:
        (found,) = live.evaluate([(problem, kernel)])
        return found, live.source, live.gpu


def _result_of(problem: Problem, e: Evaluation, gpu: Gpu) -> dict[str, Any]:
    result: dict[str, Any] = {"kernel": getattr(e.config, "name", ""), "status": e.status.value, "detail": e.detail}
    if e.timing is not None:
        us = e.timing.median_us
        row = {"name": "free", "us": us, "tflops": problem.flops / us / 1e6, "spread": e.timing.spread}
        row["floor_percent"] = 100.0 * floor_us(problem, gpu) / us
        if e.speedup is not None:
            row |= {"speedup": e.speedup.ratio, "low": e.speedup.low, "high": e.speedup.high}
        others = [{"name": name, "us": us, "tflops": problem.flops / us / 1e6} for name, us in e.baselines_us.items()]
        result["rows"] = [row, *others]
    result |= {name: f"{value:g}" for name, value in e.counters.items()}
    if e.status not in (Status.PASSED, Status.LEFT_OUT) and e.log.strip() != e.detail.strip():
        result["log"] = e.log.strip()[-2000:]
    return result
