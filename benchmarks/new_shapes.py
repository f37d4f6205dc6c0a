"""Question: how does the policy do on shapes that are in no suite, with a few measurements each, or with none?

Command:

    python benchmarks/new_shapes.py [--count 40] [--measurements 8] [--agent ppo]
        [--out results/<gpu>/new_shapes_tn_fp16_fp32_offline.parquet]
    python benchmarks/new_shapes.py --drawn [--count 400] [--seed 0] [--layout TN] [--dtype fp16] [--starts 3]
        [--out results/<gpu>/drawn_tn_fp16_fp32_unmeasured.parquet]

Result file: results/<gpu>/new_shapes_tn_fp16_fp32_offline.parquet, a row of the published table. Needs a GPU.
With ``--drawn`` it is results/<gpu>/drawn_<layout>_<dtype>_fp32_unmeasured.parquet.

With ``--drawn`` nothing is searched: the package serves the shapes of ``benchmarks/shapes/drawn_shapes.py`` as it
ships. Draw them with a seed that no fit has used. The file's suite is ``drawn`` and its mode ``unmeasured``. With
``--starts 3`` the same command must run after each of three starts of the machine. Each run benches into ``--work``.
The last one writes the medians of the three.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shapes.drawn_shapes import drawn_shapes

from outblas.core.config import LAUNCHES, Launch, launch_of
from outblas.core.errors import OutblasError, UsageError
from outblas.core.files import lock_folder
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.core.roofline import Gpu
from outblas.core.stats import geomean, losses
from outblas.core.suites import GRID_EXTENTS
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import first_search_candidates
from outblas.predict.answer_choice import AnswerModel
from outblas.predict.any_shape import AnyShapeModel
from outblas.predict.extents import log_uniform
from outblas.records.library import Library
from outblas.records.result_rows import launch_of_row
from outblas.records.results import read_result, result_file, write_result
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.live_evaluator import LiveEvaluator
from outblas.tune.tune import tune
from outblas_lab.build.any_shape_run import library_of_choices
from outblas_lab.build.judging import write_medians
from outblas_lab.pool.averages import FAR_BELOW, published_us
from outblas_lab.pool.run_bench import BenchRequest, run_bench

#: The launch options that are searched: what needs no promise.
OPTIONS: tuple[Launch, ...] = LAUNCHES[:2]


def shapes(count: int, seed: int) -> list[Problem]:
    """``count`` different problems, no extent a multiple of 64."""
    rng = random.Random(seed)
    found: dict[Problem, None] = {}
    while len(found) < count:
        mnk = [log_uniform(rng, GRID_EXTENTS[0], GRID_EXTENTS[-1]) for _ in range(3)]
        if all(extent % 64 for extent in mnk):
            found[Problem(*mnk)] = None
    return list(found)


def search(arguments: argparse.Namespace, work: Path) -> Library:
    """The library of the agent's measurements."""
    gpu, problems = gpu_of_device(0), shapes(arguments.count, arguments.seed)
    options = Options(0, gpu, rounds=11, baselines=RIVALS)
    with (
        LiveEvaluator(
            0, options, offered=lambda p: [c for c in first_search_candidates(p, gpu) if launch_of(c) in OPTIONS]
        ) as evaluator,
        Store(work / "store.sqlite") as store,
    ):
        budget = arguments.measurements * len(OPTIONS)
        library = tune(problems, make_agent(arguments.agent, 0, gpu), budget, evaluator, store, arguments.agent)
    library.save(work / "library.json")
    return library


def bench(arguments: argparse.Namespace, work: Path) -> None:
    """Bench the library against every baseline, to ``--out``."""
    problems = shapes(arguments.count, arguments.seed)
    run_bench(BenchRequest(problems, "new_shapes", work / "library.json", arguments.out, rounds=11))
    result = read_result(arguments.out)
    write_result(
        result.rows, {**result.meta, "agent": arguments.agent, "measurements": arguments.measurements}, arguments.out
    )
    for launch in OPTIONS:
        own = [row for row in result.rows if launch_of_row(row) == launch]
        over = geomean([row["lt_auto_us"] / published_us(row) for row in own])
        print(
            f"{launch}: geometric mean {geomean([r['published'] for r in own]):.3f} over the fastest baseline, "
            f"{over:.3f} over cuBLASLt autotuned, worst {min(r['published'] for r in own):.3f}, "
            f"{sum(r['fallback'] for r in own)} of {len(own)} fall back"
        )


