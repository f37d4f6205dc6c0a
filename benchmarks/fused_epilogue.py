"""Question: how much does a fused epilogue gain, against the product alone with torch's operations, and torch alone?

Command:

    python benchmarks/fused_epilogue.py --out build/fused_epilogue.json [M_N_K ...] [--epilogues bias,bias+gelu]

Result file: the one that --out names; none is published. Needs a GPU.

It takes every problem of the llm suite with a kernel in the packaged library, or the named ones, and every epilogue.
These sides are timed in the same interleaved rounds, each in a CUDA graph whose operands rotate::

    fused   the library's kernel with the epilogue
    ours    the library's kernel, then torch's operations on its output (the bias added in place)
    torch   torch.addmm (or mm), then torch's activation and addition
    plain   the library's kernel without an epilogue: fused - plain is what the epilogue costs

All outputs are allocated before: an operation writes in place or to a buffer. Every fused kernel is proved on the
problem first (outblas.judge.fused_gates); one that is wrong is printed and not timed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rivals.timed_entries import time_entries

from outblas.core.config import KernelConfig, Launch, config_name
from outblas.core.errors import CompileError, OutblasError, UsageError
from outblas.core.evaluation import Status
from outblas.core.files import write_json
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.core.suites import suite
from outblas.judge.fused_gates import prove_fused
from outblas.judge.gpu_clock import GpuClock
from outblas.judge.reference import b_as_k_by_n
from outblas.judge.torch_baselines import TorchMm
from outblas.kernels.epilogue import ACTIVATIONS, Epilogue
from outblas.kernels.geometry import workspace_bytes
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.source import make_source
from outblas.records.library import Library
from outblas.records.provenance import collect_provenance, script_command
from outblas.runtime.device import gpu_of_device
from outblas.runtime.fused_launch import Extra, FusedKernel
from outblas.runtime.launch import load
from outblas.runtime.nvrtc import compile_source, compile_tuned
from outblas.runtime.workspace import allocate

H200 = packaged_gpu("h200")

DEFAULT = ("bias", "bias+gelu", "bias+silu", "bias+residual", "residual", "bias+gelu_tanh+residual")
SIDES = ("fused", "ours", "torch", "plain")


def epilogue_of(name: str) -> Epilogue:
    """Inverse of :attr:`Epilogue.name`. Raises UsageError."""
    every = [Epilogue(b, a, r) for b in (False, True) for a in ACTIVATIONS for r in (False, True)]
    found = next((e for e in every if e.on and e.name == name), None)
    if found is None:
        raise UsageError(f"epilogue {name!r}", "such as bias+gelu+residual", "name what follows the product, in order")
    return found


class Fused:
    """The library's kernel with the epilogue; calls of one stream share a workspace."""

    def __init__(self, kernel: FusedKernel, extra: Extra) -> None:
        self.name, self._kernel, self._extra = kernel.name, kernel, extra
        self._workspace: Any = None

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> Any:
        need = workspace_bytes(problem, self._kernel.config)
        if need and self._workspace is None:
            self._workspace = allocate(need, a.device)
        return self._kernel.bind(problem, (a, b, c), self._extra, self._workspace)


class Followed(TorchMm):
    """A product, then torch's operations in place on its output, on the given stream."""

    def __init__(self, name: str, product: Any, extra: Extra, epilogue: Epilogue) -> None:
        super().__init__()
        self.name, self._product, self._extra, self._epilogue = name, product, extra, epilogue

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> Any:
        multiply, after = self._multiply(problem, a, b, c)

        def call(stream: int) -> None:
            multiply(stream)
            with torch.cuda.stream(self._stream(stream)):
                for operation in after:
                    operation()

        return call

    def _multiply(self, problem: Problem, a: Any, b: Any, c: Any) -> tuple[Callable[[int], Any], list[Any]]:
        bias, residual = self._extra
        if self._product is not None:
            multiply = self._product.bind(problem, a, b, c)
            after: list[Any] = [] if bias is None else [lambda: c.add_(bias)]
        else:
            multiply, after = self._addmm(problem, a, b, c, bias), []
        kind = self._epilogue.activation
        if kind == "silu":
            after.append(lambda: torch.ops.aten.silu_(c))
        elif kind != "none":
            after.append(lambda: torch.ops.aten.gelu_(c, approximate="tanh" if kind == "gelu_tanh" else "none"))
        if residual is not None:
            after.append(lambda: c.add_(residual))
        return multiply, after

    def _addmm(self, problem: Problem, a: Any, b: Any, c: Any, bias: Any) -> Callable[[int], Any]:
        y = b_as_k_by_n(problem, b)

        def multiply(stream: int) -> None:
            with torch.cuda.stream(self._stream(stream)):
                torch.mm(a, y, out=c) if bias is None else torch.addmm(bias, a, y, out=c)

        return multiply


