"""Question: how fast is the best of CUTLASS 3.x on each problem, beside ours and the baselines?

Command:

    python benchmarks/cutlass_peer.py compile [--carried build/cutlass_peer]   # anywhere with nvcc, no GPU
    python benchmarks/cutlass_peer.py measure [--carried build/cutlass_peer]   # on a GPU

Result file: results/<gpu>/cutlass_peer.json; `tools/published_pages.py` puts a line of it under the published table.

60 problems of grid1000 TN fp16 are taken, stratified by regime. Every instance is proved in full once, on a ragged
problem, and on the timed operands of each problem. A quick pass finds the fastest instance of those that passed. It is
then timed in the same interleaved rounds as the library's kernel for plain launches and every baseline.
CUTLASS thus stands for a careful user who tries all of these instances on each problem. The kernel of OutBLAS is the
one that the library names; none is tried. Where it names none, its fall-back is timed. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from figures.rival_files import CUTLASS_FORMAT, cutlass_means
from rivals.bound_rivals import load_instances
from rivals.carried_builds import CarriedBuilds
from rivals.compile_jobs import compile_jobs, set_patience
from rivals.fall_back import fall_back
from rivals.journaled_rows import journaled_rows
from rivals.peer_arguments import peer_parser, peer_provenance
from rivals.proofs import passed, unproved, why_not
from rivals.timed_entries import time_entries

from outblas.core.config import config_name
from outblas.core.errors import CompileError, OutblasError
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS, fastest_baseline
from outblas.core.roofline import regime
from outblas.core.suites import sample, suite
from outblas.judge.baselines import make_baselines
from outblas.judge.rounds import speedup
from outblas.records.library import Library
from outblas.records.results import result_file
from outblas_lab.custom.templates.fill import CutlassSm90

H200 = packaged_gpu("h200")

#: What CUTLASS' own profiler would try first on Hopper: the usual tiles, with and without clusters and stream-K.
INSTANCES = (
    CutlassSm90((64, 64, 64), (1, 1), "pingpong"),
    CutlassSm90((64, 64, 64), (1, 1), "warp_specialized"),
    CutlassSm90((64, 64, 128), (1, 1), "warp_specialized"),
    CutlassSm90((64, 128, 64), (1, 1), "pingpong"),
    CutlassSm90((64, 128, 64), (2, 1), "pingpong"),
    CutlassSm90((64, 128, 64), (1, 2), "pingpong"),
    CutlassSm90((64, 128, 128), (1, 1), "warp_specialized"),
    CutlassSm90((64, 256, 64), (1, 1), "pingpong"),
    CutlassSm90((64, 256, 64), (2, 1), "pingpong"),
    CutlassSm90((128, 64, 64), (1, 1), "pingpong"),
    CutlassSm90((128, 64, 64), (1, 2), "cooperative"),
    CutlassSm90((128, 64, 64), (1, 1), "cooperative", scheduler="stream_k"),
    CutlassSm90((128, 128, 64), (1, 1), "pingpong"),
    CutlassSm90((128, 128, 64), (2, 1), "pingpong"),
    CutlassSm90((128, 128, 64), (1, 1), "cooperative"),
    CutlassSm90((128, 128, 64), (2, 1), "cooperative"),
    CutlassSm90((128, 128, 64), (1, 1), "cooperative", scheduler="stream_k"),
    CutlassSm90((128, 128, 64), (2, 1), "cooperative", scheduler="stream_k"),
    CutlassSm90((128, 256, 64), (1, 1), "cooperative"),
    CutlassSm90((128, 256, 64), (2, 1), "cooperative"),
    CutlassSm90((128, 256, 64), (1, 2), "cooperative"),
    CutlassSm90((128, 256, 64), (2, 1), "cooperative", scheduler="stream_k"),
    CutlassSm90((256, 128, 64), (1, 1), "cooperative"),
    CutlassSm90((256, 128, 64), (2, 1), "cooperative"),
)
#: Of the full proof: no extent is whole tiles of any instance.
RAGGED = Problem(200, 264, 328)
COUNT, SEED, ROUNDS = 60, 0, 11


def compile_all(carried: CarriedBuilds, jobs: int) -> dict[str, str]:
    """Compile every instance to the folder; return name -> reason of those that the compiler refused."""

    def compiled(instance: CutlassSm90) -> str:
        return f"{carried.build(instance.kernel(), RAGGED).cubin.registers} registers"

    return compile_jobs({each.name: functools.partial(compiled, each) for each in INSTANCES}, jobs)


class Peer:
    """Everything that is loaded once: instances, our kernels, baselines."""

    def __init__(self, carried: CarriedBuilds, scratch: str, problems: Sequence[Problem]) -> None:
        from outblas.runtime.device import gpu_of_device

        self.gpu = gpu_of_device(0)
        built = {i.name: carried.build(i.kernel(), RAGGED) for i in INSTANCES}
        self.cutlass = load_instances(built, scratch, self.gpu)
        self.left_out = unproved(self.cutlass, RAGGED)
        self.baselines = make_baselines(0, RIVALS)
        library = Library.packaged(self.gpu.name)
        self.rows = {problem: library.lookup(problem) for problem in problems}
        self.ours = {p: row.choice("plain") if row else None for p, row in self.rows.items()}
        self._compile_ours(problems)

    def _compile_ours(self, problems: Sequence[Problem]) -> None:
        """Fill the compile cache on all cores."""
        from outblas.kernels.source import make_source
        from outblas.runtime.nvrtc import compile_many

        for _ in compile_many([make_source(p, c.config) for p in problems if (c := self.ours[p]) is not None]):
            pass

    def measure(self, problem: Problem) -> dict[str, Any]:
        """Return one row: the best instance, the library's kernel and the baselines in the same rounds."""
        from outblas.judge.gates import CellProver
        from outblas.judge.gpu_clock import GpuClock

        choice = self.ours[problem]
        with GpuClock(problem, 0, seed=SEED + 1, gpu=self.gpu) as bench:
            prover = CellProver(bench.data, bench.torch_stream)
            refused = dict(self.left_out)
            right = passed(self.cutlass, problem, bench, prover, refused)
            quick = {name: timing.median_us for name, timing in bench.quick(right, skip=OutblasError).items()}
            entries: dict[str, Any] = dict(self.baselines)
            if quick:
                entries["cutlass"] = right[min(quick, key=lambda name: quick[name])]
            if choice is None:
                entries["ours"] = fall_back(problem, self.rows[problem])
            else:
                entries["ours"] = self._load_ours(problem, choice.config)
                reason = why_not(entries["ours"], problem, bench, prover)
                if reason:
                    raise CompileError(f"our kernel on {problem.key}: {reason}", "one that is right", "look at it")
            timings = time_entries(bench, entries, ROUNDS, SEED)
        for kernel in self.cutlass.values():
            kernel.release()  # the workspaces of this problem
        return self._row(problem, choice, timings, quick, refused)

    @staticmethod
    def _load_ours(problem: Problem, config: Any) -> Any:
        from outblas.runtime.kernel_loader import load_kernel

        return load_kernel(problem, config)[0]

    def _row(
        self, problem: Problem, choice: Any, timings: Mapping[str, Any], quick: Mapping[str, float],
        refused: Mapping[str, str],
    ) -> dict[str, Any]:  # fmt: skip
        us = {name: timing.median_us for name, timing in timings.items()}
        best = fastest_baseline({name: us[name] for name in RIVALS if name in us})
        row: dict[str, Any] = {
            "problem": problem.key,
            "regime": regime(problem, self.gpu),
            "baseline": best,
            "us": us,
            "instance": min(quick, key=lambda name: quick[name]) if quick else None,
            "quick_us": dict(quick),
            "refused": dict(refused),
            "config": config_name(choice.config) if choice else None,
        }
        for name in ("cutlass", "ours"):
            row[name] = dict(vars(speedup(timings, name, RIVALS))) if name in timings else None
        if "cutlass" in timings:
            row["ours_over_cutlass"] = dict(vars(speedup(timings, "ours", ("cutlass",))))
        return row


