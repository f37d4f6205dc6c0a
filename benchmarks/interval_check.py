"""Question: is the kernel of an interval as fast as one that is tuned for that very M?

Command:

    outblas tune $(python benchmarks/interval_check.py --names 20) --agent regressor --run RUN
    python benchmarks/interval_check.py --run RUN [RUN ...] [--count 40] [--seed 0] [--budget 16] [--agent AGENT]

The first tunes the weights of a draw, which ``--names`` prints, one ``--linear N_K`` each. Several runs may share the
weights. Two GPUs of one kind differ by some percent, so a run is checked on the GPU that tuned it. Then
``--join FILE FILE ...`` joins the files of several GPUs.

Result file: results/<gpu>/interval_check.json. ``--out`` names another one. Needs a GPU. A stopped run resumes in
``--work``.

For each weight, M are drawn log-uniformly from the range of its intervals. At each of them the agent measures
``--budget`` kernels, as ``outblas tune --mnk`` does, those with PDL among them. The fastest without PDL and the
interval's decision are then timed anew, in the same rounds. A decision for torch or cuBLASLt counts with that one's
time, on both sides. The package decides an M in no interval, or that its interval leaves open, as in a program.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from new_shapes import shipped_library
from shapes.drawn_shapes import MODELS

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.files import lock_folder, write_json
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, RIVALS
from outblas.core.roofline import Gpu
from outblas.core.stats import geomean, losses
from outblas.core.weight import Weight
from outblas.judge.bench_cell import Options
from outblas.predict.extents import log_uniform
from outblas.records.library import Library
from outblas.records.library_row import LibraryRow
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.live_evaluator import LiveEvaluator
from outblas.tune.tune import tune
from outblas_lab.pool.averages import FAR_BELOW

#: What the checks that are joined share. Their commits may differ, and are listed.
_SHARED = ("gpu", "driver", "toolchain")
#: The content of a file to join, and a remedy.
_A_CHECK = ("a result of interval_check.py", "pass files that --run wrote")
#: Runs of the store: what each M is tuned by, and the figures.
TUNED, TIMED = "tuned", "timed"


@dataclass(frozen=True)
class Case:
    """A drawn M of a weight, and the two decisions for it. None: torch, or the algorithm that the row names."""

    problem: Problem
    interval: LibraryRow
    tuned: LibraryRow

    @property
    def kernels(self) -> list[KernelConfig]:
        """Return the kernels of both decisions, each once."""
        both = (self.interval.plain, self.tuned.plain)
        return list(dict.fromkeys(choice.config for choice in both if choice is not None))


def drawn_weights(count: int, seed: int) -> list[tuple[int, int]]:
    """Return ``count`` different (N, K) of layers of published models."""
    known = sorted({nk for layers in MODELS.values() for nk in layers})
    return random.Random(seed).sample(known, count)


def library_of_runs(runs: Sequence[Path]) -> Library:
    """Return the first run's library with the intervals of all; no weight may be in two runs."""
    first, *others = [Library.load(run / "library.json") for run in runs]
    return replace(first, intervals=[one for library in (first, *others) for one in library.intervals])


def drawn_problems(library: Library, count: int, seed: int) -> list[Problem]:
    """Return ``count`` problems of each weight with intervals, each M once.

    Raises:
        UsageError: the library has no intervals.
    """
    ranges: dict[Weight, list[int]] = {}
    for one in library.intervals:
        ranges.setdefault(one.weight, []).extend((one.first, one.last))
    if not ranges:
        raise UsageError("the library has no intervals", "a run of outblas tune --linear", "pass its folder as --run")
    rng, found = random.Random(seed), []
    for weight, ends in sorted(ranges.items()):
        found += [weight.problem(m) for m in drawn_m(rng, min(ends), max(ends), count)]
    return found


def drawn_m(rng: random.Random, first: int, last: int, count: int) -> list[int]:
    """Return ``count`` different M of a range, log-uniform, as they are drawn; all of a range of fewer."""
    drawn: dict[int, None] = {}
    while len(drawn) < min(count, last - first + 1):
        drawn[log_uniform(rng, first, last)] = None
    return list(drawn)


def decisions(library: Library, problems: Sequence[Problem], gpu: Gpu) -> dict[Problem, LibraryRow]:
    """Return the decision for each problem: that of its interval, else that of the package.

    An interval may leave an M open. The package decides it then, if it has a kernel or an algorithm for it.
    """
    found = {problem: row for problem in problems if (row := library.lookup(problem)) is not None}
    asked = [problem for problem in problems if problem not in found or found[problem].is_open]
    for row in shipped_library(asked, gpu).rows:
        if row.problem not in found or row.plain is not None or row.fallback:
            found[row.problem] = row
    return found


def time_of(row: LibraryRow, timed: dict[KernelConfig, Evaluation]) -> float | None:
    """Return the time of a decision, microseconds, by the evaluations of its problem; None: its kernel failed."""
    if row.plain is not None:
        timing = timed[row.plain.config].timing
        return None if timing is None else timing.median_us
    baselines = next(iter(timed.values())).baselines_us
    return baselines[LT_AUTO if row.fallback else "torch"]


