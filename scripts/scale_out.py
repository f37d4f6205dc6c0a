"""How much faster several GPUs tune than one: the same tuning, timed with one worker and with all.

    python scripts/scale_out.py [--workers local|ray] [--gpus 0,1] [--sample 192] [--budget 16]
        [--out build/scale_out.json]

A first tuning, untimed, fills the compile cache; the timed ones then start from the same state, each into a new store.
Seconds are wall time of `tune` itself, and apart from it those in which workers start (imports, CUDA contexts). The
ratio is that of the former; with ray, whose workers compile for themselves, it is that of processes of one cluster.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from outblas.agents import make_agent
from outblas.evaluation import Status
from outblas.files import write_atomic
from outblas.store import Store
from outblas.suites import sample, suite
from outblas.tune import tune
from outblas.workers import make_plan, open_pool
from outblas.workers.plan import KINDS


def timed(arguments: argparse.Namespace, gpus: tuple[int, ...], command: str) -> dict[str, Any]:
    """One tuning on ``gpus``: seconds of start and of tuning, what came of it, and where."""
    problems = sample(suite(arguments.suite), arguments.sample, arguments.seed)
    if arguments.workers == "ray":
        plan = make_plan("ray", count=len(gpus), ray_address="local")
    else:
        plan = make_plan("local", gpus=gpus)
    start = perf_counter()
    with (
        open_pool(plan) as pool,
        tempfile.TemporaryDirectory() as folder,
        Store(Path(folder) / "store.sqlite") as store,
    ):
        ready = perf_counter()
        library = tune(
            problems, make_agent(arguments.agent, arguments.seed, pool.gpu), arguments.budget, pool, store, "r"
        )
        seconds = perf_counter() - ready
        tried = list(store.evaluations("r"))
        return {
            "gpus": list(gpus),
            "start_seconds": round(ready - start, 2),
            "tune_seconds": round(seconds, 2),
            "measurements": len(tried),
            "passed": sum(e.status is Status.PASSED for e in tried),
            "workers_lost": pool.lost,
            "geomean_pdl": library.geomean("pdl"),
            "provenance": pool.provenance(command),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", choices=KINDS, default="local")
    parser.add_argument("--gpus", default="0,1", help="two or more, separated by commas; of ray: as many of any")
    parser.add_argument("--suite", default="grid1000")
    parser.add_argument("--sample", type=int, default=192, help="problems")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--agent", default="heuristic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/scale_out.json"))
    arguments = parser.parse_args()
    gpus = tuple(int(part) for part in arguments.gpus.split(","))
    if len(gpus) < 2:
        parser.error("--gpus: two or more are compared with one")
    command = shlex.join(["python", "scripts/scale_out.py", *sys.argv[1:]])
    timed(arguments, gpus, command)  # fills the compile cache
    one, several = timed(arguments, gpus[:1], command), timed(arguments, gpus, command)
    ratio = one["tune_seconds"] / several["tune_seconds"]
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"settings": settings, "ratio": ratio, "one": one, "several": several}
    write_atomic(arguments.out, (json.dumps(result, indent=1) + "\n").encode())
    for run in (one, several):
        seconds = f"{run['start_seconds']:.1f} s to start, {run['tune_seconds']:.1f} s to tune"
        print(f"GPUs {run['gpus']}: {seconds}, {run['passed']} of {run['measurements']} passed")
    print(f"{len(gpus)} GPUs are {ratio:.2f}x faster than one; {arguments.out}")


if __name__ == "__main__":
    main()