def operands(problem: Problem, epilogue: Epilogue) -> Extra:
    """A bias and a residual; the same for all operand sets (a residual that a layer reads was just written)."""
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    bias = torch.randn(problem.n, dtype=dtype, device="cuda:0") if epilogue.bias else None
    return Extra(bias, torch.randn(problem.m, problem.n, dtype=dtype, device="cuda:0") if epilogue.residual else None)


def measure(problem: Problem, config: KernelConfig, epilogue: Epilogue, rounds: int) -> dict[str, Any]:
    """Return one row: medians in microseconds of each side and the speed-ups of fused, or the reason for their lack."""
    row: dict[str, Any] = {"problem": problem.key, "config": config_name(config), "epilogue": epilogue.name}
    try:
        cubin = compile_tuned(make_source(problem, config, epilogue))
    except CompileError as error:
        return {**row, "refused": str(error)}
    kernel, plain = FusedKernel(cubin, config, epilogue), load(compile_source(make_source(problem, config)), config)
    verdict = prove_fused(kernel, problem)
    if verdict.status is not Status.PASSED:
        return {**row, "wrong": verdict.detail}
    extra = operands(problem, epilogue)
    entries = {
        "fused": Fused(kernel, extra),
        "ours": Followed("ours", plain, extra, epilogue),
        "torch": Followed("torch", None, extra, epilogue),
        "plain": plain,
    }
    with GpuClock(problem, gpu=H200) as bench:
        times = time_entries(bench, entries, rounds)
    us = {name: times[name].median_us for name in SIDES}
    paired = {
        f"over_{name}": sorted(t / f for t, f in zip(times[name].samples_us, times["fused"].samples_us, strict=True))
        for name in ("ours", "torch")
    }
    middle = {name: ratios[len(ratios) // 2] for name, ratios in paired.items()}
    return {**row, "us": us, **middle, "registers": cubin.registers, "max_err_ratio": verdict.max_err_ratio}


def work(problems: Sequence[str], launch: Launch) -> list[tuple[Problem, KernelConfig]]:
    """The problems that have a kernel, and it."""
    library = Library.packaged(gpu_of_device(0).name)
    wanted = [Problem.from_mnk(key) for key in problems] or suite("llm")
    rows = [(p, row.choice(launch)) for p in wanted if (row := library.lookup(p)) is not None]
    return [(p, choice.config) for p, choice in rows if choice is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("problems", nargs="*", metavar="M_N_K", help="TN, fp16 (default: the llm suite)")
    parser.add_argument("--epilogues", default=",".join(DEFAULT), help="comma-separated (default: %(default)s)")
    parser.add_argument("--launch", choices=("plain", "pdl"), default="plain")
    parser.add_argument("--sample", type=int, help="take every n-th problem only")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    wrong = 0
    try:
        epilogues = [epilogue_of(name) for name in options.epilogues.split(",")]
        rows = []
        for problem, config in work(options.problems, options.launch)[:: options.sample or 1]:
            for epilogue in epilogues:
                row = measure(problem, config, epilogue, options.rounds)
                rows.append(row)
                wrong += "wrong" in row
                print({k: v for k, v in row.items() if k != "config"}, flush=True)
        command = script_command("benchmarks/fused_epilogue.py", arguments)
        data = {
            "provenance": {**collect_provenance(command), "kernels": kernels_sha()},
            "launch": options.launch,
            "rows": rows,
        }
        write_json(options.out, data)
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