def bench_drawn(arguments: argparse.Namespace) -> None:
    """Bench drawn shapes in one start of the machine.

    The result goes to ``--out``. With several starts it goes to ``--work``, and the medians of all go to ``--out``
    after the last.
    """
    if arguments.starts == 1:
        bench_start(arguments, 1, arguments.out)
        return
    name = arguments.out.stem
    parts = [arguments.work / f"{name}_{start}.parquet" for start in range(1, arguments.starts + 1)]
    known = [read_result(part) for part in parts if part.exists()]
    if any(result.meta.get(key) != text for result in known for key, text in about_draw(arguments).items()):
        wrong = f"{arguments.work} has benches of other shapes, or of another fit"
        raise UsageError(wrong, "benches of this draw", f"delete {name}_*.parquet there and bench again")
    for start, part in enumerate(parts, 1):
        if not part.exists():
            bench_start(arguments, start, part)
            break
    if all(part.exists() for part in parts):
        print(f"{write_medians([read_result(part) for part in parts], arguments.out)}: {arguments.out}")


def about_draw(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what decides in a bench of drawn shapes: their seed, and the fits of kernels and of cuBLASLt's answers."""
    gpu = gpu_of_device(0).name
    shapes = f"benchmarks/shapes/drawn_shapes.py, seed {arguments.seed}"
    return {"shapes": shapes, "fit": AnyShapeModel.load(gpu).about, "answers": AnswerModel.load(gpu).about}


def bench_start(arguments: argparse.Namespace, start: int, out: Path) -> None:
    """Bench what the package ships for drawn shapes against every rival.

    Args:
        start: number of the start of the machine. It is the seed of operands and of the orders in a round.
        out: path of the result file.
    """
    problems = drawn_shapes(arguments.count, arguments.seed, arguments.layout, arguments.dtype)
    gpu, offline = gpu_of_device(0), arguments.work / f"{out.stem}_offline.parquet"
    library, one_start = shipped_library(problems, gpu), arguments.starts > 1
    run_bench(BenchRequest(problems, "drawn", library, offline, rounds=11, seed=start, one_start=one_start))
    result = read_result(offline)
    rows = [{**row, "mode": "unmeasured"} for row in result.rows]
    write_result(rows, {**result.meta, **about_draw(arguments)}, out)
    offline.unlink()
    print("\n".join(drawn_figures(rows)))
    print(f"result: {out}")


def shipped_library(problems: Sequence[Problem], gpu: Gpu) -> Library:
    """Return what ``outblas.matmul`` decides without a user's library: packaged rows, else choices for any shape."""
    packaged = Library.packaged(gpu.name)
    chosen = library_of_choices(problems, gpu)
    return Library(gpu.name, tuple(packaged.lookup(row.problem) or row for row in chosen.rows))


def drawn_figures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each launch option: speed-ups over torch and the fastest rival, and what is slower."""
    found = []
    for launch in LAUNCHES:
        own = [row for row in rows if launch_of_row(row) == launch]
        if not own:
            continue
        over_torch = [row["torch_us"] / published_us(row) for row in own]
        over_best = [row["published"] for row in own]
        slow = f"{losses(over_best, FAR_BELOW)} of the rival, {losses(over_torch, FAR_BELOW)} of torch"
        found.append(
            f"{launch}: geometric mean {geomean(over_best):.3f} over the fastest rival, {geomean(over_torch):.3f} over "
            f"torch; below {FAR_BELOW}: {slow}; "
            f"{sum(not row['fallback'] for row in own)} of {len(own)} served"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", action="store_true", help="bench drawn shapes as the package serves them")
    parser.add_argument("--layout", default="TN", help="of drawn shapes")
    parser.add_argument("--dtype", default="fp16", help="of drawn shapes")
    parser.add_argument("--count", type=int, help="by default 40, or 400 drawn ones")
    parser.add_argument("--measurements", type=int, default=8, help="per problem and launch option")
    parser.add_argument("--agent", default="ppo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--starts", type=int, choices=(1, 3, 5), default=1, help="starts whose medians are written, of drawn shapes"
    )
    parser.add_argument("--out", type=Path, help="by default the result file above")
    parser.add_argument("--work", type=Path, default=Path("build/new_shapes"))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the bench, in this process
    arguments = parser.parse_args()
    fill_defaults(arguments)
    try:
        if arguments.drawn:
            with lock_folder(arguments.work):
                bench_drawn(arguments)
            return
        if arguments.here:
            bench(arguments, arguments.work)
            return
        with lock_folder(arguments.work):
            search(arguments, arguments.work)
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--here"], check=True)
    except (OutblasError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")


def fill_defaults(arguments: argparse.Namespace) -> None:
    """Set the count and the result file of the kind of shapes, where none is given."""
    kind = f"{arguments.layout}_{arguments.dtype}".lower()
    name = f"drawn_{kind}_fp32_unmeasured" if arguments.drawn else "new_shapes_tn_fp16_fp32_offline"
    arguments.count = arguments.count or (400 if arguments.drawn else 40)
    arguments.out = arguments.out or result_file(f"{name}.parquet")


if __name__ == "__main__":
    main()
