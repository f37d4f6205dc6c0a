"""Make everything that is measured, on a GPU: recording, library, published results. Resumable.

    python scripts/regenerate.py --work build/h200 [--steps record,tune,confirm,bench,demote]

record   the catalogue over grid1000 TN, fp16, fp32 accumulate    -> <work>/recording/
tune     the recording's best two of each launch option, re-timed -> <work>/library.json
confirm  what won by little, once more in a fresh process: a kernel that is not ahead there is not kept
bench    the library against every baseline, fresh process        -> <work>/grid1000_tn_fp16_fp32_offline.parquet
demote   (only when asked for) what was not surely ahead in the bench is not kept; then bench again

Then copy them to src/outblas/data/{recordings/h200,libraries} and results/h200, and run
``outblas results --write``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from outblas.agents.recorded import Recorded
from outblas.bench import run_bench
from outblas.evaluate import LiveEvaluator, Options
from outblas.library import Choice, Library
from outblas.provenance import collect
from outblas.record import run_record
from outblas.recording import Recording
from outblas.results import read_result
from outblas.space import catalogue, gpu_of_device
from outblas.store import Store
from outblas.suites import suite
from outblas.tune import tune

SUITE, LAYOUT, DTYPE, ACC = "grid1000", "TN", "fp16", "fp32"
STEM = f"{SUITE}_{LAYOUT}_{DTYPE}_{ACC}".lower()
TUNE_BUDGET, TUNE_ROUNDS, BENCH_ROUNDS = 4, 11, 11
#: A win below this in tuning is measured again before it is installed.
CONFIRM_BELOW = 1.04
SEEDS = {"tune": 2, "confirm": 3, "bench": 4}


def printer(what: str) -> Callable[..., None]:
    """Progress in one line about every 5 seconds, with an estimate of the rest."""
    begin = time.monotonic()
    last = [begin]

    def progress(done: int, total: int, note: object = "") -> None:
        now = time.monotonic()
        if now - last[0] > 5 or done == total:
            last[0] = now
            left = (now - begin) / max(1, done) * (total - done)
            print(f"{what}: {done}/{total}, about {left:.0f} s left {note}", flush=True)

    return progress


def record(work: Path, gpu_index: int) -> None:
    run_record(suite(SUITE), SUITE, catalogue(), work / "recording", gpu_index, printer("record"))


def tune_recorded(work: Path, gpu_index: int) -> None:
    gpu = gpu_of_device(gpu_index)
    agent = Recorded(0, gpu, Recording.load(work / "recording"))
    agent.name = "recorded"
    options = Options(gpu_index, gpu, rounds=TUNE_ROUNDS, seed=SEEDS["tune"])
    with LiveEvaluator(gpu_index, options) as evaluator, Store(work / "tune.sqlite") as store:
        library = tune(suite(SUITE), agent, TUNE_BUDGET, evaluator, store, "tune", printer("tune"))
    provenance = {**library.provenance, **collect("scripts/regenerate.py tune", gpu_index)}
    replace(library, provenance=provenance).save(work / "library.json")


def confirm(work: Path, gpu_index: int) -> None:
    """Drop the choices that won by little in tuning and do not win in a run of their own."""
    library = Library.load(work / "library.json")
    doubtful = [row for row in library.rows if any(_is_close(row.choice(pdl)) for pdl in (False, True))]
    if not doubtful:
        print("confirm: nothing won by little", flush=True)
        return
    path = work / "confirm.parquet"
    run_bench(
        [row.problem for row in doubtful], SUITE, work / "library.json", path, (gpu_index,), "offline", (LAYOUT,),
        BENCH_ROUNDS, True, printer("confirm"), seed=SEEDS["confirm"],
    )  # fmt: skip
    lost = [row for row in read_result(path).rows if not row["fallback"] and row["low"] <= 1.0]
    _without(library, lost).save(work / "library.json")
    print(f"confirm: {len(doubtful)} problems measured again, {len(lost)} kernels not kept", flush=True)


def demote(work: Path, gpu_index: int) -> None:
    """Keep what is surely ahead in every bench made so far; the bench is then to be made again (needs no GPU).

    Some kernels are 3-6% faster or slower from process to process (where their operands lie in memory), which no
    interval from one process knows. The benches made before stay beside the new one, numbered.
    """
    path = work / f"{STEM}_offline.parquet"
    earlier = len(list(work.glob(f"{STEM}_offline_[0-9]*.parquet")))
    lost = [row for row in read_result(path).rows if not row["fallback"] and row["low"] <= 1.0]
    _without(Library.load(work / "library.json"), lost).save(work / "library.json")
    path.rename(work / f"{STEM}_offline_{earlier + 1}.parquet")
    print(f"demote: {len(lost)} kernels not kept", flush=True)


def _without(library: Library, lost: list[dict[str, Any]]) -> Library:
    """The library less the kernels of these result rows: those problems use the baseline."""
    keys = {(row["m"], row["n"], row["k"], row["pdl"]) for row in lost}
    rows = []
    for row in library.rows:
        p = row.problem
        for pdl, name in ((False, "plain"), (True, "pdl")):
            if (p.m, p.n, p.k, pdl) in keys:
                row = replace(row, **{name: None})
        rows.append(row)
    return replace(library, rows=tuple(rows))


def _is_close(choice: Choice | None) -> bool:
    return choice is not None and choice.speedup < CONFIRM_BELOW


def bench(work: Path, gpu_index: int) -> None:
    out = work / f"{STEM}_offline.parquet"
    run_bench(
        suite(SUITE), SUITE, work / "library.json", out, (gpu_index,), "offline", (LAYOUT,), BENCH_ROUNDS, True,
        printer("bench"), seed=SEEDS["bench"],
    )  # fmt: skip


DEFAULT_STEPS = {"record": record, "tune": tune_recorded, "confirm": confirm, "bench": bench}
STEPS = {**DEFAULT_STEPS, "demote": demote}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gpu-device-id", type=int, default=0)
    parser.add_argument("--steps", default=",".join(DEFAULT_STEPS))
    parser.add_argument("--here", action="store_true", help="run the one step given in this process")
    options = parser.parse_args()
    names = options.steps.split(",")
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        parser.error(f"unknown steps {unknown}; expected some of {list(STEPS)}")
    options.work.mkdir(parents=True, exist_ok=True)
    for name in names:
        begin = time.monotonic()
        if options.here:
            STEPS[name](options.work, options.gpu_device_id)
        else:  # each step in a fresh process, so that no state of one helps the next
            command = [sys.executable, __file__, "--here", "--steps", name, "--work", str(options.work)]
            subprocess.run([*command, "--gpu-device-id", str(options.gpu_device_id)], check=True)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
