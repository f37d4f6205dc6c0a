"""Question: which cheats does the clock of free kernels see, and how far does it move honest figures?

Command:

    python benchmarks/judged_clock.py honest     # speed-ups by both clocks.
    python benchmarks/judged_clock.py cheats     # each cheat with its defence off and on.
    python benchmarks/judged_clock.py finds      # wrong results found, honest ones refused.

Each needs a GPU, and compiled kernels in ``--carried``, which ``--compile-only`` fills anywhere.

Result file: results/<gpu>/judged_clock.json, one key per command; a command replaces its own. ``cheats`` runs each
cheat in a process of its own, for one that faults takes its process with it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from rivals.carried_builds import CarriedBuilds

from outblas.core.errors import OutblasError
from outblas.core.evaluation import GateFailed
from outblas.core.files import write_json
from outblas.core.gpu_records import packaged_gpu
from outblas.core.phase_times import PhaseTimer
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas_lab.custom.examples.example_kernels import all_examples
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import build as free_build

PHASES = Path(__file__).parents[1] / "tests" / "adversarial" / "phases"
#: Problems of the honest kernels; of the cheats.
HONEST = (
    "64_64_64", "128_128_4096", "256_256_256", "512_512_512", "1024_1024_1024", "16_4096_4096", "64_4096_4096",
    "128_8192_1024", "256_4096_1024", "384_768_3072", "512_4096_512", "1024_512_2048", "2048_1024_1024",
    "2048_2048_512", "2048_2048_2048", "4096_512_4096", "1024_4096_4096", "4096_4096_1024", "4096_4096_4096",
    "8192_1024_8192",
)  # fmt: skip
CHEATED = Problem(512, 512, 512)
ROUNDS, HOPELESS = 15, 8.0
#: Honest kernels of a problem.
EACH = 4


def phases() -> dict[str, str]:
    """Return name -> text of the cheats that tell one launch from another."""
    return {path.stem: path.read_text() for path in sorted(PHASES.glob("*.cu"))}


def header(text: str, key: str) -> str:
    """Return what a line ``// key: ...`` of a cheat says."""
    return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith(f"// {key}:"))


def honest_version(text: str) -> FreeKernel:
    return FreeKernel.parse(text.replace("#define CHEAT 1", "#define CHEAT 0"))


def honest(carried: CarriedBuilds) -> dict[str, Any]:
    """Time four examples a problem by both clocks, in the same process and with the rivals in their rounds."""
    rows: list[dict[str, Any]] = []
    for number, mnk in enumerate(HONEST):
        problem = Problem(*map(int, mnk.split("_")))
        with _Cell(problem) as cell:
            kernels = {n: k for n, k in all_examples().items() if k.launch.why_not(problem, cell.gpu) is None}
            names = sorted(kernels)
            chosen = {names[(number * EACH + step) % len(names)] for step in range(EACH)}
            rows += cell.both_clocks({name: cell.load(carried.build(kernels[name], problem)) for name in chosen})
        here = [row for row in rows if row["problem"] == problem.key and row.get("moved") is not None]
        print(mnk, " ".join(f"{row['kernel']} {row['moved']:.3f}" for row in here), flush=True)
    moved = [row["moved"] for row in rows if row.get("moved") is not None]
    apart = sorted(abs(math.log(x)) for x in moved)
    return {
        "rows": rows,
        "count": len(moved),
        "within_3_percent": sum(x <= math.log(1.03) for x in apart),
        "median_move": math.expm1(median(apart)),
        "refused": [row for row in rows if row["failure"]],
    }


