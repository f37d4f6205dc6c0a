"""Question: how much faster do several GPUs tune, or evaluate free kernels, than one?

Command:

    python benchmarks/scale_out.py [--workers local|ray] [--gpus 0,1] [--sample 192] [--budget 16] [--together]
        [--out build/scale_out.json]
    python benchmarks/scale_out.py --fill        # compiles the needed kernels, without a GPU; then --filled

Result file: build/scale_out.json; published are scale_out_local.json, scale_out_ray.json and
scale_out_free.json in results/h200.

The same work is timed with one worker and with all. It is a tuning, or with ``--free`` the proof and timing of every
example of a free kernel on a few problems, in jailed workers. ``--fill`` takes ``--free``, too, and ``--sample``
and ``--budget`` do not apply to it. The aim of ``--free`` is 1.8 with two GPUs on equal work, see
:func:`figures.equal_work.equal_work_ratio`.

A first, untimed run fills the compile cache; ``--filled`` says that this was done. The timed ones then start from
the same state, each into a new store. ``--together`` runs both at the same time, each in a process with GPUs of its
own, on a host with one GPU more. They share its processors, which slows the one with more workers, if any.
Seconds are wall time of the work itself. The seconds in which workers start (imports, CUDA contexts) are kept apart.
The ratio is that of the former. With ray, whose workers compile for themselves, it is that of processes of one cluster.
``ledger`` holds the seconds and counts of every process by phase, as outblas.workers.handler,
outblas.tune.live_evaluator and outblas_lab.pool.gpu_pool name them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from figures.equal_work import equal_work_ratio

from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import write_json
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.core.suites import sample, suite
from outblas.kernels.catalogue import candidates
from outblas.kernels.source import make_source
from outblas.records.provenance import script_command
from outblas.records.store import Store
from outblas.runtime.nvrtc import compile_many
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.tune import tune
from outblas_lab.custom.examples.example_kernels import all_examples
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.static_gate import examine
from outblas_lab.pool.compile_for_pool import BaselineKernels
from outblas_lab.pool.gpu_pool import PoolEvaluator
from outblas_lab.pool.worker_plan import WORKER_KINDS, make_plan, open_pool

H200 = packaged_gpu("h200")
#: Problems of --free.
FREE_PROBLEMS = tuple(Problem(m, n, k) for m, n, k in (
    (512, 512, 512), (1024, 4096, 4096), (16, 4096, 4096), (4096, 4096, 4096),
))  # fmt: skip


def timed(arguments: argparse.Namespace, gpus: tuple[int, ...], command: str) -> dict[str, Any]:
    """Do the work once on ``gpus``; return the seconds of start and of the work, its outcome and its place."""
    if arguments.workers == "ray":
        plan = make_plan("ray", count=len(gpus), ray_address="local")
    else:
        plan = make_plan("local", gpus=gpus)
    start = perf_counter()
    with open_pool(plan) as pool:
        ready = perf_counter()
        figures, tried = evaluated(pool) if arguments.free else tuned(arguments, pool)
        spent = ", ".join(f"{name} {value}" for name, value in figures.items())
        print(f"GPUs {list(gpus)}: {spent}", file=sys.stderr, flush=True)  # a later failure does not hide it
        return {
            "gpus": list(gpus),
            "start_seconds": round(ready - start, 2),
            **figures,
            "measurements": len(tried),
            "passed": sum(e.status is Status.PASSED for e in tried),
            "workers_lost": pool.lost,
            "ledger": {process: account.to_json() for process, account in pool.accounts().items()},
            "provenance": pool.provenance(command),
        }


def tuned(arguments: argparse.Namespace, pool: PoolEvaluator) -> tuple[dict[str, Any], list[Evaluation]]:
    """Tune into a new store; return the seconds and the geometric mean of the speed-ups, and all evaluations."""
    problems = sample(suite(arguments.suite), arguments.sample, arguments.seed, gpu=H200)
    agent = make_agent(arguments.agent, arguments.seed, pool.gpu)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "store.sqlite") as store:
        begun = perf_counter()
        library = tune(problems, agent, arguments.budget, pool, store, "r")
        seconds = perf_counter() - begun
        figures = {"tune_seconds": round(seconds, 2), "geomean_pdl": library.geomean("pdl")}
        return figures, list(store.evaluations("r"))


def evaluated(pool: PoolEvaluator) -> tuple[dict[str, Any], list[Evaluation]]:
    """Evaluate the free kernels; return the seconds, and all evaluations."""
    begun, pairs, found = perf_counter(), free_pairs(), list[Evaluation]()
    for one in pool.evaluate(pairs):
        found.append(one)
        print(f"{len(found)} of {len(pairs)} kernels", file=sys.stderr, flush=True)
    return {"evaluate_seconds": round(perf_counter() - begun, 2)}, found


def free_pairs() -> list[tuple[Problem, FreeKernel]]:
    """Every example on every problem of ``--free`` that it allows."""
    kernels = all_examples().values()
    return [(p, kernel) for p in FREE_PROBLEMS for kernel in kernels if kernel.launch.why_not(p, H200) is None]


def part(arguments: argparse.Namespace, visible_gpus: Sequence[str], command: str) -> subprocess.Popen[str]:
    """:func:`timed` in a process that sees these GPUs alone, under way; it prints what was measured."""
    visible = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus)}
    names = ("workers", "suite", "sample", "budget", "agent", "seed")
    settings = [f"--{name}={getattr(arguments, name)}" for name in names]
    settings += ["--free"] if arguments.free else []
    own = ["--gpus", ",".join(str(i) for i in range(len(visible_gpus))), "--part", command]
    return subprocess.Popen([sys.executable, __file__, *settings, *own], env=visible, stdout=subprocess.PIPE, text=True)


def together(arguments: argparse.Namespace, count: int, command: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The runs on one GPU and on ``count`` others, at the same time."""
    visible = _visible(count + 1)
    running = [part(arguments, visible_gpus, command) for visible_gpus in (visible[:1], visible[1 : count + 1])]
    told = [each.communicate()[0] for each in running]
    if any(each.returncode for each in running):
        raise SystemExit(1)
    one, several = (json.loads(text.splitlines()[-1]) for text in told)
    return one, several


