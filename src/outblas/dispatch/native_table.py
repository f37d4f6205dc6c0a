"""The process's one native table (:mod:`outblas.runtime.native`): opened by the first product, asked by every later
one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outblas.dispatch.call_option import OPTIONS, call_option
from outblas.dispatch.guarantees.guarantee import process_guarantee
from outblas.runtime.native import open_table, tracing_check

if TYPE_CHECKING:
    import torch

#: The table. None: it is not open yet, or it cannot be had, for the reason in :data:`why_no_table`.
table: Any = None
why_no_table = ""
#: What a product asks first: ``table.matmul``, or the same with the process's guarantee. None: there is no table.
table_matmul: Callable[..., Any] | None = None
#: Torch's word on whether it traces a call, which must then not see the table.
is_compiling: Callable[[], bool] = bool


def table_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``a @ b`` by the native table; None if the table does not know the call or must not see it."""
    return None if table_matmul is None or is_compiling() else table_matmul(a, b, out, None)


def open_once() -> None:
    """Open the table at the first call, or record the reason why it cannot be opened.

    The caller holds the devices' lock.
    """
    global why_no_table
    if table is not None or why_no_table:
        return
    made, why_no_table = open_table()
    if made is not None:
        replace_table(made)


def replace_table(new: Any) -> None:
    """Let products ask another table; None: the next product that is decided opens one, unless none can be had.

    Args:
        new: a table of :func:`outblas.runtime.native.open_table`, or None.
    """
    global table, table_matmul, is_compiling
    table = new
    if new is None:
        table_matmul = None
        return
    is_compiling = tracing_check()
    follow_guarantee()


def follow_guarantee() -> None:
    """Let products ask the table for the process's guarantee; without one they ask it directly."""
    global table_matmul
    if table is not None:
        table_matmul = table.matmul if process_guarantee() == "none" else _guaranteed_matmul


def _guaranteed_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, code: int | None) -> Any:
    option = call_option() if code is None else OPTIONS[code].at_least(process_guarantee())
    return table.matmul(a, b, out, option.code)


def clear_table() -> None:
    if table is not None:
        table.forget()


def host_path() -> str:
    """Return the host path of repeated calls: ``native`` with its counts, or ``python`` and the reason.

    Example: ``python: no product was asked for yet`` in a new process.
    """
    if table is not None:
        return "native: {remembered} calls remembered, read by {reads_by}, {launches} launched".format(**table.counts())
    return f"python: {why_no_table or 'no product was asked for yet'}"
