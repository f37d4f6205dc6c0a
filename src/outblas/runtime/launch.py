"""Load a cubin and launch it: TMA descriptors, launch attributes, the current stream.

A bound call only enqueues one GEMM. Everything else is computed at binding. So a call costs a few microseconds of host
time and allocates nothing.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import ConfigError, TensorError
from outblas.core.problem import Problem
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import geometry, grid, launch_smem, workspace_bytes
from outblas.kernels.legality import why_illegal
from outblas.runtime.cubin import Cubin
from outblas.runtime.device import gpu_of_device
from outblas.runtime.driver import check, driver
from outblas.runtime.tensor_map import described_maps, encode_operands
from outblas.runtime.workspace import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from outblas.runtime.workspace import CapturedWorkspace

#: Larger clusters need a function attribute (CUDA's portable limit, CTAs).
PORTABLE_CLUSTER = 8


class StreamConfigs(dict[int, Any]):
    """Launch configurations by raw stream: ``configs[stream]`` makes one at its first use. At most 64 are kept."""

    KEPT = 64

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, stream: int) -> Any:
        config = self._make()
        config.hStream = stream
        if len(self) >= self.KEPT:
            self.clear()
        self[stream] = config
        return config


class KernelCall:
    """A GEMM on fixed operands. ``call(torch.cuda.current_stream().cuda_stream)`` enqueues it and returns None.

    Calls of one kernel and problem share their launch configurations, one per stream, which are never changed. So
    threads and signal handlers can launch on their own streams at the same time.

    A call with a workspace (split_kind ``workspace``) must not run on two streams at once; C would be a race anyway. It
    may share the workspace with other calls of :meth:`LoadedKernel.bind_many`.
    """

    def __init__(
        self, function: Any, configs: StreamConfigs, params: list[Any], keep: tuple[Any, ...], operands: tuple[Any, ...]
    ) -> None:
        self._driver = driver()
        self._function, self._configs = function, configs
        self._keep = (params, keep)  # the driver reads the parameters at every launch
        self._operands = operands
        addresses = [p if isinstance(p, int) else ctypes.addressof(p) for p in params]
        self._array = (ctypes.c_void_p * len(addresses))(*addresses)
        self._params = ctypes.addressof(self._array)

    def __call__(self, stream: int) -> None:
        result = self._driver.cuLaunchKernelEx(self._configs[stream], self._function, self._params, 0)
        if result[0]:
            check("cuLaunchKernelEx", result)

    def release(self) -> None:
        """Drop the references to the operand tensors. The caller must then keep their memory valid."""
        self._operands = ()


class PreparedLaunch(NamedTuple):
    """A launch without addresses and stream, as plain numbers for ``outblas.dispatch._native``.

    Attributes:
        function: CUfunction.
        context: CUcontext.
        grid: number of CTAs in x, y, z.
        threads: threads per CTA.
        shared_bytes: dynamic shared memory per CTA.
        cluster: CTAs per cluster.
        dependent: True for programmatic dependent launch.
        extents: M, N, K.
        maps: (rows, cols, box rows, box cols, element type, swizzle, L2 promotion) of the TMA maps of A, B and C. The
            last three are the driver's enumerations. Eight maps of each operand (:func:`combs_of`) have two more
            numbers: elements from a row to the next, and bytes from the operand's address. Empty if the kernel takes
            addresses.
        workspace_bytes: size of the stream's workspace, whose address is the last parameter; 0 if the kernel takes
            none.
        output: shape, strides and torch dtype of C.
    """

    function: int
    context: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    cluster: int
    dependent: bool
    extents: tuple[int, int, int]
    maps: tuple[tuple[int, ...], ...]
    workspace_bytes: int
    output: tuple[Any, ...]


@dataclass(frozen=True)
class _Plan:
    """The part of a launch that depends on the problem but not on the operands.

    ``launch`` is a configuration for reading; ``boxes`` has (rows, cols, box rows, box cols) of each TMA map.
    """

    launch: Any
    configs: StreamConfigs
    extents: tuple[Any, ...]
    boxes: tuple[tuple[int, int, int, int], ...]
    workspace_bytes: int


class LoadedKernel:
    """A cubin loaded into the current context. ``kernel.bind(problem, a, b, c)(stream)`` enqueues one product.

    Args:
        cubin: compiled from ``make_source(problem, config)`` for a problem of the same layout, dtype and accumulator.

    Attributes:
        packaged: True if the cubin came with the package; set by the caller that loads it.

    Raises:
        DeviceError: the driver cannot load the cubin (other architecture, driver too old).
    """

    def __init__(self, cubin: Cubin, config: KernelConfig) -> None:
        self.config, self.name, self.packaged = config, config_name(config), False
        self._family = FAMILIES[config.family]
        cu = driver()
        ensure_context()
        self._context = check("cuCtxGetCurrent", cu.cuCtxGetCurrent())
        self._module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin.image))
        entry = cubin.entry.encode()
        self._function = check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, entry))
        self._allowed_smem = -1  # dynamic shared memory allowed so far, bytes; -1: not set yet
        # One plan per problem, for all operands.
        self._plan = functools.lru_cache(maxsize=256)(self._make_plan)

    def _make_plan(self, problem: Problem, device_index: int) -> _Plan:
        """Return the plan of a problem. Raises ConfigError if the config is not legal for the problem."""
        gpu = gpu_of_device(device_index)
        reason = why_illegal(problem, self.config, gpu)
        if reason is not None:
            raise ConfigError(
                f"{self.name} on {problem.key}: {reason}", "a legal config", "check it with legality.why_illegal first"
            )
        shape = geometry(problem, self.config)
        smem_bytes = launch_smem(problem, self.config, gpu.sms)
        if smem_bytes > self._allowed_smem:
            self._set_attributes(smem_bytes, shape.cluster)
        ctas = grid(problem, self.config, gpu.sms)
        cluster = (shape.cluster, 1, 1) if shape.cluster > 1 else None
        dependent = self.config.pdl and gpu.arch >= 90
        make = functools.partial(launch_config, ctas, (shape.threads, 1, 1), smem_bytes, cluster, dependent)
        extents = tuple(ctypes.c_int(x) for x in (problem.m, problem.n, problem.k))
        boxes = self._family.tensor_boxes(problem, self.config)
        return _Plan(make(), StreamConfigs(make), extents, boxes, workspace_bytes(problem, self.config))

    def _set_attributes(self, smem_bytes: int, cluster: int) -> None:
        """Allow this much dynamic shared memory, and large clusters if needed. The largest request stays in force."""
        attribute = driver().CUfunction_attribute
        self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes)
        if cluster > PORTABLE_CLUSTER:
            self._set(attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        self._allowed_smem = smem_bytes

    def _set(self, attribute: Any, value: int) -> None:
        check("cuFuncSetAttribute", driver().cuFuncSetAttribute(self._function, attribute, value))

    def bind(
        self, problem: Problem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
        workspace: torch.Tensor | CapturedWorkspace | None = None,
    ) -> KernelCall:  # fmt: skip
        """Return a call that computes ``c = a @ b`` (TN: ``a @ b.T``). Nothing runs before ``call(stream)``.

        Args:
            a: tensor (M, K). All three are row-major, contiguous, of the problem's dtype, on one CUDA device.
            b: tensor (N, K) for TN, (K, N) for NN.
            c: tensor (M, N), overwritten.
            workspace: from :func:`outblas.runtime.workspace.allocate`, at least ``workspace_bytes(problem, config)``,
                shared only with calls on the same stream. Or the workspace of a capture. None: allocate one if the
                kernel needs it.

        Raises:
            TensorError: wrong shape, dtype, device or strides; misaligned; c overlaps a or b; or an unfit workspace.
            ConfigError: the config is not legal for this problem.
            DeviceError: a workspace would have to be allocated during a graph capture.
        """
        return self.bind_with(problem, (a, b, c), (), workspace)

    def bind_with(
        self, problem: Problem, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor], more: Sequence[Any],
        workspace: torch.Tensor | None = None, held: tuple[Any, ...] = (), columns: int | None = None, turn: int = 0,
    ) -> KernelCall:  # fmt: skip
        """Return a call as :meth:`bind`, for a kernel with further parameters. Raises as :meth:`bind`.

        Args:
            operands: (a, b, c).
            more: ctypes objects that follow the other parameters.
            held: further tensors that the call keeps until it is released.
            columns: columns of c; None: N. With others the kernel must store by c's address: its TMA map is of (M, N).
            turn: rows of b's upper half that the kernel takes before as many of the lower half; 0: in their order.
        """
        check_operands(problem, *operands, columns=columns)
        plan = self._plan(problem, operands[0].device.index or 0)
        self._check_alignment(*operands)
        params: list[Any] = [ctypes.c_void_p(t.data_ptr()) for t in operands]
        maps: list[Any] = []
        if plan.boxes:
            maps = encode_operands(operands, plan.boxes, problem.dtype, self._family.combs, turn)
            params = [*(m.getPtr() for m in maps), params[2]] if self._family.combs == 1 else [*maps, *params[1:]]
        params += plan.extents
        if plan.workspace_bytes:
            workspace = self._workspace(plan.workspace_bytes, workspace, operands[0])
            params.append(ctypes.c_void_p(workspace.data_ptr()))
        return KernelCall(self._function, plan.configs, [*params, *more], (self, maps, workspace), (*operands, *held))

    def bind_many(
        self, problem: Problem, operands: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> list[KernelCall]:
        """Return a list: :meth:`bind` of each (a, b, c). The calls share one workspace, so they must run one after the
        other on one stream.
        """
        need = workspace_bytes(problem, self.config)
        if not need or not operands:
            return [self.bind(problem, *each) for each in operands]
        shared = allocate(need, operands[0][0].device)
        return [self.bind(problem, *each, workspace=shared) for each in operands]

    @staticmethod
    def _workspace(
        need: int, given: torch.Tensor | CapturedWorkspace | None, like: torch.Tensor
    ) -> torch.Tensor | CapturedWorkspace:
        """Return the given workspace, or a new one on the device of ``like``. Raises TensorError if the given one does
        not fit.
        """
        if given is None:
            return allocate(need, like.device)
        if given.device != like.device or given.nbytes < need:
            raise TensorError(
                f"the workspace has {given.nbytes} bytes on {given.device}",
                f"at least {need} bytes on {like.device}",
                "allocate it with outblas.runtime.workspace.allocate",
            )
        return given

    def prepared(self, problem: Problem, c: torch.Tensor) -> PreparedLaunch:
        """Return the launch of :meth:`bind` as numbers, for outputs like ``c``, a tensor (M, N) on the kernel's device.

        Raises ConfigError if the config is not legal for this problem.
        """
        device_index = c.device.index or 0
        plan, shape = self._plan(problem, device_index), geometry(problem, self.config)
        return PreparedLaunch(
            function=int(self._function), context=int(self._context),
            grid=(plan.launch.gridDimX, plan.launch.gridDimY, plan.launch.gridDimZ), threads=shape.threads,
            shared_bytes=plan.launch.sharedMemBytes, cluster=shape.cluster,
            dependent=self.config.pdl and gpu_of_device(device_index).arch >= 90,
            extents=(problem.m, problem.n, problem.k),
            maps=described_maps(plan.boxes, problem.dtype, self._family.combs), workspace_bytes=plan.workspace_bytes,
            output=((problem.m, problem.n), (problem.n, 1), c.dtype),
        )  # fmt: skip

    def _check_alignment(self, *tensors: torch.Tensor) -> None:
        need = self._family.alignment(self.config)
        for name, tensor in zip("abc", tensors, strict=True):
            if tensor.data_ptr() % need:
                raise TensorError(
                    f"{name} starts {tensor.data_ptr() % need} bytes past a multiple of {need}",
                    f"{need}-byte alignment for {self.config.family}",
                    f"use a config of {_any_alignment()}, or copy the tensor",
                )


def _any_alignment() -> str:
    """Return the families whose kernels accept unaligned operands, each with the knob that allows it, as text."""
    found = (f"{name} with {family.any_alignment}" for name, family in FAMILIES.items() if family.any_alignment)
    return " or ".join(found)


def load(cubin: Cubin, config: KernelConfig) -> LoadedKernel:
    """Return ``LoadedKernel(cubin, config)``, loaded into the current CUDA context. Raises DeviceError if refused."""
    return LoadedKernel(cubin, config)


def check_operands(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, columns: int | None = None
) -> None:
    """Check operands, or raise TensorError: a is (M, K), b ``problem.b_shape``, c (M, N) or (M, ``columns``). All are
    contiguous, of the problem's dtype, on one CUDA device; c overlaps neither. Alignment is not checked.
    """
    output = (problem.m, problem.n if columns is None else columns)
    shapes = {"a": (problem.m, problem.k), "b": problem.b_shape, "c": output}
    dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[problem.dtype]
    for (name, shape), tensor in zip(shapes.items(), (a, b, c), strict=True):
        if tuple(tensor.shape) != shape:
            raise TensorError(
                f"{name} has shape {tuple(tensor.shape)}", f"{shape} for {problem.key}", "pass a tensor of that shape"
            )
        if str(tensor.dtype) != dtype:
            raise TensorError(f"{name} has dtype {tensor.dtype}", dtype, "convert it, or use a problem of that dtype")
        if tensor.device.type != "cuda" or tensor.device != a.device:
            expected = "a, b and c on the same CUDA device"
            raise TensorError(f"{name} is on {tensor.device}", expected, f"move {name} to that device")
        if not tensor.is_contiguous():
            raise TensorError(f"{name} has strides {tensor.stride()}", "a contiguous tensor", "call .contiguous()")
    for name, tensor in (("a", a), ("b", b)):
        if may_overlap(tensor, c):
            raise TensorError(f"c overlaps {name} in memory", "an output in separate memory", "allocate c separately")


def launch_config(
    grid: tuple[int, int, int], block: tuple[int, int, int], smem_bytes: int,
    cluster: tuple[int, int, int] | None, dependent: bool = False,
) -> Any:  # fmt: skip
    """Return a CUlaunchConfig with the attributes for clusters and programmatic dependent launch, without a stream.

    Args:
        grid: CTAs in x, y, z.
        block: threads in x, y, z.
        smem_bytes: dynamic shared memory per CTA.
        cluster: CTAs in x, y, z; None: CTAs are on their own.
        dependent: use programmatic dependent launch, which sm_90 has.
    """
    cu = driver()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem_bytes
    attributes = []
    if cluster is not None:
        clusters = cu.CUlaunchAttribute()
        clusters.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        clusters.value.clusterDim.x, clusters.value.clusterDim.y, clusters.value.clusterDim.z = cluster
        attributes.append(clusters)
    if dependent:
        serial = cu.CUlaunchAttribute()
        serial.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        serial.value.programmaticStreamSerializationAllowed = 1
        attributes.append(serial)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def ensure_context() -> None:
    """Make a CUDA context current if none is: torch's context, in which its tensors live."""
    status, context = driver().cuCtxGetCurrent()
    if int(status) != 0 or not int(context):
        import torch

        torch.cuda.synchronize()  # torch makes its context at first use


