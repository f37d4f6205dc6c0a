"""Shapes that no library has: which kernels are offered for them, how they do, and when they are worth it.

    python scripts/any_shapes.py record --work build/any_shapes  # on a GPU, resumable -> h200_cells.parquet
    python scripts/any_shapes.py fit                             # -> src/outblas/data/any_shape/h200.npz
    python scripts/any_shapes.py prove                           # on a GPU -> h200_proved.json
    python scripts/any_shapes.py bench                           # on a GPU -> h200_bench.parquet, h200.json

These lie in results/any_shapes. ``record``: ``--count`` random problems; on each those of
:func:`outblas.learn.any_shape.general_kernels` that the policy chooses, ``--measurements`` of them, beside torch.matmul
in the same rounds. ``fit``: the speed-up over torch.matmul, on these and on the packaged recordings, and the margin
that a prediction must clear, chosen on problems that were kept out. ``prove``: every kernel on offer by all gates, in
both layouts and dtypes. ``bench``: other random problems, by what was fitted alone, against every baseline.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from outblas.agents import make_agent
from outblas.any_shape import LIKELY, AnyShape
from outblas.baselines import RIVALS
from outblas.bench import run_bench
from outblas.config import config_name
from outblas.device import gpu_of_device
from outblas.errors import OutblasError
from outblas.evaluate import LiveEvaluator, Options
from outblas.evaluation import Status
from outblas.files import sole_driver, write_json
from outblas.kernels.config_text import config_from_name
from outblas.kernels.legality import why_illegal
from outblas.learn.any_shape import Cells, Outcome, fit, general_kernels, kept_out, recorded, result
from outblas.library import Library, Row
from outblas.policy import Policy
from outblas.problem import Dtype, Layout, Problem
from outblas.provenance import collect
from outblas.recording import Recording
from outblas.results import read_result, write_result
from outblas.roofline import H200
from outblas.stats import geomean
from outblas.store import Store
from outblas.suites import GRID, LLM_LAYERS, SUITES, suite
from outblas.tune import tune

CELLS = Path("results/any_shapes/h200_cells.parquet")
OUT = Path("results/any_shapes/h200_bench.parquet")
SUMMARY = Path("results/any_shapes/h200.json")
PROVED = Path("results/any_shapes/h200_proved.json")
#: A kernel is proved on the first of these that it may compute, and on its representatives.
PROVED_ON = ((333, 1000, 520), (333, 1001, 521), (8, 512, 8192), (8, 512, 4096), (16, 512, 4096), (256, 256, 8192))
PACKAGED = Path("src/outblas/data/any_shape/h200.npz")
#: A product below this times torch.matmul's speed is slower; so few may be, of those that a fit had not seen.
SLOW, SLOWER = 0.98, 0.002
MARGINS = (1.04, 1.06, 1.08, 1.1, 1.12, 1.15, 1.2)
#: Above this a single product takes milliseconds, and both sides are as fast as the clock allows.
MOST_FLOPS = 1e12
#: Seeds of what is fitted and of what is benched.
RECORDED, BENCHED = 1, 2


def near_layers(rng: random.Random) -> tuple[int, int, int]:
    """A layer of a real model with any number of tokens."""
    n, k = rng.choice([nk for model in LLM_LAYERS.values() for nk in model])
    return _log_uniform(rng, 1, 8192), n, k


def multiples_of_8(rng: random.Random) -> tuple[int, int, int]:
    """Layers of no model: N and K multiples of 8."""
    n, k = (8 * _log_uniform(rng, 4, GRID[-1] // 8) for _ in range(2))
    return _log_uniform(rng, 1, GRID[-1]), n, k


def any_extents(rng: random.Random) -> tuple[int, int, int]:
    m, n, k = (_log_uniform(rng, 1, GRID[-1]) for _ in range(3))
    return m, n, k


KINDS: tuple[Callable[[random.Random], tuple[int, int, int]], ...] = (near_layers, multiples_of_8, any_extents)


def shapes(count: int, seed: int) -> list[Problem]:
    """``count`` different problems, of the three kinds in turns, three of four TN, none of a suite."""
    rng = random.Random(seed)
    known = {(p.m, p.n, p.k) for name in SUITES for p in suite(name)}
    found: dict[Problem, None] = {}
    while len(found) < count:
        mnk = KINDS[len(found) % len(KINDS)](rng)
        if mnk not in known and 2 * math.prod(mnk) <= MOST_FLOPS:
            found[Problem(*mnk, rng.choice(("TN", "TN", "TN", "NN")))] = None
    return list(found)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(2 ** rng.uniform(math.log2(low), math.log2(high)))


def record(arguments: argparse.Namespace) -> None:
    gpu, problems, general = gpu_of_device(0), shapes(arguments.count, arguments.seed), general_kernels()
    options = Options(0, gpu, rounds=7, baselines=("torch",), hopeless=1.3, level="cell")

    def progress(done: int, of: int, mean: float) -> None:
        if done % 500 == 0:
            print(f"{done} of {of}, geometric mean of the best so far {mean:.3f}", flush=True)

    with (
        LiveEvaluator(0, options, offered=lambda p: [c for c in general if not why_illegal(p, c, gpu)]) as evaluator,
        Store(arguments.work / "store.sqlite") as store,
    ):
        agent = make_agent("ppo", 0, gpu)
        tune(problems, agent, arguments.measurements, evaluator, store, "any_shapes", progress, arguments.measurements)
    export(arguments.work / "store.sqlite", arguments.cells)


def export(store: Path, out: Path) -> None:
    """What was recorded, as a table: problem, kernel, its and torch.matmul's microseconds."""
    with Store(store) as opened:
        run = opened.runs()[0]
        done = [e for e in opened.evaluations(run.run_id) if e.timing is not None]
    columns = {
        "problem": [e.problem.key for e in done],
        "kernel": [config_name(e.config) for e in done],
        "median_us": [e.timing.median_us for e in done if e.timing],
        "torch_us": [e.baselines_us["torch"] for e in done],
    }
    about = collect("scripts/any_shapes.py record", 0) | {"date": run.started}
    table = pa.table(columns).replace_schema_metadata({"provenance": json.dumps(about)})
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out)
    print(f"{len(done)} cells of {len(set(columns['problem']))} problems: {out}")


