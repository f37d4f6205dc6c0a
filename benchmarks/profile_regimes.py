"""Question: which hardware counters do OutBLAS and autotuned cuBLASLt show, in each regime?

Command:

    python benchmarks/profile_regimes.py [--out results/<gpu>/ncu.json] [--ncu PATH]
    python tools/published_pages.py --write        # the table of docs/kernels/cost-model.md, from that file

Result file: results/<gpu>/ncu.json. Needs a GPU and Nsight Compute.

Two problems of each regime are profiled.

OutBLAS stands with the kernel of the packaged library's row, without PDL. If the row falls back, the ranking model's
first choice takes its place. It is proved first. cuBLASLt's algorithm is chosen by the offline clock, without ncu.
Then ncu starts outblas_lab.pool.ncu_target, which launches every kernel twice and has the second launch profiled.
Without a working ncu the exit status is 1, and nothing is written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import DeviceError, OutblasError
from outblas.core.files import write_atomic
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO
from outblas.core.roofline import Gpu, regime
from outblas.judge.baselines import LtAuto
from outblas.kernels.catalogue import candidates
from outblas.kernels.config_text import config_from_name
from outblas.kernels.cost.cost_model import rank
from outblas.records.library import Library
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.runtime.device import gpu_of_device
from outblas_lab.pool import ncu
from outblas_lab.pool.counter_file import FORMAT, OURS
from outblas_lab.pool.ncu_target import ProfiledAlgorithm, Profiler, ProfileWork, cache_of

#: Regime -> two problems of it (TN, fp16).
REGIMES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "launch": ((64, 64, 4096), (1024, 1024, 64)),
    "memory, 10⁹ FLOP": ((64, 4096, 4096), (8192, 8192, 64)),
    "compute, 10⁹–10¹⁰ FLOP": ((2048, 2048, 512), (4096, 4096, 512)),
    "≥ 10¹¹ FLOP": ((4096, 4096, 4096), (4096, 8192, 8192)),
}


def choose(problem: Problem, library: Library, gpu: Gpu) -> tuple[KernelConfig, str]:
    """Our kernel for a problem without PDL, and who chose it: ``library`` or ``model``."""
    row = library.lookup(problem)
    if row is not None and row.plain is not None:
        return row.plain.config, "library"
    offered = [c for c in candidates(problem, gpu) if not c.pdl]
    return offered[int(rank(problem, offered, gpu)[0])], "model"


def plan(gpu: Gpu) -> list[dict[str, Any]]:
    """Return the profiled kernels of every problem as JSON: the library's, proved, and cuBLASLt's chosen algorithm."""
    library = Library.packaged(gpu.name)
    items = []
    for group, shapes in REGIMES.items():
        for problem in (Problem(*shape) for shape in shapes):
            config, chosen_by = choose(problem, library, gpu)
            algo, detail = _prepare(problem, config, gpu)
            item = {"group": group, "problem": problem.key, "regime": regime(problem, gpu)}
            item |= {"config": config_name(config), "chosen_by": chosen_by, "l2": cache_of(problem, gpu)}
            items.append({**item, "algo": algo.hex(), "detail": detail})
            print(f"{problem.key}: {config_name(config)} ({chosen_by}) beside {detail}", flush=True)
    return items


def _prepare(problem: Problem, config: KernelConfig, gpu: Gpu) -> tuple[bytes, str]:
    """Prove ours; choose cuBLASLt's algorithm."""
    from outblas.core.evaluation import Status
    from outblas.judge.gates import CellProver
    from outblas.judge.gpu_clock import GpuClock
    from outblas.runtime.kernel_loader import load_kernel

    theirs = LtAuto()
    with GpuClock(problem, gpu=gpu) as bench:
        ours, _ = load_kernel(problem, config)
        verdict = CellProver(bench.data, bench.torch_stream).call(ours.bind(problem, *bench.operands(0)))
        if verdict.status is not Status.PASSED:
            raise DeviceError(f"{ours.name} on {problem.key}: {verdict.detail}", "a right result", "do not profile it")
        theirs.prepare(bench)
    return theirs.choice(problem)


def works_of(items: list[dict[str, Any]]) -> list[ProfileWork]:
    """Ours and theirs of every item, to be profiled."""
    return [
        ProfileWork(
            Problem.from_key(item["problem"]),
            (config_from_name(item["config"]), ProfiledAlgorithm(bytes.fromhex(item["algo"]), item["detail"])),
            item["l2"],
        )
        for item in items
    ]


def rows_of(items: list[dict[str, Any]], found: list[list[list[ncu.ProfiledLaunch]]]) -> list[dict[str, Any]]:
    """Two rows per item, ours and theirs, with all the kernels that each launched (``found``: per item and side)."""
    rows = []
    for item, sides in zip(items, found, strict=True):
        head = {key: item[key] for key in ("group", "problem", "regime", "l2")}
        for side, kernels in zip((OURS, LT_AUTO), sides, strict=True):
            mine = side == OURS
            name, by = (item["config"], item["chosen_by"]) if mine else (item["detail"], "autotuned")
            rows.append(
                {**head, "side": side, "name": name, "chosen_by": by, "kernels": list(map(ncu.figures, kernels))}
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=result_file("ncu.json"))
    parser.add_argument("--ncu", metavar="PATH", help="Nsight Compute's command line; by default it is looked for")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run of ncu (default 300)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave ncu's own output (CSV) there")
    options = parser.parse_args()
    try:
        tool = ncu.find_ncu(options.ncu)
        with contextlib.ExitStack() as stack:
            scratch = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outblas-ncu-")))
            scratch.mkdir(parents=True, exist_ok=True)
            profiler = Profiler(tool, scratch, options.timeout)
            items = plan(gpu_of_device(0))
            rows = rows_of(items, profiler.kernels(works_of(items)))
        provenance = {**collect_provenance(script_command("benchmarks/profile_regimes.py")), "ncu": ncu.version(tool)}
        absent = [m for m in ncu.METRICS if m not in profiler.metrics]
        result = {"format": FORMAT, "provenance": provenance, "metrics_absent": absent, "rows": rows}
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        print(f"written: {write_atomic(options.out, text.encode())}; now run: python tools/published_pages.py --write")
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