def may_overlap(x: Any, y: Any) -> bool:
    """Return True if two tensors may share an element.

    False is certain. The answer is exact for disjoint address ranges and for two 2-D views of equal row pitch, e.g.
    blocks of columns of one matrix. Other tensors with overlapping address ranges give True. An empty tensor gives
    False.

    Example: ``may_overlap(a, a)`` is True; ``may_overlap(a[:, :2], a[:, 2:])`` is False.
    """
    if not x.numel() or not y.numel():
        return False
    (x0, x1), (y0, y1) = _span(x), _span(y)
    if x1 <= y0 or y1 <= x0:
        return False
    rows = [_rows(t) for t in (x, y)]
    if None in rows or x.element_size() != y.element_size():
        return True
    (pitch, width_x), (pitch_y, width_y) = rows  # type: ignore[misc]
    bytes_apart = y0 - x0
    if pitch != pitch_y or max(width_x, width_y) > pitch or bytes_apart % x.element_size():
        return True
    apart = bytes_apart // x.element_size() % pitch
    return apart < width_x or apart + width_y > pitch


def _span(t: Any) -> tuple[int, int]:
    """Return the addresses of the first byte and of the byte after the last."""
    last = sum((extent - 1) * stride for extent, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _rows(t: Any) -> tuple[int, int] | None:
    """Return (pitch, width) in elements of a 2-D view whose rows or columns are dense; else None."""
    if t.dim() != 2:
        return None
    (outer, rows), (inner, width) = sorted(zip(t.stride(), t.shape, strict=True), reverse=True)
    return (outer, width) if inner == 1 and rows >= 1 else None