def read_cells(path: Path) -> tuple[list[Cells], dict[str, Any]]:
    """(cells, provenance) of what :func:`export` wrote."""
    table = pq.read_table(path)
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        grouped.setdefault(row["problem"], []).append(row)
    found = []
    for key, rows in grouped.items():
        gains = np.log([row["torch_us"] / row["median_us"] for row in rows]).astype(np.float32)
        configs = tuple(config_from_name(row["kernel"]) for row in rows)
        found.append(Cells(Problem.from_key(key), configs, gains, outside=True))
    return found, json.loads(table.schema.metadata[b"provenance"])


def fit_all(arguments: argparse.Namespace) -> None:
    measured, provenance = read_cells(arguments.cells)
    cells = [*recorded(Recording.load("h200")), *measured]
    sure, margin, told = _most_for_few(kept_out(cells, lambda line: print(line, flush=True)))
    failed = json.loads(arguments.proved.read_text())["failed"] if arguments.proved.exists() else {}
    left_out = {name.split(" ", 1)[1] for name in failed}
    proved = {config for c in measured for config in c.configs if config_name(config) not in left_out}
    where = f"{provenance['gpu']}, driver {provenance['driver']}, {provenance['date'][:10]}"
    about = f"{len(measured)} random problems and {len(cells) - len(measured)} recorded ones; {where}; {told}"
    kernels = tuple(c for c in general_kernels() if c in proved)
    found = AnyShape(kernels, fit(cells), margin, sure, Policy.load("h200"), about)
    PACKAGED.parent.mkdir(parents=True, exist_ok=True)
    found.save(PACKAGED)
    print(f"{len(kernels)} kernels, bound {sure:g} deviations below, margin {margin}; {told}: {PACKAGED}")


def _most_for_few(outcomes: Sequence[tuple[float, list[Outcome]]]) -> tuple[float, float, str]:
    """(sure, margin, in words): the most speed where at most :data:`SLOWER` of the problems kept out get slower."""
    best = (0.0, 0.0, 0.0, 0)
    for sure, each in outcomes:
        for margin in MARGINS:
            mean, slower = result(each, sure, margin, SLOW)
            if slower <= SLOWER * len(each) and mean > best[0]:
                best = (mean, sure, margin, slower)
    mean, sure, margin, slower = best
    if not margin:
        raise OutblasError("no margin keeps products from getting slower", "a few problems", "record more problems")
    return sure, margin, f"kept out: {mean:.3f} over torch.matmul, {slower} of {len(outcomes[0][1])} below {SLOW}"


