"""Make everything that is measured, on a GPU: recording, library, published results. Resumable.

    python scripts/regenerate.py --work build/h200
    python scripts/regenerate.py --work build/h200 --steps demote,bench --modes offline   # until nothing is lost

A table is SUITE:LAYOUT:DTYPE:ACC; --tables names some, by default all that are published. A STEM is a table in
small letters with underscores. Steps, each for every table, each in a process of its own:

record   the catalogue over the first table only, or --recorded ones  -> <work>/recording/
tune     what the packaged library has (but --from-nothing), and then, for a recorded table: the recording's best
         two of each launch option, timed again; for another: what won on the same M, N, K in the tables before it,
         taking turns with the ranking model's choices
                                                              -> <work>/library.json, one for all tables
borrow   what won on shapes nearby; the better kernel stays
refine   what is near each row's best candidates (L2 hints, order of tiles, parts of K); the better kernel stays
confirm  what won by little, once more in a fresh process: a kernel that is not ahead there is not kept
bench    the library against every baseline, fresh process    -> <work>/STEM_MODE.parquet
         modes: offline; offline_cold and server (a stratified sample, requests at a fixed rate) of --extra tables
again    (only when asked for) problems that fall back or win by little: kernels that were not tried yet, as the
         ranking model has them; a better one is installed. Then confirm and bench again
settle   (only when asked for, instead of demote and another bench) what was not surely ahead in the offline bench
         is not kept, and its rows of that bench fall back; they keep what was measured. What autotuning chose is
         named no longer where torch was faster by more than 1%
demote   (only when asked for) what was not surely ahead in the offline bench is not kept; then bench again

``--begin-with src/outblas/data/libraries/h200.json OTHER/library.json --tables llm:TN:bf16:fp32 --steps bench,settle
--modes offline`` goes on with tables that were tuned elsewhere. ``--fill-from OTHER/library.json`` gives
rows that fall back the kernel that another search found for them; bench and settle decide whether it stays.

What is done already is not done again; a step that was killed goes on where it was. The seconds of every step are
printed and written into the library's provenance (with --from-nothing into <work>/retune.json, too). Then copy
<work>/recording/*.parquet and library.json to src/outblas/data/{recordings,libraries}, the benches (and retune.json) to
results/h200, and run ``outblas results --write``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from regenerate_search import again, borrow, refine, tune_table
from regenerate_work import SEEDS, TABLES, Work, begin_with, fill_from, printer, proved

from outblas.baselines import RIVALS
from outblas.bench import run_bench
from outblas.config import LAUNCHES, Launch
from outblas.device import gpu_of_device
from outblas.errors import OutblasError, UsageError
from outblas.files import sole_driver, write_json
from outblas.kernels.catalogue import catalogue
from outblas.library import Choice, Library
from outblas.problem import Problem
from outblas.record import run_record
from outblas.report.retuned import FILE as RETUNE
from outblas.report.retuned import retune_record, seconds_by_step
from outblas.results import MODES
from outblas.source import kernels_sha
from outblas.suites import Table, sample
from outblas.tables import behind, fall_back, is_of, named_by, of_table, with_rows

BENCH_ROUNDS = 11
#: A win below this in tuning is measured again before it is installed.
CONFIRM_BELOW = 1.04
SERVER_SAMPLE, SERVER_QPS = 100, 200.0


def record(work: Work, table: Table) -> None:
    if any(set(table.problems()) <= set(recording.problems) for recording in work.recorded()):
        print(f"record {table}: done before", flush=True)
        return
    progress = printer(f"record {table}")
    run_record(table.problems(), table.suite, catalogue(), work.recording, work.gpu_index, progress)


def confirm(work: Work, table: Table) -> None:
    """Drop the choices that won by little in tuning and do not win in a run of their own."""
    library = work.load()
    part = of_table(library, table)
    if "confirmed" in part.provenance:
        print(f"confirm {table}: done before", flush=True)
        return
    doubtful = [row.problem for row in part.rows if any(map(_is_close, map(row.choice, LAUNCHES)))]
    lost: list[tuple[Problem, Launch]] = []
    if doubtful:
        path = work.path / f"{table.stem}_confirm.parquet"
        benched(
            f"confirm {table}", work, table, doubtful, part, path, "offline", seed=SEEDS["confirm"], baselines=RIVALS
        )
        lost = behind(path)
    about = {**part.provenance, "confirmed": len(doubtful), "not_confirmed": len(lost)}
    with_rows(library.without(lost), (), table, about).save(work.library)
    print(f"confirm {table}: {len(doubtful)} problems measured again, {len(lost)} kernels not kept", flush=True)


def bench(work: Work, table: Table, mode: str) -> None:
    out, part, problems = work.result(table, mode), of_table(work.load(), table), table.problems()
    if mode == "server":
        problems = sample(problems, min(SERVER_SAMPLE, len(problems)), gpu=gpu_of_device(work.gpu_index))
    if out.exists() and is_of(out, part, problems):
        print(f"bench {table} {mode}: done before", flush=True)
        return
    rate = SERVER_QPS if mode == "server" else None
    benched(f"bench {table} {mode}", work, table, problems, part, out, mode, seed=SEEDS["bench"], target_qps=rate)


def benched(
    what: str, work: Work, table: Table, problems: Sequence[Problem], part: Library, out: Path, mode: str, **more: Any
) -> None:
    """A bench that goes on where it was killed, but begins anew where the library has changed since."""

    def bench_once(resume: bool) -> None:
        run_bench(
            problems, table.suite, part, out, (work.gpu_index,), mode, (table.layout,), BENCH_ROUNDS, resume,
            printer(what), proved=proved(work, table), **more,
        )  # fmt: skip

    try:
        bench_once(resume=True)
    except UsageError as error:
        print(f"{what}: begins anew: {error}", flush=True)
        bench_once(resume=False)


def demote(work: Work, table: Table) -> None:
    """Keep what is surely ahead in every bench made so far; the bench is then to be made again (needs no GPU).

    Some kernels are 3-6% faster or slower from process to process (where their operands lie in memory), which no
    interval from one process knows. A bench in which a kernel was lost stays beside the new one, numbered. Only
    offline benches count: they are what the kernels are chosen by; in the other modes a loss is shown.
    """
    path = work.result(table, "offline")
    lost = behind(path) if path.exists() else []
    if lost:
        work.load().without(lost).save(work.library)
        earlier = len(list(work.path.glob(f"{path.stem}_[0-9]*.parquet")))
        path.rename(path.with_name(f"{path.stem}_{earlier + 1}.parquet"))
    print(f"demote {table}: {len(lost)} kernels not kept", flush=True)


def settle(work: Work, table: Table) -> None:
    """Let the offline bench be the last: what was not surely ahead in it falls back, in the library and in its rows.

    Such a row counts as 1, as a fall-back does, and still tells its kernel, times and speed-up (needs no GPU).
    """
    path = work.result(table, "offline")
    lost = set(behind(path))
    named_by(work.load().without(lost), path).save(work.library)
    for other in TABLES:  # tables share problems, and the library has one row for each
        if work.result(other, "offline").exists():
            fall_back(work.result(other, "offline"), lost)
    print(f"settle {table}: {len(lost)} kernels not kept", flush=True)


def _is_close(choice: Choice | None) -> bool:
    return choice is not None and choice.speedup < CONFIRM_BELOW


# --- the run -------------------------------------------------------------------------------------

Step = Callable[..., None]
DEFAULT_STEPS: dict[str, Step] = {
    "record": record,
    "tune": tune_table,
    "borrow": borrow,
    "refine": refine,
    "confirm": confirm,
    "bench": bench,
}
STEPS: dict[str, Step] = {**DEFAULT_STEPS, "demote": demote, "settle": settle, "again": again}
#: What makes the library; the rest looks at it.
MAKING = ("record", "tune", "borrow", "refine", "again", "confirm")


def jobs(
    steps: Sequence[str], tables: Sequence[Table], modes: Sequence[str], extra: Sequence[Table],
    recorded: Sequence[Table] = TABLES[:1],
) -> list[list[str]]:  # fmt: skip
    """``[step, table]`` or ``["bench", table, mode]``, in the order in which they are to run."""
    found: list[list[str]] = []
    for step in steps:
        if step == "record":
            found += [[step, str(table)] for table in tables if table in recorded]
        elif step == "bench":
            found += [[step, str(t), mode] for mode in modes for t in tables if mode == "offline" or t in extra]
        else:
            found += [[step, str(table)] for table in tables]
    return found


def run_job(work: Work, job: Sequence[str]) -> None:
    """One job in this process."""
    step, table, *mode = job
    work.check()
    STEPS[step](work, Table.parse(table), *mode)


def work_through(work: Work, listed: Sequence[Sequence[str]]) -> None:
    """The jobs one after the other, each in a fresh process, so that no state of one helps the next."""
    seconds: dict[str, float] = {}
    for job in listed:
        begin = monotonic()
        base = [sys.executable, __file__, "--work", str(work.path), "--gpu-device-id", str(work.gpu_index)]
        base += ["--from-nothing"] if work.from_nothing else []
        try:
            subprocess.run([*base, "--here", *job], check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{' '.join(job)} failed with status {error.returncode}; the same command goes on where it was")
        finally:
            spent = monotonic() - begin
            seconds = note_seconds(work, job, spent)
            print(f"{' '.join(job)}: {spent:.0f} s", flush=True)
    print(publish_seconds(work, seconds), flush=True)


def note_seconds(work: Work, job: Sequence[str], seconds: float) -> dict[str, float]:
    """Add to the seconds of a job, over all times that it was begun; returns those of every job."""
    path = work.path / "seconds.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    name = " ".join(job)
    known[name] = round(known.get(name, 0.0) + seconds, 1)
    write_json(path, known)
    return dict(known)


def publish_seconds(work: Work, seconds: dict[str, float]) -> str:
    """Write the seconds into the library's provenance, and a record of it if it is from nothing; returns the totals."""
    made_in = {name: s for name, s in seconds.items() if name.split()[0] in MAKING}
    making = sum(made_in.values())
    if work.library.exists():
        library = Library.load(work.library)
        provenance = {**library.provenance, "seconds": seconds, "seconds_of_making": round(making, 1)}
        provenance.setdefault("kernels", kernels_sha())  # another's, brought here, is not of these kernels by that
        library = replace(library, provenance=provenance)
        library.save(work.library)
        if work.from_nothing:
            write_json(work.path / RETUNE, retune_record(library, made_in))
    each = ", ".join(f"{step} {spent:.0f} s" for step, spent in seconds_by_step(seconds).items())
    return f"{each}; the library took {making / 60:.1f} GPU minutes, all {sum(seconds.values()) / 60:.1f}"


