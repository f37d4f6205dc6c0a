"""``outblas eval``: prove and time one problem against every baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outblas.cli import common
from outblas.cli.common import AccOption, DtypeOption, GpuOption, LayoutOption, QpsOption, number, out
from outblas.core.lab_parts import part
from outblas.core.problem import Problem


def evaluate(
    mnk: Annotated[str, typer.Option(help="Problem size M_N_K, e.g. 64_4096_64.")],
    acc: AccOption = "fp32",
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    mode: Annotated[
        str, typer.Option(help="Timing mode: offline (GPU time per call) or server (latency with Poisson arrivals).")
    ] = "offline",
    warmup_seconds: Annotated[float, typer.Option(help="Warm-up time in seconds.")] = 5.0,
    benchmark_seconds: Annotated[float, typer.Option(help="Measurement time in seconds.")] = 10.0,
    base_dir: Annotated[Path, typer.Option(help="Directory for the JSON result file.")] = Path("./results"),
    device: GpuOption = "cuda:0",
    gpu_device_id: Annotated[int | None, typer.Option(hidden=True)] = None,  # CUDA-L2 has it
    target_qps: QpsOption = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="File with a free kernel (see docs/judge/free-kernels.md). Without a GPU, the kernel is only compiled."
        ),
    ] = None,
) -> None:
    """Prove a problem's kernel, then time the kernel and all baselines in random, interleaved order (needs a GPU)."""
    problem = Problem.from_mnk(mnk, layout, dtype, acc)
    common.folder("--base-dir", base_dir)
    device = device if gpu_device_id is None else f"cuda:{gpu_device_id}"
    if file is not None:
        common.check_mode(mode, target_qps, ("offline",))
        part("eval-file", "--file")(problem, file, base_dir, device)
        return
    common.check_mode(mode, target_qps, ("offline", "server"))
    common.positive("--warmup-seconds", warmup_seconds, or_zero=True)
    common.positive("--benchmark-seconds", benchmark_seconds)
    gpu = common.gpu_index(device)

    from outblas.tune.eval_problem import run_eval

    with common.err.status(f"{problem.key}: proving, then timing for about {benchmark_seconds:g} s ..."):
        result = run_eval(problem, mode, target_qps, warmup_seconds, benchmark_seconds, base_dir, gpu)
    answer(problem, result)


def answer(problem: Problem, result: Mapping[str, Any]) -> None:
    """Print a result as text, or as a JSON document."""
    show(problem, result)
    if not common.wants_json():
        return
    from outblas.cli.documents import EvalDocument, EvalRow

    known = EvalRow.model_fields
    rows = [EvalRow(**{k: v for k, v in row.items() if k in known}) for row in result.get("rows", ())]
    facts = {key: value for key, value in result.items() if key not in ("rows", "problem")}
    common.print_document(EvalDocument(problem=problem.key, rows=rows, facts=facts))


def show(problem: Problem, result: Mapping[str, Any]) -> None:
    """Print the result of ``run_eval`` on stdout: the problem's key, ``rows`` as a table, and details below.

    Every other entry is a line ``key: value``. Entries that are None, empty or containers are left out. A row is a
    mapping; columns are taken from :data:`COLUMNS` in that order where any row has them.
    """
    rows: Sequence[Mapping[str, Any]] = result.get("rows", ())
    out.print(f"{problem.key}", markup=False)
    if rows:
        common.print_table(_table(rows))
        for row in rows:  # too long for a column
            if row.get("detail"):
                out.print(f"  {row['name']}: {row['detail']}", markup=False, highlight=False, soft_wrap=True)
    for key, value in result.items():
        if key != "rows" and not isinstance(value, (dict, list, tuple)) and value not in (None, ""):
            out.print(f"{key}: {value}", markup=False)


#: Row key -> (heading, digits; None for text).
COLUMNS: dict[str, tuple[str, int | None]] = {
    "name": ("callable", None), "us": ("µs", 3), "p50_us": ("p50 µs", 2), "p99_us": ("p99 µs", 2),
    "tflops": ("TFLOP/s", 1), "floor_percent": ("% of floor", 1), "speedup": ("speedup", 3),
    "low": ("95% from", 3), "high": ("to", 3), "spread": ("spread", 3),
}  # fmt: skip


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    for key in shown:
        heading, digits = COLUMNS[key]
        table.add_column(heading, justify="left" if digits is None else "right", no_wrap=key == "name")
    for row in rows:
        cells = []
        for key in shown:
            digits, value = COLUMNS[key][1], row.get(key)
            cells.append(number(value, digits) if digits is not None else str(value or ""))
        table.add_row(*cells)
    return table