def _visible(count: int) -> list[str]:
    """The GPUs that this process sees, as the environment names them; the first ``count`` where it names none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(count)] if named is None else [part for part in named.split(",") if part.strip()]


def fill(arguments: argparse.Namespace) -> None:
    """Compile the candidates that an agent which learns nothing will propose, and the baselines' kernels; or the free
    kernels."""
    if arguments.free:
        pairs = free_pairs()
        for done, (problem, kernel) in enumerate(pairs, 1):
            examine(problem, kernel, H200)
            print(f"{done} of {len(pairs)} kernels", flush=True)
        return
    problems = sample(suite(arguments.suite), arguments.sample, arguments.seed, gpu=H200)
    sources = dict.fromkeys(make_source(*pair) for pair in BaselineKernels(H200).of(problems))
    agent = make_agent(arguments.agent, arguments.seed, H200)
    for problem in problems:
        for config in agent.propose(problem, candidates(problem, H200), [], arguments.budget):
            sources[make_source(problem, config)] = None
    for done, _ in enumerate(compile_many(list(sources), "sm_90a"), 1):
        if done % 100 == 0 or done == len(sources):
            print(f"{done} of {len(sources)} kernels", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", choices=WORKER_KINDS, default="local")
    parser.add_argument("--gpus", default="0,1", help="two or more, separated by commas; of ray: as many of any")
    parser.add_argument("--suite", default="grid1000")
    parser.add_argument("--sample", type=int, default=192, help="problems")
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--agent", default="heuristic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--free", action="store_true", help="evaluate free kernels instead of a tuning")
    parser.add_argument("--together", action="store_true", help="at the same time, on a host with one GPU more")
    parser.add_argument("--fill", action="store_true", help="only compile the needed kernels; no GPU is needed")
    parser.add_argument("--filled", action="store_true", help="the compile cache has the kernels")
    parser.add_argument("--out", type=Path, default=Path("build/scale_out.json"))
    parser.add_argument("--part", metavar="COMMAND", help=argparse.SUPPRESS)  # one timed run; prints what was measured
    arguments = parser.parse_args()
    gpus = tuple(int(part) for part in arguments.gpus.split(","))
    if arguments.part:
        print(json.dumps(timed(arguments, gpus, arguments.part)))
        return
    if len(gpus) < 2:
        parser.error("--gpus: two or more are compared with one")
    if arguments.fill:
        fill(arguments)
        return
    if arguments.together and gpus != tuple(range(len(gpus))):
        parser.error("--together takes GPU 0, and as many behind it: --gpus 0,1; CUDA_VISIBLE_DEVICES names others")
    if arguments.together and len(_visible(len(gpus) + 1)) <= len(gpus):
        parser.error(f"--together: CUDA_VISIBLE_DEVICES names fewer than {len(gpus) + 1} GPUs")
    command = script_command("benchmarks/scale_out.py")
    if not arguments.filled:
        timed(arguments, gpus, command)
    if arguments.together:
        one, several = together(arguments, len(gpus), command)
    else:
        one, several = timed(arguments, gpus[:1], command), timed(arguments, gpus, command)
    work = "evaluate" if arguments.free else "tune"
    ratio = one[f"{work}_seconds"] / several[f"{work}_seconds"]
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "part", "fill")}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"settings": settings, "ratio": ratio, "one": one, "several": several}
    write_json(arguments.out, result)
    tasks = all(any("task" in each["seconds"] for each in run["ledger"].values()) for run in (one, several))
    for run in (one, several):
        seconds = f"{run['start_seconds']:.1f} s to start, {run[f'{work}_seconds']:.1f} s to {work}"
        print(f"GPUs {run['gpus']}: {seconds}, {run['passed']} of {run['measurements']} passed")
        for process, account in run["ledger"].items():
            spent = [f"{name} {seconds:.1f} s" for name, seconds in account["seconds"].items() if seconds >= 0.05]
            print(f"  {process}: {', '.join([*spent, *(f'{n} {what}' for what, n in account['counts'].items())])}")
    equal = f", {equal_work_ratio(one, several):.2f}x on equal work" if tasks else ""
    print(f"{len(gpus)} GPUs are {ratio:.2f}x as fast as one{equal}; {arguments.out}")


if __name__ == "__main__":
    main()
