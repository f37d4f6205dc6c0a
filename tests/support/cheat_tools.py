"""Tools shared by the cheats and their tests. A cheat is a Bindable: bind(problem, a, b, c) -> call(stream)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from pathlib import Path

import torch

from outblas.judge.reference import b_as_k_by_n

CHEATS = Path(__file__).parents[1] / "adversarial" / "cheats"


def names():
    return sorted(path.stem for path in CHEATS.glob("*.py"))


def load(name):
    """The module of one cheat: EXPECTED (statuses), GPU (whether it needs one), make() -> Bindable."""
    spec = importlib.util.spec_from_file_location(f"cheat_{name}", CHEATS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Cheat:
    """A Bindable made of a function call(problem, a, b, c, stream)."""

    def __init__(self, name, call):
        self.name, self._call = name, call

    def bind(self, problem, a, b, c):
        return lambda stream: self._call(problem, a, b, c, stream)


def on(stream, tensor):
    """torch's work on the raw stream; nothing on the CPU."""
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=tensor.device))


def honest(problem, a, b, c, stream):
    """A correct product: on the GPU without allocation, once warm, and summed in fp32 throughout."""
    with on(stream, c):
        if c.is_cuda:
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.mm(a, b_as_k_by_n(problem, b), out=c)
        else:
            c.copy_(a.float() @ b_as_k_by_n(problem, b).float())


class Kernel:
    """A CUDA C++ kernel (half*, ...) without a catalogue: entry(a, b, c), one grid."""

    def __init__(self, text, entry, blocks=1, threads=32):
        self._text, self._entry, self._shape = text, entry, (blocks, threads)
        self._function = None

    def __call__(self, stream, *tensors):
        from outblas.runtime.driver import check, driver

        cu = driver()
        if self._function is None:
            from outblas.kernels.source import Source
            from outblas.runtime.nvrtc import compile_source

            cubin = compile_source(Source(self._text, self._entry, (), (), "fp32", self._entry), cache=None)
            self._module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin.image))
            self._function = check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, self._entry.encode()))
        values = tuple(t.data_ptr() for t in tensors)
        blocks, threads = self._shape
        arguments = (values, (ctypes.c_void_p,) * len(values))
        check(
            "cuLaunchKernel",
            cu.cuLaunchKernel(self._function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, 0),
        )


class Honest:
    """fp32 accumulation, rounded once: a kernel that is right."""

    name = "honest"

    def bind(self, problem, a, b, c):
        return lambda stream: c.copy_(a.float() @ b_as_k_by_n(problem, b).float())
