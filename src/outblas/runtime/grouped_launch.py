"""Load a grouped kernel and launch it."""

from __future__ import annotations

import copy
import ctypes
from typing import TYPE_CHECKING, Any

from outblas.core.errors import ConfigError, TensorError
from outblas.kernels.geometry_terms import SMEM_LIMIT, WGMMA_ROWS
from outblas.kernels.grouped.grouped_kernel import GroupedConfig, ctas, why_illegal
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.runtime.cubin import Cubin
from outblas.runtime.device import gpu_of_device
from outblas.runtime.driver import check, driver
from outblas.runtime.launch import KernelCall, StreamConfigs, ensure_context, launch_config, may_overlap
from outblas.runtime.tensor_map import encode_extents

if TYPE_CHECKING:
    import torch

#: Columns of a box of A or of W: one swizzle span of 128 bytes.
_BOX = 64


class GroupedKernel:
    """A cubin of ``sm90_grouped_gemm`` in the current context.

    Args:
        cubin: compiled from :func:`outblas.kernels.grouped.grouped_kernel.make_source`.
        problem: the problem of all calls. A cubin serves every problem of its layout, dtype, gate and bias.
        config: its knobs.

    Raises:
        ConfigError: the config is not legal for the problem.
        DeviceError: the driver cannot load the cubin.
    """

    def __init__(self, cubin: Cubin, problem: GroupedProblem, config: GroupedConfig) -> None:
        self.problem, self.config = _checked(problem, config), config
        cu = driver()
        ensure_context()
        self._module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin.image))
        self._function = check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, cubin.entry.encode()))
        name = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check("cuFuncSetAttribute", cu.cuFuncSetAttribute(self._function, name, SMEM_LIMIT))

    def on(self, problem: GroupedProblem) -> GroupedKernel:
        """Return the same kernel for another problem of its layout, dtype, gate and bias.

        Raises:
            ConfigError: the config is not legal for it.
        """
        if problem == self.problem:
            return self
        made = copy.copy(self)
        made.problem = _checked(problem, self.config)
        return made

    def bind(
        self, a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None = None,
        dependent: bool = False,
    ) -> KernelCall:  # fmt: skip
        """Return a call that computes the rows of all groups of ``c``. Rows behind the last end are not written.

        Args:
            a: (rows, K), the groups' rows one after the other.
            w: (groups, N, K) for TN, (groups, K, N) for NN.
            ends: int32 (groups), where each group ends. The host never reads them. Ends that run backwards or past the
                last row are clamped.
            c: (rows, columns), overwritten.
            bias: (groups, N) if the problem has one.
            dependent: launch it while the kernel before ends (programmatic dependent launch). It reads and writes
                nothing before that one has ended.

        Raises:
            TensorError: wrong shape, dtype, device or strides; misaligned; or c overlaps another operand.
            DeviceError: the driver refused a descriptor.
        """
        p, config, rows = self.problem, self.config, a.shape[0]
        self._check({"a": a, "w": w, "c": c, "bias": bias}, ends)
        map_a = encode_extents(a.data_ptr(), (p.k, rows), (p.k,), (_BOX, config.bn // config.cluster), p.dtype, "128B")
        inner, outer = (p.k, p.n) if p.layout == "TN" else (p.n, p.k)
        box = (_BOX, WGMMA_ROWS if p.layout == "TN" else config.bk, 1)
        map_w = encode_extents(w.data_ptr(), (inner, outer, p.groups), (inner, inner * outer), box, p.dtype, "128B")
        gpu = gpu_of_device(a.device.index or 0)
        grid = (ctas(p, config, rows, gpu.sms), 1, 1)
        cluster = (config.cluster, 1, 1) if config.cluster > 1 else None
        smem = config.smem_bytes(p.groups)
        configs = StreamConfigs(lambda: launch_config(grid, (config.threads, 1, 1), smem, cluster, dependent))
        addresses = (ends.data_ptr(), c.data_ptr(), 0 if bias is None else bias.data_ptr())
        params: list[Any] = [map_a.getPtr(), map_w.getPtr(), *(ctypes.c_void_p(each) for each in addresses)]
        params += [ctypes.c_int(each) for each in (rows, p.n, p.k, p.groups)]
        return KernelCall(self._function, configs, params, (self, map_a, map_w), (a, w, ends, c, bias))

    def _check(self, operands: dict[str, torch.Tensor | None], ends: torch.Tensor) -> None:
        p, a, c = self.problem, operands["a"], operands["c"]
        assert a is not None and c is not None
        weight = (p.groups, p.n, p.k) if p.layout == "TN" else (p.groups, p.k, p.n)
        shapes = {"a": (a.shape[0], p.k), "w": weight, "c": (a.shape[0], p.columns), "bias": (p.groups, p.n)}
        dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[p.dtype]
        wanted = {
            name: (shapes[name], dtype) for name, t in operands.items() if name != "bias" or p.bias or t is not None
        }
        wanted["ends"] = ((p.groups,), "torch.int32")
        for name, (shape, kind) in wanted.items():
            t = ends if name == "ends" else operands[name]
            fits = t is not None and (tuple(t.shape), str(t.dtype), t.device) == (shape, kind, a.device)
            if t is None or not fits or not t.is_contiguous() or (t.data_ptr() % 16 and name != "ends"):
                wrong = f"{name} is {None if t is None else f'{tuple(t.shape)} of {t.dtype} on {t.device}'}"
                expected = f"{shape} of {kind} on {a.device}, contiguous, at a multiple of 16 bytes"
                raise TensorError(wrong, expected, "convert or copy it")
            if name != "c" and may_overlap(t, c):
                raise TensorError(f"c overlaps {name} in memory", "separate memory", "allocate c separately")


def _checked(problem: GroupedProblem, config: GroupedConfig) -> GroupedProblem:
    if reason := why_illegal(problem, config):
        raise ConfigError(f"{config} on {problem}: {reason}", "a legal config", "choose one of candidates()")
    return problem
