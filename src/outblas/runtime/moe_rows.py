"""Launch the kernels that sort, gather and combine the rows of a mixture of experts."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from outblas.kernels.geometry_terms import ceil_div
from outblas.runtime.cubin import Cubin
from outblas.runtime.driver import check, driver
from outblas.runtime.launch import KernelCall, StreamConfigs, ensure_context, launch_config

if TYPE_CHECKING:
    import torch

#: Elements that a thread moves at once, 16 bytes; the most threads of a CTA that gathers or combines.
VECTOR, _THREADS = 8, 256
#: Threads of the CTA that sorts.
_SORTING = 1024


class MoeRows:
    """The kernels of ``moe_rows`` in the current context. Each method enqueues one on a raw stream.

    A ``dependent`` one starts while the kernel before it ends, and waits for that before it reads or writes.
    Operands are contiguous, on the device of the context, and rows begin at multiples of 16 bytes.

    Args:
        cubin: compiled from :func:`outblas.kernels.grouped.rows_source.rows_source`.

    Raises:
        DeviceError: the driver cannot load it.
    """

    def __init__(self, cubin: Cubin) -> None:
        cu = driver()
        ensure_context()
        self._module = check("cuModuleLoadData", cu.cuModuleLoadData(cubin.image))
        names = ("moe_route", "moe_gather", "moe_combine")
        self._functions = {
            name: check("cuModuleGetFunction", cu.cuModuleGetFunction(self._module, name.encode())) for name in names
        }

    def route(
        self, experts: torch.Tensor, ends: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, stream: int
    ) -> None:
        """Sort the choices of a router by expert.

        Args:
            experts: (tokens, top), the type of the source; others than 0 to groups - 1 get no row.
            ends: int32 (groups), written: where the rows of each expert end.
            tokens: int32 (tokens * top), written: the token of each row; 0 for rows behind the last end.
            places: int32 (tokens * top), written: the row of each choice; -1 if it got none.
        """
        groups = ends.shape[0]
        numbers = (experts.numel(), experts.shape[1], groups)
        self._launch("moe_route", (1, 1, 1), _SORTING, 4 * groups, (experts, *numbers, ends, tokens, places), stream)

    def gather(self, x: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, stream: int, dependent: bool) -> None:
        """Write ``rows[r] = x[tokens[r]]``, both (..., K)."""
        vectors = x.shape[1] // VECTOR
        arguments = (x, tokens, vectors, rows)
        self._launch("moe_gather", (len(rows), 1, 1), _threads(vectors), 0, arguments, stream, dependent)

    def combine(
        self, y: torch.Tensor, places: torch.Tensor, scores: torch.Tensor, out: torch.Tensor, stream: int,
        dependent: bool,
    ) -> None:  # fmt: skip
        """Write ``out[t]``, the sum over j of ``scores[t, j] * y[places[t, j]]`` in fp32; out is (tokens, K)."""
        tokens, vectors = out.shape[0], out.shape[1] // VECTOR
        threads = _threads(vectors)
        grid = (tokens, ceil_div(vectors, threads), 1)
        arguments = (y, places, scores, scores.shape[1], vectors, out)
        self._launch("moe_combine", grid, threads, 0, arguments, stream, dependent)

    def _launch(
        self, name: str, grid: tuple[int, int, int], threads: int, smem: int, arguments: tuple[Any, ...], stream: int,
        dependent: bool = False,
    ) -> None:  # fmt: skip
        configs = StreamConfigs(lambda: launch_config(grid, (threads, 1, 1), smem, None, dependent))
        params: list[Any] = [
            ctypes.c_int(each) if isinstance(each, int) else ctypes.c_void_p(each.data_ptr()) for each in arguments
        ]
        KernelCall(self._functions[name], configs, params, (), ())(stream)


def _threads(vectors: int) -> int:
    return min(_THREADS, ceil_div(vectors, 32) * 32)