def named(text: str, known: Sequence[str], option: str) -> list[str]:
    """Words separated by commas, each one of ``known``; raises UsageError."""
    words = text.split(",")
    unknown = [word for word in words if word not in known]
    if unknown:
        raise UsageError(f"{option} {','.join(unknown)}", f"some of {', '.join(known)}", "correct it")
    return words


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gpu-device-id", type=int, default=0)
    parser.add_argument("--tables", default=",".join(map(str, TABLES)))
    parser.add_argument("--steps", default=",".join(DEFAULT_STEPS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--extra", default=str(TABLES[0]), help="tables benched in the modes beside offline too")
    parser.add_argument("--recorded", default=str(TABLES[0]), help="tables that step record measures")
    parser.add_argument("--from-nothing", action="store_true", help="begin without the packaged library's kernels")
    parser.add_argument(
        "--begin-with", nargs="+", type=Path, default=(), metavar="FILE",
        help="libraries whose tables a new directory has from the start, the first that has a problem counts",
    )  # fmt: skip
    parser.add_argument(
        "--fill-from", nargs="+", type=Path, default=(), metavar="FILE",
        help="libraries whose kernels rows that fall back take; the first that has one counts",
    )  # fmt: skip
    parser.add_argument("--here", nargs="+", metavar="WORD", help=argparse.SUPPRESS)  # one job, in this process
    options = parser.parse_args(arguments)
    work = Work(options.work, options.gpu_device_id, options.from_nothing)
    work.path.mkdir(parents=True, exist_ok=True)
    if options.here:
        try:
            run_job(work, options.here)
        except OutblasError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt as error:
            sys.exit(f"interrupted{': ' if str(error) else ''}{error}")
        return
    try:
        tables, extra, recorded = (
            [Table.parse(text) for text in listed.split(",")]
            for listed in (options.tables, options.extra, options.recorded)
        )
        steps, modes = named(options.steps, list(STEPS), "--steps"), named(options.modes, MODES, "--modes")
    except OutblasError as error:
        parser.error(str(error))
    try:
        with sole_driver(work.path):
            begin_with(work, options.begin_with)
            fill_from(work, options.fill_from, tables)
            work_through(work, jobs(steps, tables, modes, extra, recorded))
    except OutblasError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where it was")


if __name__ == "__main__":
    main()
