"""Shapes that no library has: which kernels are offered for them, how they do, and when they are worth it.

    python scripts/any_shapes.py record --work build/any_shapes     # on a GPU; resumable
    python scripts/any_shapes.py fit --work build/any_shapes        # -> src/outblas/data/any_shape/h200.npz
    python scripts/any_shapes.py bench                              # on a GPU -> results/h200/any_shapes_*.parquet

``record``: ``--count`` random problems; on each those of :func:`outblas.learn.any_shape.general_kernels` that
the policy chooses, ``--measurements`` of them, beside torch.matmul in the same rounds. ``fit``: torch.matmul's time of
these and of the packaged recordings, and the margin that a prediction must clear, chosen on problems that
were kept out. ``bench``: other random problems, by what was fitted alone, against every baseline.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path

from outblas.agents import make_agent
from outblas.any_shape import AnyShape
from outblas.baselines import RIVALS
from outblas.bench import run_bench
from outblas.evaluate import LiveEvaluator, Options
from outblas.learn.any_shape import general_kernels
from outblas.library import Library, Row
from outblas.problem import Problem
from outblas.results import read_result
from outblas.roofline import H200
from outblas.space import gpu_of_device, why_illegal
from outblas.stats import geomean
from outblas.store import Store
from outblas.suites import GRID, LLM_LAYERS, SUITES, suite
from outblas.tune import tune

OUT = Path("results/h200/any_shapes_tn_fp16_fp32_offline.parquet")
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


def bench(arguments: argparse.Namespace) -> None:
    """The decisions of :class:`AnyShape` on problems that were never measured; what it leaves to torch is torch's."""
    problems, found = shapes(arguments.count, BENCHED), AnyShape.load("h200")
    rows = [Row(p, "torch", source="any_shape", plain=found.choose(p, H200)) for p in problems]
    library = Library("h200", tuple(rows))
    run_bench(problems, "any_shapes", library, arguments.out, layouts=("TN", "NN"), baselines=RIVALS)
    result = read_result(arguments.out)
    over = [1.0 if row["fallback"] else row["torch_us"] / row["ours_us"] for row in result.rows]
    told = f"{sum(r > 1 for r in over)} faster, {sum(r < 0.98 for r in over)} below 0.98, worst {min(over):.3f}"
    print(f"{len(over)} shapes: {geomean(over):.3f} over torch.matmul, {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("record", "fit", "bench"))
    parser.add_argument("--count", type=int, help="problems: 1200 recorded, 300 benched")
    parser.add_argument("--measurements", type=int, default=6, help="per recorded problem")
    parser.add_argument("--seed", type=int, default=RECORDED)
    parser.add_argument("--work", type=Path, default=Path("build/any_shapes"))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    arguments.count = arguments.count or {"record": 1200, "bench": 300}.get(arguments.step, 0)
    arguments.work.mkdir(parents=True, exist_ok=True)
    {"record": record, "bench": bench}[arguments.step](arguments)


if __name__ == "__main__":
    main()
