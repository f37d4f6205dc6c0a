"""Free kernels as callables: the cubin of form ``device`` launched as its block says, the function of form ``host``
called. Both are :class:`outblas.core.rivals.Bindable`, and live in a sandboxed worker only."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outblas.core.errors import DeviceError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.judge.operands import CANARY
from outblas.runtime.driver import check, driver
from outblas.runtime.launch import (
    PORTABLE_CLUSTER,
    KernelCall,
    StreamConfigs,
    check_operands,
    ensure_context,
    launch_config,
)
from outblas.runtime.tensor_map import encode_boxes
from outblas_lab.custom.contract import MAX_WORKSPACE_BYTES, LaunchBlock, TensorMap
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.build import BuiltKernel
from outblas_lab.jail.elf import dynamic_symbols

_GUARD_BYTES = 64 * 1024
_ALIGN = 256


class GuardedWorkspace:
    """Device memory, zero at first, between two guards.

    Args:
        nbytes: size without the guards, bytes.
        device: a torch device, such as ``"cuda:0"``.
    """

    def __init__(self, nbytes: int, device: Any) -> None:
        import torch

        self.nbytes = nbytes
        room = -(-nbytes // _ALIGN) * _ALIGN
        self._words = torch.full(((room + 2 * _GUARD_BYTES) // 2,), CANARY, dtype=torch.int16, device=device)
        self._first = _GUARD_BYTES // 2
        self._behind = self._first + -(-nbytes // 2)
        self._words[self._first : self._behind] = 0
        torch.cuda.synchronize(device) if self._words.is_cuda else None

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of 256."""
        return int(self._words.data_ptr()) + _GUARD_BYTES

    def broken(self) -> bool:
        """Return True if a guard was overwritten, before or behind the memory; else False. Nothing is repaired."""
        guards = (self._words[: self._first], self._words[self._behind :])
        return any(bool((guard != CANARY).any()) for guard in guards)


_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


class _Loaded:
    """The part that both forms share: a name and guarded workspaces."""

    def __init__(self, built: BuiltKernel, gpu: Gpu, max_workspace: int) -> None:
        self.config: FreeKernel = built.kernel
        self.name, self._gpu, self._max_workspace = built.kernel.name, gpu, max_workspace
        self._workspaces: list[GuardedWorkspace] = []

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> Any:
        """A call computing ``c = a @ b`` with a workspace of its own, if the kernel asks for one.

        Raises:
            TensorError: operands that are not what the problem says. ContractError: sizes that cannot be.
            DeviceError: the driver refuses the launch, or the kernel wants too much.
        """
        check_operands(problem, a, b, c)
        return self._call(problem, (a, b, c), self._workspace(self._bytes(problem), a.device))

    def bind_many(self, problem: Problem, operands: Sequence[tuple[Any, Any, Any]]) -> list[Any]:
        """:meth:`bind` of each, for calls of one stream, one after the other: they share a workspace."""
        workspace = self._workspace(self._bytes(problem), operands[0][0].device) if operands else None
        for each in operands:
            check_operands(problem, *each)
        return [self._call(problem, each, workspace) for each in operands]

    def broken_workspace(self) -> bool:
        """Return True if a guard of any workspace was overwritten so far."""
        return any(each.broken() for each in self._workspaces)

    def release(self) -> None:
        """Let go of the workspaces of calls that are made no more."""
        self._workspaces.clear()

    def _workspace(self, nbytes: int, device: Any) -> GuardedWorkspace | None:
        if not 0 <= nbytes <= self._max_workspace:
            raise DeviceError(f"the workspace has {nbytes} bytes", f"at most {self._max_workspace}", "shrink it")
        if nbytes:
            self._workspaces.append(GuardedWorkspace(nbytes, device))
            return self._workspaces[-1]
        return None

    def _bytes(self, problem: Problem) -> int:
        raise NotImplementedError

    def _call(self, problem: Problem, operands: tuple[Any, Any, Any], workspace: GuardedWorkspace | None) -> Any:
        raise NotImplementedError


