"""Question: does the ranking of free kernels that a search records hold in one direct, interleaved run?

Command:

    python benchmarks/free_kernels.py --compile-only [--carried build/free_kernels]     # anywhere, no GPU
    python benchmarks/free_kernels.py [--carried build/free_kernels]                    # on a GPU

Result file: results/<gpu>/free_kernels.jsonl (evaluations) and results/<gpu>/free_kernels.json (the ranking).

Every example that a problem's extents allow is evaluated as in a search: proof in jailed workers, then timing in
batches against the baselines. The evaluations are appended to ``--out`` (JSON lines of
outblas_lab.jail.evaluation_file). All kernels that passed on a problem are then timed together. The order by recorded
speed-up is compared with the order by direct time. Two kernels may change places only if their intervals overlap. The
result is ``--ranking``. An interrupted run of either part resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rivals.carried_builds import CarriedBuilds, CarriedLiveEvaluator

from outblas.core.errors import CompileError, OutblasError
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing
from outblas.core.files import write_json
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.core.rivals import LT_AUTO, RIVALS
from outblas.core.stats import bootstrap_median
from outblas.judge.baselines import make_baselines
from outblas.records.provenance import collect_provenance, script_command
from outblas.records.results import result_file
from outblas_lab.custom.examples.example_kernels import all_examples
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import build as free_build
from outblas_lab.jail.evaluation_file import Recorder, load
from outblas_lab.jail.jailed_evaluator import FreeOptions

H200 = packaged_gpu("h200")

PROBLEMS = ("512_512_512", "1024_4096_4096", "16_4096_4096", "4096_4096_4096")
#: Rounds of the recorded evaluations, and of the direct run.
ROUNDS, DIRECT_ROUNDS = 9, 15
#: Seconds without a word from a worker that count as a hang; kernels of form ``device`` that share one.
STEP_S, BATCH = 60.0, 16
#: A kernel that takes this multiple of the fastest baseline's time gets few rounds, and none in the direct run. Its
#: place is clear, and one call of it takes as long as thousands of calls of the others.
HOPELESS = 50.0
_FORMAT = 1


def compile_all(kernels: Mapping[str, FreeKernel], carried: CarriedBuilds, problem: Problem) -> int:
    """Every kernel to the folder; how many the compiler refused."""
    begun, failed = time.perf_counter(), 0
    for done, (name, kernel) in enumerate(kernels.items(), 1):
        try:
            built = carried.build(kernel, problem)
            word = f"{built.cubin.registers} registers, {built.cubin.facts.hgmma} HGMMA, {built.cubin.facts.hmma} HMMA"
        except CompileError as error:
            word, failed = f"refused: {error.wrong}", failed + 1
        _progress(done, len(kernels), begun, f"{name}: {word}")
    return failed


def record(kernels: Mapping[str, FreeKernel], problems: Sequence[Problem], arguments: argparse.Namespace) -> None:
    """Evaluate what ``--out`` does not have yet. A kernel that has passed in full once is proved on the timed operands
    of further problems only."""
    from outblas.judge.bench_cell import Options
    from outblas.runtime.device import gpu_of_device

    gpu, names = gpu_of_device(0), {kernel: name for name, kernel in kernels.items()}
    known = load(arguments.out).evaluations if arguments.out.exists() else ()
    seen = {(e.problem, e.config) for e in known}
    proved = {e.config.name for e in known if e.status is Status.PASSED and isinstance(e.config, FreeKernel)}
    todo = {p: [k for k in kernels.values() if (p, k) not in seen and not k.launch.why_not(p, gpu)] for p in problems}
    total, done, begun = sum(map(len, todo.values())), 0, time.perf_counter()
    with Recorder(arguments.out, gpu, collect_provenance(script_command("benchmarks/free_kernels.py"))) as recorder:
        for problem, wanted in todo.items():
            options = Options(0, gpu, rounds=ROUNDS, baselines=RIVALS, proved=frozenset(proved), drop_beyond=HOPELESS)
            live = CarriedLiveEvaluator(options, STEP_S, FreeOptions(batch=BATCH))
            live.carried = CarriedBuilds(arguments.carried, gpu)
            with closing(live):
                for evaluation, _ in live.evaluate(problem, wanted):
                    recorder.append(evaluation)
                    done += 1
                    assert isinstance(evaluation.config, FreeKernel)
                    if evaluation.status is Status.PASSED:
                        proved.add(evaluation.config.name)
                    _progress(done, total, begun, f"{problem.mnk} {names[evaluation.config]}: {_word(evaluation)}")


def rank(kernels: Mapping[str, FreeKernel], problems: Sequence[Problem], arguments: argparse.Namespace) -> bool:
    """The direct run of every problem, to ``--ranking``; whether the orders agree everywhere."""
    names = {kernel: name for name, kernel in kernels.items()}
    recorded = load(arguments.out)
    previous = _read(arguments.ranking)
    rows = []
    for problem in problems:
        passed = {
            names[e.config]: e
            for e in recorded.of(problem)
            if e.config in names and e.speedup is not None and e.speedup.ratio * HOPELESS >= 1.0
        }
        if not passed:
            continue
        row = previous.get(problem.key)
        if row is None or set(row["kernels"]) != set(passed):
            row = _row(problem, passed, _direct(problem, {n: kernels[n] for n in passed}, arguments.carried))
        rows.append(row)
        print(f"{problem.mnk}: {len(passed)} kernels, {_agreement(row)}", flush=True)
    text = {
        "format": _FORMAT,
        "provenance": collect_provenance(script_command("benchmarks/free_kernels.py")),
        "recorded": recorded.provenance,
        "problems": rows,
        "agree": all(not row["contradictions"] for row in rows),
    }
    write_json(arguments.ranking, text)
    return bool(text["agree"])


def contradictions(
    recorded: Mapping[str, Speedup], direct: Mapping[str, tuple[float, float, float]]
) -> tuple[list[list[str]], list[list[str]]]:
    """Pairs that stand the other way round in the two orders: (those whose intervals do not overlap, those that tie).

    Args:
        recorded: name -> speed-up with its interval. direct: name -> (median, low, high), microseconds.
    """
    against, tied = [], []
    listed = sorted(recorded, key=lambda name: -recorded[name].ratio)
    for i, ahead in enumerate(listed):
        for behind in listed[i + 1 :]:
            if direct[ahead][0] <= direct[behind][0]:
                continue
            a, b = recorded[ahead], recorded[behind]
            overlap = a.low <= b.high or direct[ahead][1] <= direct[behind][2]
            (tied if overlap else against).append([ahead, behind])
    return against, tied


def _direct(problem: Problem, kernels: Mapping[str, FreeKernel], folder: Path) -> dict[str, Timing]:
    """All of them, and the autotuned baseline, in the same rounds of this process: they are our own texts."""
    from rivals.offline_times import TimingEffort, time_offline

    from outblas.runtime.device import gpu_of_device
    from outblas_lab.jail.free_launch import load as load_kernel

    gpu = gpu_of_device(0)
    carried = CarriedBuilds(folder, gpu)
    with tempfile.TemporaryDirectory() as scratch:
        entries: dict[str, Any] = {
            name: load_kernel(carried.build(kernel, problem), scratch, None, gpu) for name, kernel in kernels.items()
        }
        return time_offline({**make_baselines(0, (LT_AUTO,)), **entries}, problem, effort=TimingEffort(DIRECT_ROUNDS))


def _row(problem: Problem, passed: Mapping[str, Evaluation], direct: Mapping[str, Timing]) -> dict[str, Any]:
    speedups = {name: e.speedup for name, e in passed.items() if e.speedup is not None}
    intervals = {name: bootstrap_median(direct[name].samples_us) for name in speedups}
    against, tied = contradictions(speedups, intervals)
    return {
        "problem": problem.key,
        "kernels": {
            name: {
                "kernel": passed[name].config.name,  # type: ignore[union-attr]
                "recorded_us": passed[name].timing.median_us,  # type: ignore[union-attr]
                "speedup": dict(vars(speedup)),
                "direct_us": dict(zip(("median", "low", "high"), intervals[name], strict=True)),
            }
            for name, speedup in sorted(speedups.items(), key=lambda item: -item[1].ratio)
        },
        "lt_auto_us": direct[LT_AUTO].median_us,
        "contradictions": against,
        "ties": tied,
    }


def _read(path: Path) -> dict[str, Any]:
    """Return the rows of an earlier run by problem; empty for a missing file or another format."""
    if not path.exists():
        return {}
    data = json.loads(path.read_text())
    return {row["problem"]: row for row in data["problems"]} if data.get("format") == _FORMAT else {}


def _agreement(row: Mapping[str, Any]) -> str:
    if row["contradictions"]:
        return "the orders disagree: " + ", ".join(" before ".join(pair) for pair in row["contradictions"])
    return f"the orders agree, {len(row['ties'])} pairs tie"


def _word(evaluation: Evaluation) -> str:
    if evaluation.timing is None or evaluation.speedup is None:
        return f"{evaluation.status} {evaluation.detail[:120]}"
    return f"{evaluation.timing.median_us:.2f} us, {evaluation.speedup.ratio:.3f} over {evaluation.speedup.baseline}"


def _progress(done: int, total: int, begun: float, text: str) -> None:
    left = (time.perf_counter() - begun) / done * (total - done)
    print(f"[{done}/{total}, {left:.0f} s left] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), help="M_N_K, all TN fp16 fp32")
    parser.add_argument("--kernels", nargs="+", help="names of examples; all of them without")
    parser.add_argument("--carried", type=Path, default=Path("build/free_kernels"), help="folder of compiled kernels")
    parser.add_argument("--out", type=Path, default=result_file("free_kernels.jsonl"))
    parser.add_argument("--ranking", type=Path, default=result_file("free_kernels.json"))
    parser.add_argument("--compile-only", action="store_true", help="fill the folder, and stop")
    parser.add_argument("--patience", type=float, help="seconds that a compilation may take, on a busy machine")
    arguments = parser.parse_args()
    kernels = all_examples()
    kernels = {name: kernels[name] for name in arguments.kernels or kernels}
    problems = [Problem(*map(int, mnk.split("_"))) for mnk in arguments.problems]
    if arguments.patience:  # the package's own texts, whose compilation needs no short limit
        free_build.PLAIN_LIMITS = replace(free_build.PLAIN_LIMITS, seconds=arguments.patience)
        free_build.CUTLASS_LIMITS = replace(free_build.CUTLASS_LIMITS, seconds=arguments.patience)
    try:
        if arguments.compile_only:
            sys.exit(1 if compile_all(kernels, CarriedBuilds(arguments.carried, H200), problems[0]) else 0)
        record(kernels, problems, arguments)
        sys.exit(0 if rank(kernels, problems, arguments) else 1)
    except OutblasError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