class _Cell:
    """Operands, rivals and clocks of a problem in this process."""

    def __init__(self, problem: Problem) -> None:
        from outblas.judge.baselines import make_baselines
        from outblas.judge.bench_cell import BenchCell, Options
        from outblas.runtime.device import gpu_of_device

        self.gpu = gpu_of_device(0)
        self.options = Options(0, self.gpu, rounds=ROUNDS, baselines=RIVALS, drop_beyond=HOPELESS)
        self.cell = BenchCell(problem, self.options, make_baselines(0, RIVALS), PhaseTimer("bench"))
        self.problem, self._folder = problem, tempfile.TemporaryDirectory()

    def __enter__(self) -> _Cell:
        return self

    def __exit__(self, *_: object) -> None:
        self.cell.close()
        self._folder.cleanup()

    def load(self, built: Any) -> Any:
        from outblas_lab.jail.free_launch import load

        return load(built, self._folder.name, None, self.gpu)

    def judged(self, kernels: dict[str, Any], defences: Any = None, rounds: int = ROUNDS) -> tuple[dict, dict, float]:
        """Return timings, entries and the seconds of the clock that judges."""
        from outblas_lab.jail.fresh_operands import FreshOperands
        from outblas_lab.jail.judged_clock import JudgedClock, JudgedEntry

        begun = time.perf_counter()
        entries = {name: JudgedEntry(kernel) for name, kernel in kernels.items()}
        clock = JudgedClock(self.cell.bench, FreshOperands(self.problem, self.cell.bench.repeats, "cuda:0"), defences)
        prune = self.cell.prune(self.options, dict.fromkeys(entries, "plain"))
        found = clock.measure(self.cell.entries, entries, self.options, rounds, prune)
        return found, entries, time.perf_counter() - begun

    def both_clocks(self, kernels: dict[str, Any]) -> Iterator[dict[str, Any]]:
        from outblas.judge.rounds import speedup

        begun = time.perf_counter()
        graphs = {name: self.cell.bench.capture(kernel) for name, kernel in kernels.items()}
        prune = self.cell.prune(self.options, dict.fromkeys(kernels, "plain"))
        plain = self.cell.measure({**self.cell.graphs, **graphs}, self.options, prune)
        seconds = time.perf_counter() - begun
        for graph in graphs.values():
            graph.free()
        new, entries, new_seconds = self.judged(kernels)
        rivals = [name for name in RIVALS if name in plain and name in new]
        for name, entry in entries.items():
            row = {
                "problem": self.problem.key, "kernel": name, "seconds": seconds, "judged_seconds": new_seconds,
                "failure": "" if entry.failure is None else f"{entry.failure.status}: {entry.failure.detail}",
            }  # fmt: skip
            if entry.failure is None and len(plain[name].samples_us) == ROUNDS == len(new[name].samples_us):
                ratios = [speedup(found, name, rivals, 0).ratio for found in (plain, new)]
                row |= {
                    "us": plain[name].median_us, "judged_us": new[name].median_us, "speedup": ratios[0],
                    "judged_speedup": ratios[1], "moved": ratios[1] / ratios[0],
                    "rival_us": {r: [plain[r].median_us, new[r].median_us] for r in rivals},
                    "max_err_ratio": entry.max_err_ratio,
                }  # fmt: skip
            yield row


def cheat(name: str, carried: CarriedBuilds) -> dict[str, Any]:
    """Time one cheat and its honest version: with all defences on, and without those at which it aims."""
    from outblas_lab.jail.judged_clock import Defences

    text = phases()[name]
    aims = [each for each in header(text, "defence").split("+") if each != "gate"]
    row: dict[str, Any] = {
        "cheat": name,
        "kernel": FreeKernel.parse(text).name,
        "signal": header(text, "signal"),
        "defence": header(text, "defence"),
    }
    with _Cell(CHEATED) as cell:
        fair = cell.load(carried.build(honest_version(text), CHEATED))
        new, entries, _ = cell.judged({"honest": fair})
        row |= {"honest_us": new["honest"].median_us, "honest_failure": _word(entries["honest"])}
        bad = cell.load(carried.build(FreeKernel.parse(text), CHEATED))
        row["proof"] = _proof(bad)
        off, entries, _ = cell.judged({"cheat": bad}, replace(Defences(), **dict.fromkeys(aims, False)))
        row["without_failure"] = _word(entries["cheat"])
        if entries["cheat"].failure is None:
            row |= {"without_us": off["cheat"].median_us, "gain": row["honest_us"] / off["cheat"].median_us}
        bad = cell.load(carried.build(FreeKernel.parse(text), CHEATED))
        _, entries, _ = cell.judged({"cheat": bad}, rounds=7)
        row["with_all"] = _word(entries["cheat"])
    return {**row, "commit": os.environ.get("OUTBLAS_COMMIT", "")}


def _proof(kernel: Any) -> str:
    from outblas.judge.gates import prove
    from outblas.judge.trials import ProofTrials

    verdict = prove(kernel, CHEATED, None, "full", 0, trials=ProofTrials.secret())
    kernel.release()
    return f"{verdict.status} {verdict.detail}".strip()


def _word(entry: Any) -> str:
    return "passed" if entry.failure is None else f"{entry.failure.status}: {entry.failure.detail}"


