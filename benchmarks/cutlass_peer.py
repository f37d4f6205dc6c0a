"""Question: how fast is the best of CUTLASS 3.x on each problem, beside ours and the baselines?

Command:

    python benchmarks/cutlass_peer.py compile [--carried build/cutlass_peer]   # anywhere with nvcc, no GPU
    python benchmarks/cutlass_peer.py measure [--carried build/cutlass_peer]   # on a GPU

Result file: results/h200/cutlass_peer.json; `outblas results --write` puts a line of it under the published table.

60 problems of grid1000 TN fp16 are taken, stratified by regime. Every instance is proved in full once, on a ragged
problem, and on the timed operands of each problem. A quick pass finds the fastest instance of those that passed. It is
then timed in the same interleaved rounds as the library's kernel for plain launches and every baseline.
CUTLASS thus stands for a careful user who tries all of these instances on each problem. The kernel of OutBLAS is the
one that the library names; none is tried. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outblas.core.config import config_name
from outblas.core.errors import CompileError, OutblasError
from outblas.core.evaluation import Status
from outblas.core.files import write_json
from outblas.core.gpu_records import packaged_gpu
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS, fastest_baseline
from outblas.core.roofline import regime
from outblas.core.suites import sample, suite
from outblas.jail import build as free_build
from outblas.jail.carried_builds import CarriedBuilds
from outblas.judge.baselines import make_baselines
from outblas.judge.rounds import speedup
from outblas.kernels.custom.templates.fill import CutlassSm90
from outblas.publish.tables.notes import CUTLASS_FORMAT, cutlass_means
from outblas.records.library import Library
from outblas.records.provenance import collect_provenance

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


def compile_all(carried: CarriedBuilds) -> int:
    """Every instance to the folder; how many the compiler refused."""
    begun, failed = time.perf_counter(), 0
    for done, instance in enumerate(INSTANCES, 1):
        try:
            word = f"{carried.build(instance.kernel(), RAGGED).cubin.registers} registers"
        except CompileError as error:
            word, failed = f"refused: {error.wrong}", failed + 1
        left = (time.perf_counter() - begun) / done * (len(INSTANCES) - done)
        print(f"[{done}/{len(INSTANCES)}, {left:.0f} s left] {instance.name}: {word}", flush=True)
    return failed


class Peer:
    """Everything that is loaded once: instances, our kernels, baselines."""

    def __init__(self, carried: CarriedBuilds, scratch: str, problems: Sequence[Problem]) -> None:
        from outblas.jail.free_launch import load
        from outblas.runtime.device import gpu_of_device

        self.gpu = gpu_of_device(0)
        self.cutlass = {i.name: load(carried.build(i.kernel(), RAGGED), scratch, None, self.gpu) for i in INSTANCES}
        self.left_out = self._unproved()
        self.baselines = make_baselines(0, RIVALS)
        library = Library.packaged(self.gpu.name)
        rows = {problem: library.lookup(problem) for problem in problems}
        self.ours = {p: row.choice("plain") if row else None for p, row in rows.items()}
        self._compile_ours(problems)

    def _unproved(self) -> dict[str, str]:
        """Name -> reason of instances that fail the full proof, which then take no part."""
        from outblas.judge.gates import prove

        found = {}
        for name, kernel in self.cutlass.items():
            verdict = prove(kernel, RAGGED, None, "full")
            if verdict.status is not Status.PASSED:
                found[name] = f"{verdict.status.value}: {verdict.detail}"
                print(f"{name} takes no part: {found[name]}", flush=True)
        return found

    def _compile_ours(self, problems: Sequence[Problem]) -> None:
        """Fill the compile cache on all cores."""
        from outblas.kernels.source import make_source
        from outblas.runtime.nvrtc import compile_many

        for _ in compile_many([make_source(p, c.config) for p in problems if (c := self.ours[p]) is not None]):
            pass

    def measure(self, problem: Problem) -> dict[str, Any]:
        """Return one row: the best instance, the library's kernel and the baselines in the same rounds."""
        from outblas.judge.gates import CellProver
        from outblas.judge.gpu_clock import GpuClock, choose_algorithm

        choice = self.ours[problem]
        with GpuClock(problem, 0, seed=SEED + 1, gpu=self.gpu) as bench:
            prover = CellProver(bench.data, bench.torch_stream)
            refused, passed = dict(self.left_out), {}
            for name, kernel in self.cutlass.items():
                if name not in refused:
                    reason = self._why_not(kernel, problem, bench, prover)
                    if reason:
                        refused[name] = reason
                    else:
                        passed[name] = kernel
            quick = {name: timing.median_us for name, timing in bench.quick(passed, skip=OutblasError).items()}
            entries: dict[str, Any] = dict(self.baselines)
            if quick:
                entries["cutlass"] = passed[min(quick, key=lambda name: quick[name])]
            if choice is not None:
                entries["ours"] = self._load_ours(problem, choice.config)
                reason = self._why_not(entries["ours"], problem, bench, prover)
                if reason:
                    raise CompileError(f"our kernel on {problem.key}: {reason}", "one that is right", "look at it")
            timings = self._rounds(bench, entries, choose_algorithm)
        for kernel in self.cutlass.values():
            kernel.release()  # the workspaces of this problem
        return self._row(problem, choice, timings, quick, refused)

    def _rounds(self, bench: Any, entries: Mapping[str, Any], prepare: Any) -> dict[str, Any]:
        graphs = {}
        try:
            for name, entry in entries.items():
                prepare(entry, bench)
                graphs[name] = bench.capture(entry)
            return dict(bench.measure(graphs, ROUNDS, SEED))
        finally:
            for graph in graphs.values():
                graph.free()

    @staticmethod
    def _load_ours(problem: Problem, config: Any) -> Any:
        from outblas.dispatch.device_state import load_kernel

        return load_kernel(problem, config)[0]

    @staticmethod
    def _why_not(kernel: Any, problem: Problem, bench: Any, prover: Any) -> str:
        """Return the reason why a kernel is not timed on the problem; empty if it is right on the timed operands."""
        try:
            verdict = prover.call(kernel.bind(problem, *bench.operands(0)))
        except OutblasError as error:
            return str(error)
        if getattr(kernel, "broken_workspace", bool)():
            return "it wrote past its workspace"
        return "" if verdict.status is Status.PASSED else f"{verdict.status.value}: {verdict.detail}"

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
            other = "ours" if "ours" in timings else best  # where the library has no kernel, ours is the baseline
            row["ours_over_cutlass"] = dict(vars(speedup(timings, other, ("cutlass",))))
        return row