def check(arguments: argparse.Namespace) -> None:
    """Tune each drawn M, time both decisions, and write the figures to ``--out``."""
    gpu, library = gpu_of_device(0), library_of_runs(arguments.run)
    problems = drawn_problems(library, arguments.count, arguments.seed)

    def progress(done: int, of: int, mean: float) -> None:
        if done % 200 == 0:
            print(f"{done} of {of} measurements", flush=True)

    options = Options(0, gpu, rounds=arguments.rounds, baselines=RIVALS, level="cell")
    with (
        LiveEvaluator(0, options) as evaluator,
        Store(arguments.work / "store.sqlite") as store,
    ):
        agent = make_agent(arguments.agent, 0, gpu)
        tuned = tune(problems, agent, arguments.budget, evaluator, store, TUNED, progress)
        rows = zip(problems, tuned.rows, strict=True)
        decided = decisions(library, problems, gpu)
        cases = [Case(p, decided[p], row) for p, row in rows]
        store.begin(TIMED, {"agent": "interval_check", "seed": arguments.seed, "source": evaluator.source})
        figures = [row_of(case, timed(case, evaluator, store)) for case in cases if case.kernels]
    about = collect_provenance(script_command("benchmarks/interval_check.py"), 0)
    settings = {"budget": arguments.budget, "seed": arguments.seed}
    write_found(arguments.out, {**summary(len(problems), figures), **settings, "provenance": about})


def summary(cases: int, figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of a check of ``cases`` problems, and its rows, one for each problem that was timed."""
    ratios = [row["ratio"] for row in figures if row["ratio"] is not None]
    return {
        "cases": cases,
        "same_decision": cases - len(figures) + sum(row["interval"] == row["tuned"] for row in figures),
        "below": losses(ratios, FAR_BELOW),
        "geomean": geomean(ratios),
        "failed": [row for row in figures if row["ratio"] is None],
        "rows": figures,
    }


def join(files: Sequence[Path], out: Path) -> None:
    """Write checks of other weights, each on its own GPU or at another time, as one.

    Raises:
        RecordError: a file is missing, or is no check.
        UsageError: they have other settings, toolchains or kinds of GPUs, or share a problem.
    """
    parts = [read_object(file, *_A_CHECK) for file in files]
    try:
        same = {json.dumps([p["budget"], p["seed"], *(p["provenance"][name] for name in _SHARED)]) for p in parts}
        rows = [row for part in parts for row in part["rows"]]
        twice = len({row["problem"] for row in rows}) < len(rows)
        about = [part["provenance"] for part in parts]
        found = summary(sum(part["cases"] for part in parts), rows)
        lists = {f"{name}s": list(dict.fromkeys(one[name] for one in about)) for name in ("commit", "command")}
    except (KeyError, TypeError) as error:
        raise RecordError(f"one of {len(files)} files lacks {error}", *_A_CHECK) from error
    if len(same) > 1 or twice:
        raise UsageError(f"checks of {sorted(same)}", "one kind of check, of weights in one file each", "run anew")
    settings = {name: parts[0][name] for name in ("budget", "seed", "provenance")}
    write_found(out, {**found, **settings, "parts": len(parts), **lists})


def write_found(out: Path, found: dict[str, Any]) -> None:
    """Write the figures of a check, and print them."""
    write_json(out, found)
    print(
        f"{found['cases']} cases, {found['below']} below {FAR_BELOW} of the kernel tuned for that M, "
        f"{found['same_decision']} with the same decision, geometric mean {found['geomean']:.4f}\n"
        f"result: {out}"
    )


def timed(case: Case, evaluator: LiveEvaluator, store: Store) -> dict[KernelConfig, Evaluation]:
    """Return the evaluations of a case's kernels, timed in the same rounds, or those that the store holds."""
    known = {e.template: e for e in store.recorded(TIMED, case.problem).values()}
    if not known.keys() >= set(case.kernels):
        for e in evaluator.evaluate([(case.problem, config) for config in case.kernels]):
            store.append(TIMED, e)
            known[e.template] = e
    return known


def row_of(case: Case, evaluations: dict[KernelConfig, Evaluation]) -> dict[str, Any]:
    """Return the figures of a case. ``ratio`` above 1: the interval is faster; None: a kernel failed."""
    interval, tuned = (time_of(row, evaluations) for row in (case.interval, case.tuned))
    names = {"interval": name_of(case.interval), "tuned": name_of(case.tuned)}
    ratio = None if interval is None or tuned is None else tuned / interval
    return {"problem": case.problem.key, **names, "interval_us": interval, "tuned_us": tuned, "ratio": ratio}


def name_of(row: LibraryRow) -> str:
    return (row.fallback or "torch") if row.plain is None else config_name(row.plain.config)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, nargs="+", help="folders of runs with intervals")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="join the files of several GPUs")
    parser.add_argument("--names", type=int, metavar="COUNT", help="print the weights of a draw, and end")
    parser.add_argument("--count", type=int, default=40, help="drawn M of a weight")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")
    parser.add_argument("--budget", type=int, default=16, help="kernels that are measured at each M")
    parser.add_argument("--agent", default="regressor", help="the agent that chooses them")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, help="by default the result file above")
    parser.add_argument("--work", type=Path, default=Path("build/interval_check"))
    arguments = parser.parse_args(given)
    if arguments.names:
        print(" ".join(f"--linear {n}_{k}" for n, k in drawn_weights(arguments.names, arguments.seed)))
        return
    if (arguments.run is None) == (arguments.join is None):
        parser.error("pass --run, --join or --names")
    arguments.out = arguments.out or result_file("interval_check.json")
    try:
        if arguments.join:
            join(arguments.join, arguments.out)
            return
        with lock_folder(arguments.work):
            check(arguments)
    except OutblasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