def cheats(carried: Path, known: list[dict[str, Any]], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run every cheat in a process of its own; those of the same text that are known are not run again."""
    texts = phases()
    rows = [row for row in known if row.get("kernel") in {FreeKernel.parse(text).name for text in texts.values()}]
    for name in texts.keys() - {row["cheat"] for row in rows}:
        command = [sys.executable, __file__, "cheat", "--name", name, "--carried", str(carried)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        lines = done.stdout.strip().splitlines()
        row = json.loads(lines[-1]) if not done.returncode else {"cheat": name, "error": done.stderr[-600:]}
        rows.append(row)
        print(json.dumps(row), flush=True)
        keep({"rows": sorted(rows, key=lambda row: row["cheat"])})
    return {"rows": sorted(rows, key=lambda row: row["cheat"])}


def finds(tries: int, results: int) -> dict[str, Any]:
    """Count the wrong results that the check finds, and the honest ones that it refuses."""
    from outblas_lab.jail.fresh_operands import FreshOperands

    def element(place: Any, problem: Problem, at: Callable[[int], int]) -> None:
        row = place.c[at(problem.m)]
        size = row.float().square().mean().sqrt() / 16 + 2.0**-10
        row[at(problem.n)] += size

    def step(place: Any, problem: Problem, at: Callable[[int], int]) -> None:
        k = 16 * at(problem.k // 16)
        b = place.b.t() if problem.layout == "TN" else place.b
        place.c.sub_(place.a[:, k : k + 16].float() @ b[k : k + 16].float())

    def tile(place: Any, problem: Problem, at: Callable[[int], int]) -> None:
        i, j = 64 * at(-(-problem.m // 64)), 64 * at(-(-problem.n // 64))
        part = place.c[i : i + 64, j : j + 64]
        part.normal_(std=math.sqrt(problem.k))

    problems = [
        Problem(256, 256, 256), Problem(512, 512, 512), Problem(64, 1024, 2048), Problem(1, 4096, 1024),
        Problem(512, 384, 4096, "NN", "bf16"), Problem(1024, 1024, 512, "TN", "bf16"), Problem(33, 257, 8192),
        Problem(256, 512, 16384),
    ]  # fmt: skip
    draw, found = Random(7), {"wrong element": 0, "skipped step of K": 0, "stale tile": 0}
    honest_results = refused = 0
    worst = 0.0
    for number, problem in enumerate(problems):
        calls = 16
        fresh = FreshOperands(problem, calls, "cuda:0")

        for what, spoil in (("wrong element", element), ("skipped step of K", step), ("stale tile", tile)):
            for _ in range(tries // len(problems)):
                place = _multiplied(fresh, fresh.deal()[:1])
                spoil(place[0], problem, draw.randrange)
                try:
                    fresh.judge(place)
                except GateFailed:
                    found[what] += 1
        while honest_results < results * (number + 1) // len(problems):
            places = _multiplied(fresh, fresh.deal())
            honest_results += calls
            try:
                worst = max(worst, fresh.judge(places))
            except GateFailed as failure:
                refused += 1
                print("refused", problem.key, failure, flush=True)
        print(problem.key, found, honest_results, refused, worst, flush=True)
    return {
        "tries": tries // len(problems) * len(problems), "found": found, "honest_results": honest_results,
        "refused": refused, "max_err_ratio": worst,
    }  # fmt: skip


def _multiplied(fresh: Any, places: list[Any]) -> list[Any]:
    """Fill places and let torch.mm compute their products, without the fp16 sums of a split K that it allows itself."""
    import torch

    from outblas.runtime.full_precision import full_precision_reductions

    fresh.fill(places)
    with full_precision_reductions():
        for place in places:
            torch.mm(place.a, place.b.t() if fresh.problem.layout == "TN" else place.b, out=place.c)
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("honest", "cheats", "cheat", "finds"))
    parser.add_argument("--carried", type=Path, default=Path("build/free_kernels"), help="folder of compiled kernels")
    parser.add_argument("--out", type=Path, help="result file; by default results/<gpu>/judged_clock.json")
    parser.add_argument("--name", help="the cheat of part cheat")
    parser.add_argument("--tries", type=int, default=1000, help="wrong results of each kind")
    parser.add_argument("--results", type=int, default=100_000, help="honest results")
    parser.add_argument("--compile-only", action="store_true", help="fill the folder, and stop")
    arguments = parser.parse_args()
    if arguments.compile_only:
        carried = CarriedBuilds(arguments.carried, packaged_gpu("h200"))
        free_build.CUTLASS_LIMITS = replace(free_build.CUTLASS_LIMITS, seconds=900)
        texts = [version for text in phases().values() for version in (FreeKernel.parse(text), honest_version(text))]
        for kernel in (*texts, *all_examples().values()):
            carried.build(kernel, CHEATED)
        return
    from outblas.runtime.device import gpu_of_device

    carried = CarriedBuilds(arguments.carried, gpu_of_device(0))
    if arguments.part == "cheat":
        print(json.dumps(cheat(arguments.name, carried)))
        return
    out = arguments.out or result_file("judged_clock.json")
    known = json.loads(out.read_text()) if out.exists() else {"format": 1}

    def keep(made: dict[str, Any]) -> None:
        write_json(out, {**known, arguments.part: {**made, "provenance": provenance}})

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "honest": lambda: honest(carried),
        "cheats": lambda: cheats(arguments.carried, known.get("cheats", {}).get("rows", []), keep),
        "finds": lambda: finds(arguments.tries, arguments.results),
    }
    provenance = collect_provenance(script_command("benchmarks/judged_clock.py"))
    keep(parts[arguments.part]())
    print("written:", out)


if __name__ == "__main__":
    try:
        main()
    except OutblasError as error:
        sys.exit(str(error))
