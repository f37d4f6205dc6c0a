"""``outblas explain``: what serves each product of a model in an inference engine, and the gain of a step."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outblas.cli.common import err, integers, out, print_result
from outblas.core.errors import UsageError
from outblas.runtime.device import gpu_of_device, parse_device

if TYPE_CHECKING:
    from outblas.records.library import Library
    from outblas.records.library_row import LibraryChoice
    from outblas.tune.intervals.model_ranges import ModelWeight


def explain(
    model: Annotated[Path, typer.Option(help="config.json of a model, or the model's directory.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: number of GPUs that share each layer.")] = 1,
    engine: Annotated[str, typer.Option(help="Inference engine; only vllm is supported.")] = "vllm",
    rows: Annotated[str, typer.Option(help="Comma-separated values of M (tokens per step).")] = "1,8,64,256",
    dtype: Annotated[str | None, typer.Option(help="Data type: fp16 or bf16 (default: as in config.json).")] = None,
    device: Annotated[
        str | None, typer.Option(help="GPU cuda:N or recording replay:NAME (default: as for `outblas tune`).")
    ] = None,
) -> None:
    """Show which kernel computes each matmul of a model in an inference engine, and predict the speedup of a step.

    A library kernel's speedup is measured against the fastest baseline; other kernels' speedups over torch are
    predicted. A fused gate's speedup is measured against a matmul plus a separate gate pass; the step speedup
    excludes fused gates.
    """
    from outblas.core.gpu_records import packaged_gpu
    from outblas.dispatch.unlisted_shapes import any_shape_chooser
    from outblas.tune.intervals.model_ranges import check_engine, served, step_speedup, weights_of_file

    check_engine(engine)
    found = integers("--rows", rows)
    if min(found) < 1:
        wrong = f"--rows {rows!r} is invalid"
        raise UsageError(wrong, "comma-separated integers of 1 or more", "pass e.g. --rows 1,8,64,256")
    numbers, where = list(dict.fromkeys(found)), parse_device(device)
    weights, library = weights_of_file(model, tp, dtype, where)
    gpu = packaged_gpu(library.gpu) if where.gpu_index is None else gpu_of_device(where.gpu_index)
    choose = any_shape_chooser(gpu.name, library)
    ways = {one: [served(one.asked.problem(m), gpu, library, choose) for m in numbers] for one in weights}
    rows_found: list[dict[str, Any]] = []
    for one, way in ways.items():
        cells = ", ".join(f"M {m}: {by} {speedup:.3f}" for m, (by, speedup, _) in zip(numbers, way, strict=True))
        lacks = f"; {len(one.lacking)} sizes are not in the library" if one.lacking else ""
        out.print(f"{one.product.name} {one.asked.weight.key} ({one.times} times): {cells}{lacks}", markup=False)
        gates = {m: _gate(one, m, library) if one.is_gated else None for m in numbers}
        rows_found += [
            {"product": one.product.name, "weight": one.asked.weight.key, "times": one.times, "m": m, "by": by,
             "lacking": len(one.lacking), "speedup": speedup, "gate_speedup": gate and gate.speedup}
            for (m, gate), (by, speedup, _) in zip(gates.items(), way, strict=True)
        ]  # fmt: skip
        if one.is_gated:
            out.print(f"  with fused SiLU gate: {_gates(gates)}", markup=False)
    gains = {m: step_speedup((one.times, way[index]) for one, way in ways.items()) for index, m in enumerate(numbers)}
    for m, gain in gains.items():
        out.print(f"matmuls of a step with M = {m}: predicted speedup {gain:.3f}x", markup=False)
    command = None
    if any(one.lacking for one in weights):
        command = _tune_command(model, tp, dtype, device if where.recording is None else None)
        where_to = "" if where.recording is None else " on a GPU"
        out.print(f"to tune the missing sizes{where_to}: {command}", markup=False)
    note = "" if device or where.recording is None else " (no GPU here; --device names another)"
    err.print(f"library: {library.gpu}{note}", markup=False)
    print_result("explain", {}, rows_found, library=library.gpu, step_speedups=gains, tune=command)


def _gate(one: ModelWeight, m: int, library: Library) -> LibraryChoice | None:
    """Return the library's kernel for the gate of a weight at an M; None for a product and a pass."""
    from outblas.dispatch.exclusion import exclusions_of_environment

    problem = one.asked.weight.problem(m)
    gate = library.gate(problem)
    return None if gate is None or exclusions_of_environment().why_not(problem, gate.config) else gate


def _gates(gates: Mapping[int, LibraryChoice | None]) -> str:
    """Return how a gate is computed at each M: by a fused kernel with its measured speedup, or in a separate pass."""
    ways = {m: "separate pass" if gate is None else f"kernel {gate.speedup:.3f}" for m, gate in gates.items()}
    return ", ".join(f"M {m}: {way}" for m, way in ways.items())


def _tune_command(model: Path, tp: int, dtype: str | None, device: str | None) -> str:
    """Return the command that tunes the model, for a shell; None leaves an option out."""
    words = ["outblas", "tune", "--model", str(model), "--tp", str(tp)]
    for option, value in (("--dtype", dtype), ("--device", device)):
        words += [] if value is None else [option, value]
    return shlex.join(words)