def measure(arguments: argparse.Namespace) -> None:
    """All problems that the journal does not have, then the result file."""
    from outblas.kernels.kernel_hash import kernels_sha

    problems = sample(suite("grid1000"), arguments.count, SEED, gpu=H200)
    settings = {
        "problems": [p.key for p in problems], "instances": [i.kernel().name for i in INSTANCES], "rounds": ROUNDS,
        "library": Library.packaged("h200").sha(), "kernels": kernels_sha(),
    }  # fmt: skip
    journal = Journal(arguments.out.with_name(arguments.out.name + ".jsonl"), settings)
    written = False
    try:
        known = {entry["problem"] for entry in journal.entries}
        todo = [p for p in problems if p.key not in known]
        if todo:
            with tempfile.TemporaryDirectory() as scratch:
                peer, begun = Peer(CarriedBuilds(arguments.carried, H200), scratch, todo), time.perf_counter()
                for done, problem in enumerate(todo, 1):
                    journal.append(peer.measure(problem))
                    left = (time.perf_counter() - begun) / done * (len(todo) - done)
                    print(f"[{done}/{len(todo)}, {left:.0f} s left] {_line(journal.entries[-1])}", flush=True)
        rows = sorted(journal.entries, key=lambda row: settings["problems"].index(row["problem"]))  # type: ignore[attr-defined]
        data = {
            "format": CUTLASS_FORMAT,
            "provenance": {
                **collect_provenance("benchmarks/cutlass_peer.py measure"),
                "cutlass": arguments.cutlass or _version(),
            },
            "instances": [instance.name for instance in INSTANCES],
            "rows": rows,
        }
        write_json(arguments.out, data)
        written = True
    finally:
        journal.close(done=written)
    for name, value in cutlass_means(rows).items():
        print(f"{name.replace('_', ' ')}: {value:.3f}")


def _version() -> str | None:
    """CUTLASS' version where its headers are installed; a machine that only measures may have none."""
    from outblas.core.errors import ToolchainMissing
    from outblas.jail.toolchain import locate_cutlass

    try:
        return locate_cutlass()[1]
    except ToolchainMissing:
        return None


def _line(row: Mapping[str, Any]) -> str:
    cutlass = f"{row['cutlass']['ratio']:.3f} ({row['instance']})" if row["cutlass"] else "none passed"
    ours = f"{row['ours']['ratio']:.3f}" if row["ours"] else "falls back"
    return (
        f"{row['problem']}: CUTLASS {cutlass}, ours {ours}, over {row['baseline']} {row['us'][row['baseline']]:.2f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("compile", "measure"))
    parser.add_argument("--carried", type=Path, default=Path("build/cutlass_peer"), help="folder of compiled instances")
    parser.add_argument("--count", type=int, default=COUNT, help="problems")
    parser.add_argument("--out", type=Path, default=Path("results/h200/cutlass_peer.json"))
    parser.add_argument("--patience", type=float, help="seconds that a compilation may take, on a busy machine")
    parser.add_argument("--cutlass", help="CUTLASS' version, where it was compiled elsewhere")
    arguments = parser.parse_args()
    if arguments.patience:  # the package's own texts, whose compilation needs no short limit
        free_build.CUTLASS_LIMITS = replace(free_build.CUTLASS_LIMITS, seconds=arguments.patience)
    try:
        if arguments.step == "compile":
            sys.exit(1 if compile_all(CarriedBuilds(arguments.carried, H200)) else 0)
        measure(arguments)
    except OutblasError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