class DeviceKernel(_Loaded):
    """A kernel of form ``device``, loaded into the current CUDA context when it is made.

    ``bind(problem, a, b, c)`` returns a call of a raw CUstream, as for a kernel of the package. ``broken_workspace()``
    tells an overwritten guard. ``release()`` lets go of its workspaces. ``name`` and ``config`` are the kernel's name
    and the kernel.

    Args:
        max_workspace: the largest workspace that it may ask for, bytes.

    Raises:
        DeviceError: the driver cannot load it.
    """

    def __init__(self, built: BuiltKernel, gpu: Gpu, max_workspace: int = MAX_WORKSPACE_BYTES) -> None:
        super().__init__(built, gpu, max_workspace)
        self._launch: LaunchBlock = built.kernel.launch
        cu = driver()
        ensure_context()
        self._module = check("cuModuleLoadData", cu.cuModuleLoadData(built.cubin.image))
        name = self._launch.entry.encode()
        self._function = check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, name))
        attribute = cu.CUfunction_attribute
        if self._launch.shared:
            self._set(attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self._launch.shared)
        x, y, z = self._launch.cluster
        if x * y * z > PORTABLE_CLUSTER:
            self._set(attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

    def _set(self, attribute: Any, value: int) -> None:
        check("cuFuncSetAttribute", driver().cuFuncSetAttribute(self._function, attribute, value))

    def _bytes(self, problem: Problem) -> int:
        return self._launch.workspace_of(problem, self._gpu)

    def _call(self, problem: Problem, operands: tuple[Any, Any, Any], workspace: GuardedWorkspace | None) -> KernelCall:
        by_name = dict(zip("ABC", operands, strict=True))
        maps = [encode_map(by_name[each.operand].data_ptr(), each, problem) for each in self._launch.tensor_maps]
        params: list[Any] = [ctypes.c_void_p(t.data_ptr()) for t in operands]
        params += [ctypes.c_int(x) for x in (problem.m, problem.n, problem.k)]
        params.append(ctypes.c_void_p(workspace.address if workspace else None))
        params += [each.getPtr() for each in maps]
        launch = self._launch
        cluster = None if launch.cluster == (1, 1, 1) else launch.cluster
        configs = StreamConfigs(
            lambda: launch_config(launch.grid_of(problem, self._gpu), launch.block, launch.shared, cluster)
        )
        return KernelCall(self._function, configs, params, (self, maps, workspace), operands)


class HostKernel(_Loaded):
    """A kernel of form ``host``, whose shared object is loaded into this process when it is made.

    ``bind(problem, a, b, c)`` returns a :class:`HostCall`. Its other methods are those of :class:`DeviceKernel`.

    Args:
        folder: writable folder; the shared object is written there, loaded and removed.
        cudart: path of the CUDA run-time library of its build. None leaves the search to the system.
        max_workspace: the largest workspace that it may ask for, bytes.

    Raises:
        DeviceError: it cannot be loaded.
    """

    def __init__(
        self, built: BuiltKernel, folder: str | Path, cudart: str | None, gpu: Gpu,
        max_workspace: int = MAX_WORKSPACE_BYTES,
    ) -> None:  # fmt: skip
        super().__init__(built, gpu, max_workspace)
        path = Path(folder) / f"{self.name}.so"
        path.write_bytes(built.cubin.image)
        ensure_context()
        try:
            for library in _needed(built.cubin.image, cudart):
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            library_handle = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL | os.RTLD_LAZY)
            self._function = library_handle.outblas_launch
        except (OSError, AttributeError) as error:
            raise DeviceError(f"the library cannot be loaded ({error})", "a shared object", "recompile it") from error
        finally:
            path.unlink(missing_ok=True)
        self._function.restype = ctypes.c_int
        self._function.argtypes = [
            *(ctypes.c_void_p,) * 3, *(ctypes.c_int,) * 3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        ]  # fmt: skip
        self._asks = getattr(library_handle, "outblas_workspace", None)
        if self._asks is not None:
            self._asks.restype, self._asks.argtypes = ctypes.c_size_t, [ctypes.c_int] * 3

    def _bytes(self, problem: Problem) -> int:
        return int(self._asks(problem.m, problem.n, problem.k)) if self._asks is not None else 0

    def _call(self, problem: Problem, operands: tuple[Any, Any, Any], workspace: GuardedWorkspace | None) -> Any:
        address, nbytes = (workspace.address, workspace.nbytes) if workspace else (None, 0)
        fixed = (*(t.data_ptr() for t in operands), problem.m, problem.n, problem.k, address, nbytes)
        return HostCall(self._function, fixed, (self, operands, workspace))


def _needed(image: bytes, cudart: str | None) -> list[str]:
    """Libraries that must be there before it is: the run time, and the driver where it asks for that by name."""
    asked, _ = dynamic_symbols(image)
    return [*([cudart] if cudart else []), *(["libcuda.so.1"] if any(re.match("cu[A-Z]", x) for x in asked) else [])]


class HostCall:
    """A bound product of form ``host``. Call it with a raw CUstream; it runs ``outblas_launch``.

    The call returns None. It raises DeviceError if ``outblas_launch`` returns a number other than 0.
    """

    def __init__(self, function: Any, fixed: tuple[Any, ...], keep: tuple[Any, ...]) -> None:
        self._function, self._fixed, self._keep = function, fixed, keep

    def __call__(self, stream: int) -> None:
        status = self._function(*self._fixed, stream)
        if status:
            raise DeviceError(f"outblas_launch returned {status}", "0", "check its kernel launches")


def load(
    built: BuiltKernel, folder: str | Path, cudart: str | None, gpu: Gpu, max_workspace: int = MAX_WORKSPACE_BYTES
) -> DeviceKernel | HostKernel:
    """Load a built kernel into this process, which must be a sandboxed worker.

    Args:
        max_workspace: the largest workspace that it may ask for, bytes. A free kernel's own limit by default.

    Raises:
        DeviceError: it cannot be loaded.
    """
    if built.kernel.launch.form == "host":
        return HostKernel(built, folder, cudart, gpu, max_workspace)
    return DeviceKernel(built, gpu, max_workspace)


@functools.lru_cache(maxsize=1024)
def encode_map(address: int, wanted: TensorMap, problem: Problem) -> Any:
    """Return the TMA descriptor of an operand for a launch block's tensor map. Equal requests return the same object.

    Raises:
        DeviceError: the driver refuses it.
    """
    return encode_boxes(address, wanted.extents(problem), wanted.box, problem.dtype, _SWIZZLES[wanted.swizzle])