def prove(arguments: argparse.Namespace) -> None:
    """Every kernel on offer through all gates, those on representative problems too; exit status 1 where one fails."""
    gpu, pairs = gpu_of_device(0), []
    for config, layout, dtype in product(AnyShape.load("h200").kernels, get_args(Layout), get_args(Dtype)):
        problems = (Problem(*mnk, layout, dtype) for mnk in PROVED_ON)
        pairs += [(p, config) for p in problems if not why_illegal(p, config, gpu)][:1]
    failed = {}
    with LiveEvaluator(0, Options(0, gpu, rounds=3, baselines=("torch",))) as evaluator:
        for done, e in enumerate(evaluator.evaluate(pairs), 1):
            if e.status is not Status.PASSED:
                failed[f"{e.problem.key} {config_name(e.config)}"] = f"{e.status.value}: {e.detail}"
            if done % 50 == 0 or done == len(pairs):
                print(f"{done} of {len(pairs)} kernels, {len(failed)} failed", flush=True)
    about = collect("scripts/any_shapes.py prove", 0)
    result = {"passed": len(pairs) - len(failed), "failed": failed, "provenance": about}
    write_json(arguments.proved, result)
    print(f"written to {arguments.proved}")
    if failed:
        raise SystemExit(1)


def bench(arguments: argparse.Namespace) -> None:
    """The decisions of :class:`AnyShape` on problems that were never measured; what it leaves to torch is torch's."""
    problems, found = shapes(arguments.count, BENCHED), AnyShape.load("h200")
    rows = [Row(p, "torch", source="any_shape", plain=found.choose(p, H200)) for p in problems]
    library = Library("h200", tuple(rows))
    run_bench(problems, "any_shapes", library, arguments.out, layouts=("TN", "NN"), baselines=RIVALS)
    result = read_result(arguments.out)
    # No kernel with PDL is on offer: where a caller allows it the same kernels are used.
    result = replace(result, rows=[row for row in result.rows if not row["pdl"]])
    write_result(result.rows, result.meta, arguments.out)
    summary = {**summarized(result.rows), "provenance": result.meta["provenance"], "fit": found.about}
    write_json(arguments.summary, summary)
    print(json.dumps({name: value for name, value in summary.items() if name != "provenance"}, indent=1))


def summarized(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of benched problems: over torch.matmul, which the rest is left to, and what is ours beside autotuned cuBLASLt."""
    over = [1.0 if row["fallback"] else row["torch_us"] / row["ours_us"] for row in rows]
    ours = [row for row in rows if not row["fallback"]]
    return {
        "shapes": len(rows),
        "ours": len(ours),
        "over_torch": geomean(over),
        "worst_over_torch": min(over),
        "slower": sum(ratio < SLOW for ratio in over),
        "ours_over_torch": geomean([row["torch_us"] / row["ours_us"] for row in ours]),
        "ours_over_lt_auto": geomean([row["lt_auto_us"] / row["ours_us"] for row in ours]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("record", "fit", "prove", "bench"))
    parser.add_argument("--count", type=int, help="problems: 1200 recorded, 300 benched")
    parser.add_argument("--measurements", type=int, default=LIKELY, help="per recorded problem")
    parser.add_argument("--seed", type=int, default=RECORDED)
    parser.add_argument("--work", type=Path, default=Path("build/any_shapes"))
    parser.add_argument("--cells", type=Path, default=CELLS, help="what was recorded, as a table")
    parser.add_argument("--proved", type=Path, default=PROVED, help="which kernels passed all gates")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--summary", type=Path, default=SUMMARY)
    arguments = parser.parse_args()
    arguments.count = arguments.count or {"record": 1200, "bench": 300}.get(arguments.step, 0)
    try:
        with sole_driver(arguments.work):
            {"record": record, "fit": fit_all, "prove": prove, "bench": bench}[arguments.step](arguments)
    except OutblasError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
