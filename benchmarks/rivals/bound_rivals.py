"""Kernels of others as entries of the clock: of a larger problem than the asked one, with notes of their memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall
from outblas.core.roofline import Gpu
from outblas.runtime.driver import check, driver
from outblas_lab.jail.build import BuiltKernel
from outblas_lab.jail.free_launch import DeviceKernel, HostKernel, load

#: The largest workspace of an instance of CUTLASS, bytes. It is far above ours, so that no useful split is left out.
MAX_WORKSPACE = 2 << 30


def load_instances(built: Mapping[str, BuiltKernel], folder: str, gpu: Gpu) -> dict[str, DeviceKernel | HostKernel]:
    """Load compiled instances of CUTLASS into this process, a jailed worker.

    Args:
        built: name -> compiled instance.
        folder: writable folder.
        gpu: the GPU.
    """
    return {name: load(each, folder, None, gpu, MAX_WORKSPACE) for name, each in built.items()}


class Padded:
    """A kernel of a larger problem, bound to copies of the operands that zeros extend to its extents.

    Args:
        padded: the problem that it computes, no smaller than the asked one in M, N and K.
        stream: torch's stream of the clock.
        copies_back: each call also copies its part of the result into ``c``, for a proof. A timed call does not.
    """

    def __init__(self, kernel: Any, padded: Problem, stream: Any, copies_back: bool) -> None:
        self.name, self._kernel, self._padded = kernel.name, kernel, padded
        self._stream, self._copies_back = stream, copies_back

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call of the kernel; on equal extents it works on the operands themselves."""
        import torch

        wide = self._padded
        if wide == problem:
            return self._kernel.bind(problem, a, b, c)  # type: ignore[no-any-return]
        output = c.new_zeros((wide.m, wide.n))
        operands = extended(a, (wide.m, wide.k)), extended(b, wide.b_shape), output
        torch.cuda.synchronize()
        compute = self._kernel.bind(wide, *operands)
        if not self._copies_back:
            return compute  # type: ignore[no-any-return]

        def call(stream: int) -> None:
            compute(stream)
            with torch.cuda.stream(self._stream):
                c.copy_(output[: problem.m, : problem.n])

        return call

    def broken_workspace(self) -> bool:
        """Return the kernel's own answer."""
        return bool(self._kernel.broken_workspace())


def extended(matrix: Any, shape: tuple[int, int]) -> Any:
    """Return a copy of a matrix with zeros to the right and below, of the given shape."""
    wide = matrix.new_zeros(shape)
    wide[: matrix.shape[0], : matrix.shape[1]] = matrix
    return wide


class SharedMemoryOf:
    """A kernel that notes the shared memory of its launches when the clock captures it.

    Attributes:
        shared_bytes: the most that a CTA has, dynamic and static, bytes; 0 before the capture.
    """

    def __init__(self, kernel: Any) -> None:
        self.name, self._kernel, self.shared_bytes = kernel.name, kernel, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def change_graph(self, graph: Any) -> None:
        """Note the shared memory of the kernels of a captured graph, which stays as it is."""
        self.shared_bytes = shared_bytes(graph)


def shared_bytes(graph: Any) -> int:
    """Return the largest shared memory of a CTA, dynamic and static, of the kernels in a CUgraph, bytes.

    Raises:
        DeviceError: the driver cannot say it.
    """
    cu = driver()
    _, count = check("cuGraphGetNodes", cu.cuGraphGetNodes(graph))
    nodes, _ = check("cuGraphGetNodes", cu.cuGraphGetNodes(graph, count))
    kernel = int(cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)
    kernels = [node for node in nodes if int(check("cuGraphNodeGetType", cu.cuGraphNodeGetType(node))) == kernel]
    return max((_node_bytes(node) for node in kernels), default=0)


def _node_bytes(node: Any) -> int:
    cu = driver()
    launch = check("cuGraphKernelNodeGetParams", cu.cuGraphKernelNodeGetParams(node))
    function = launch.func if int(launch.func) else check("cuKernelGetFunction", cu.cuKernelGetFunction(launch.kern))
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    return int(launch.sharedMemBytes) + int(check("cuFuncGetAttribute", cu.cuFuncGetAttribute(attribute, function)))