def measure(arguments: argparse.Namespace) -> None:
    """All problems that the journal does not have, then the result file."""
    from outblas.kernels.kernel_hash import kernels_sha
    from outblas.runtime.device import gpu_of_device

    problems = sample(suite("grid1000"), arguments.count, SEED, gpu=H200)
    settings = {
        "problems": [p.key for p in problems], "instances": [i.kernel().name for i in INSTANCES], "rounds": ROUNDS,
        "library": Library.packaged(gpu_of_device(0).name).sha(), "kernels": kernels_sha(),
    }  # fmt: skip

    def rows_of(keys: list[str]) -> Iterator[dict[str, Any]]:
        todo = [problem for problem in problems if problem.key in keys]
        with tempfile.TemporaryDirectory() as scratch:
            peer = Peer(CarriedBuilds(arguments.carried, H200), scratch, todo)
            yield from map(peer.measure, todo)

    def content(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "format": CUTLASS_FORMAT,
            "provenance": peer_provenance(arguments, "benchmarks/cutlass_peer.py"),
            "instances": [instance.name for instance in INSTANCES],
            "rows": rows,
        }

    keys = [problem.key for problem in problems]
    rows = journaled_rows(arguments.out, settings, keys, rows_of, _line, content)
    for name, value in cutlass_means(rows).items():
        print(f"{name.replace('_', ' ')}: {value:.3f}")


def _line(row: Mapping[str, Any]) -> str:
    cutlass = f"{row['cutlass']['ratio']:.3f} ({row['instance']})" if row["cutlass"] else "none passed"
    ours = f"{row['ours']['ratio']:.3f}{'' if row['config'] else ' (falls back)'}"
    return (
        f"{row['problem']}: CUTLASS {cutlass}, ours {ours}, over {row['baseline']} {row['us'][row['baseline']]:.2f} us"
    )


def main() -> None:
    parser = peer_parser(__doc__, "build/cutlass_peer", result_file("cutlass_peer.json"), COUNT)
    arguments = parser.parse_args()
    set_patience(arguments.patience)
    try:
        if arguments.step == "compile":
            sys.exit(1 if compile_all(CarriedBuilds(arguments.carried, H200), arguments.jobs) else 0)
        measure(arguments)
    except OutblasError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
