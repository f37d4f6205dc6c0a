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

What is done already is not done again; a step that was killed goes on where it was. The seconds of every step are
printed and written into the library's provenance. Then copy <work>/recording/*.parquet and library.json to
src/outblas/data/{recordings,libraries}, the benches to results/h200, and run ``outblas results --write``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from outblas.agents.base import Agent
from outblas.agents.recorded import Recorded
from outblas.agents.transfer import Transfer
from outblas.baselines import RIVALS
from outblas.bench import run_bench
from outblas.borrow import borrowed
from outblas.config import LAUNCHES, KernelConfig, Launch, config_name
from outblas.errors import OutblasError, UsageError
from outblas.evaluate import LiveEvaluator, Options
from outblas.evaluation import Evaluation, Status
from outblas.files import write_json
from outblas.library import Choice, Library
from outblas.problem import Problem
from outblas.provenance import collect, toolchain
from outblas.record import run_record
from outblas.recording import CODE, Recording
from outblas.results import MODES
from outblas.roofline import Gpu
from outblas.second_search import Before, InOrder, Untried, near_the_best, tried_by_problem, winners, worth_trying
from outblas.source import kernels_sha
from outblas.space import catalogue, gpu_of_device, why_illegal
from outblas.store import Store
from outblas.suites import Table, sample
from outblas.tables import behind, better_of, fall_back, is_of, named_by, of_table, with_rows
from outblas.tune import PROBLEMS_AT_ONCE, tune

#: Measurements per problem, beside those of packaged kernels: of a recorded table, of one that goes by its sisters and
#: the model, of one whose sister has another dtype only, of suite llm, most of whose problems have no sister at first;
#: of the first table where these kernels were not recorded.
RECORDED_BUDGET, TRANSFER_BUDGET, TWIN_BUDGET, LLM_BUDGET, UNRECORDED_BUDGET = 6, 10, 6, 15, 16
TUNE_ROUNDS, BENCH_ROUNDS = 11, 11
#: A candidate over this x the fastest baseline, or the fastest of its launch option, is timed three rounds only.
HOPELESS = 1.06
#: Candidates in the same rounds: all of a problem, so that its baselines are timed once.
CHUNK = 24
#: A win below this in tuning is measured again before it is installed.
CONFIRM_BELOW = 1.04
SEEDS = {"tune": 2, "confirm": 3, "bench": 4, "again": 5, "refine": 6, "borrow": 7}
#: What a second search leaves in the table's provenance, with the number of problems.
DONE_AS = {"again": "searched_again", "refine": "refined", "borrow": "borrowed"}
#: What is searched again, with how many measurements.
AGAIN_BELOW, AGAIN_BUDGET = 1.03, 16
#: Neighbours of a row's best candidates that are tried: in the first table and in suite llm. Sister tables begin where
#: those led; most of the cost is proving configs that are new.
REFINE_BUDGET, REFINE_LLM_BUDGET = 6, 4
#: Winners of shapes nearby that are tried; most of them are proved already.
BORROW_BUDGET = 5
SERVER_SAMPLE, SERVER_QPS = 100, 200.0


TABLES = tuple(
    Table(*text.split(":"))
    for text in (
        "grid1000:TN:fp16:fp32",
        "grid1000:NN:fp16:fp32",
        "grid1000:TN:bf16:fp32",
        "grid1000:NN:bf16:fp32",
        "grid1000:TN:fp16:fp16",
        "llm:TN:fp16:fp32",
        "llm:TN:bf16:fp32",
    )
)


@dataclass(frozen=True)
class Work:
    """The directory of one go: one kind of kernels, one toolchain."""

    path: Path
    gpu_index: int = 0
    from_nothing: bool = False

    @property
    def library(self) -> Path:
        return self.path / "library.json"

    @property
    def recording(self) -> Path:
        return self.path / "recording"

    def result(self, table: Table, mode: str) -> Path:
        return self.path / f"{table.stem}_{mode}.parquet"

    def store(self, table: Table) -> Path:
        return self.path / f"{table.stem}_tune.sqlite"

    def recorded(self) -> tuple[Recording, ...]:
        """The recording of this work, if there is one yet."""
        return (Recording.load(self.recording),) if any(self.recording.glob("*_cells.parquet")) else ()

    def load(self) -> Library:
        """The library so far; it begins empty."""
        if self.library.exists():
            return Library.load(self.library)
        return Library(gpu_of_device(self.gpu_index).name, (), {"tables": {}})

    def check(self) -> None:
        """Proofs and figures are of these kernels: refuse a directory of others.

        Raises:
            UsageError: the directory is of other kernels or another compiler.
        """
        about = built_by()
        path = self.path / "work.json"
        if not path.exists():
            write_json(path, about)
        elif (found := json.loads(path.read_text())) != about:
            raise UsageError(f"{self.path} is of kernels and compiler {found}", str(about), "choose another --work")


def built_by() -> dict[str, str | None]:
    """What equal cubins come of: kernel sources and compiler."""
    return {"kernels": kernels_sha(), "nvrtc": toolchain()["nvrtc"]}


def record(work: Work, table: Table) -> None:
    if any(set(table.problems()) <= set(recording.problems) for recording in work.recorded()):
        print(f"record {table}: done before", flush=True)
        return
    progress = printer(f"record {table}")
    run_record(table.problems(), table.suite, catalogue(), work.recording, work.gpu_index, progress)


def tune_table(work: Work, table: Table) -> None:
    """Rows of the problems that have none yet; a problem of two tables is tuned in the first."""
    library, problems = work.load(), table.problems()
    todo = [p for p in problems if library.lookup(p) is None]
    if not todo:
        print(f"tune {table}: done before", flush=True)
        return
    gpu, progress = gpu_of_device(work.gpu_index), printer(f"tune {table}")
    agent, budget = searcher(work, table, library, gpu)
    options, known = tuning(work, table, "tune"), packaged_kernels(work, gpu)
    agent, budget = Before(known, agent), budget + max((len(known.get(p, ())) for p in todo), default=0)

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        return list(dict.fromkeys((*known.get(problem, ()), *worth_trying(problem, gpu))))

    with (
        LiveEvaluator(work.gpu_index, options, offered=offered) as evaluator,
        Store(work.store(table)) as store,
    ):
        # The library is saved after every group, so that a killed run asks for no baseline twice.
        for start in range(0, len(todo), PROBLEMS_AT_ONCE):
            group, later = todo[start:][:PROBLEMS_AT_ONCE], todo[start:][PROBLEMS_AT_ONCE:]
            evaluator.list_ahead(later[:PROBLEMS_AT_ONCE])
            found = tune(group, agent, budget, evaluator, store, "tune", per_round=budget)
            measured = {**found.provenance, **collect(f"scripts/regenerate.py tune {table}", work.gpu_index)}
            library = with_rows(library, found.rows, table, measured)
            library.save(work.library)
            progress(start + len(group), len(todo), f"geomean {library.of(problems).geomean('pdl'):.3f}x")
        print(f"tune {table}: {failures(store.evaluations('tune'))}", flush=True)


def packaged_kernels(work: Work, gpu: Gpu) -> dict[Problem, list[KernelConfig]]:
    """What the packaged library installs, by problem, where it is legal still; nothing for a search from nothing."""
    if work.from_nothing:
        return {}
    installed = Library.packaged(gpu.name, missing_ok=True).installed()
    return {p: [c for c in configs if why_illegal(p, c, gpu) is None] for p, configs in installed.items()}


def tuning(work: Work, table: Table, step: str) -> Options:
    """How candidates are evaluated in a search."""
    gpu = gpu_of_device(work.gpu_index)
    return Options(
        work.gpu_index, gpu, rounds=TUNE_ROUNDS, seed=SEEDS[step], baselines=RIVALS, proved=proved(work, table),
        chunk=CHUNK, hopeless=HOPELESS, algorithms=str(work.path / "algorithms.jsonl"),
    )  # fmt: skip


def searcher(work: Work, table: Table, library: Library, gpu: Gpu) -> tuple[Agent, int]:
    """Who proposes for a table, and how much may be tried."""
    recordings = work.recorded()
    if recordings and set(table.problems()) <= set(recordings[0].problems):
        agent: Agent = Recorded(0, gpu, recordings[0])
        agent.name = "recorded"
        return agent, RECORDED_BUDGET
    agent = Transfer(0, gpu, recordings, library.installed())
    agent.name = "transfer"
    if table == TABLES[0]:
        return agent, UNRECORDED_BUDGET
    tuned = library.provenance["tables"]
    if table.dtype != "fp16" and str(replace(table, dtype="fp16")) in tuned:
        return agent, TWIN_BUDGET
    return agent, LLM_BUDGET if table.suite == "llm" else TRANSFER_BUDGET


def again(work: Work, table: Table) -> None:
    """A second search of the weak rows, in the store beside the first; the better kernel of the two stays."""
    weak = [row.problem for row in of_table(work.load(), table).rows if any(map(_is_weak, map(row.choice, LAUNCHES)))]
    tried = {p: {e.config for e in known} for p, known in searched(work, table, "again").items()}
    gpu = gpu_of_device(work.gpu_index)
    agent = Untried(0, gpu, tried)
    second_search(work, table, "again", weak, agent, AGAIN_BUDGET, lambda p: worth_trying(p, gpu))


def refine(work: Work, table: Table) -> None:
    """Neighbours of the best candidates of every row (hints, order of tiles, parts of K); the better kernel stays."""
    if "refined" in of_table(work.load(), table).provenance:
        print(f"refine {table}: done before", flush=True)
        return
    gpu, tried = gpu_of_device(work.gpu_index), searched(work, table, "refine")
    budget = REFINE_BUDGET if table == TABLES[0] else REFINE_LLM_BUDGET if table.suite == "llm" else 0
    if not budget:
        print(f"refine {table}: left to the tables that it begins with", flush=True)
        return
    problems = [p for p in table.problems() if p in tried]

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        return near_the_best(problem, tried[problem], gpu)[:budget]

    second_search(work, table, "refine", problems, InOrder(0, gpu), budget, offered)


def borrow(work: Work, table: Table) -> None:
    """What won on shapes nearby; the better kernel stays."""
    if "borrowed" in of_table(work.load(), table).provenance:
        print(f"borrow {table}: done before", flush=True)
        return
    gpu, tried = gpu_of_device(work.gpu_index), searched(work, table, "borrow")
    won = {p: winners(known) for p, known in tried.items()}

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        known = {e.config for e in tried[problem]}
        return borrowed(problem, won, known, gpu)[:BORROW_BUDGET]

    problems = [p for p in table.problems() if p in tried]
    second_search(work, table, "borrow", problems, InOrder(0, gpu), BORROW_BUDGET, offered)


def searched(work: Work, table: Table, but: str) -> dict[Problem, list[Evaluation]]:
    """What all searches of a table tried, ``but`` one: that is the one about to be made, or to go on."""
    with Store(work.store(table)) as store:
        runs = (run for run in ("tune", *DONE_AS) if run != but)
        return tried_by_problem(e for run in runs for e in store.evaluations(run))


def second_search(
    work: Work, table: Table, step: str, problems: Sequence[Problem], agent: Agent, budget: int,
    offered: Callable[[Problem], Sequence[KernelConfig]],
) -> None:  # fmt: skip
    """Search some problems of a tuned table once more; of the old kernel and the new one the better is kept.

    Args:
        step: name of the run in the table's store. offered: a problem's candidates.
    """
    progress, better, rows = printer(f"{step} {table}"), 0, {row.problem: row for row in work.load().rows}
    with (
        LiveEvaluator(work.gpu_index, tuning(work, table, step), offered=offered) as evaluator,
        Store(work.store(table)) as store,
    ):
        for start in range(0, len(problems), PROBLEMS_AT_ONCE):
            group, later = problems[start:][:PROBLEMS_AT_ONCE], problems[start:][PROBLEMS_AT_ONCE:]
            evaluator.list_ahead(later[:PROBLEMS_AT_ONCE])
            for row in tune(group, agent, budget, evaluator, store, step, per_round=budget).rows:
                old, rows[row.problem] = rows[row.problem], better_of(rows[row.problem], row)
                better += rows[row.problem] != old
            progress(start + len(group), len(problems), f"{better} better")
        failed = failures(store.evaluations(step))
    library = work.load()
    about = {k: v for k, v in of_table(library, table).provenance.items() if k not in ("confirmed", "not_confirmed")}
    about |= {DONE_AS[step]: len(problems)}
    with_rows(replace(library, rows=tuple(rows.values())), (), table, about).save(work.library)
    print(f"{step} {table}: {len(problems)} problems, {better} have a better kernel; {failed}", flush=True)


def failures(evaluations: Iterable[Evaluation]) -> str:
    """How many candidates failed, and how: a family that fails as a whole is a bug, not a slow kernel."""
    counts = Counter(e.status.value for e in evaluations if e.status is not Status.PASSED)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no candidate failed"


def _is_weak(choice: Choice | None) -> bool:
    return choice is None or choice.speedup < AGAIN_BELOW


def proved(work: Work, table: Table) -> frozenset[str]:
    """Kernels of a table's layout, dtype and accumulator that passed every gate in this work before.

    The sources and the compiler are the same (see Work.check), hence the cubins. A recording proves what it measures,
    and a library that says of which kernels it is (from another directory, perhaps) was proved with them.
    """
    names: set[str] = set()
    kind = (table.layout, table.dtype, table.acc)
    library = work.load()
    if {**library.provenance.get("toolchain", {}), **library.provenance}.items() >= built_by().items():
        installed = (configs for p, configs in library.installed().items() if (p.layout, p.dtype, p.acc) == kind)
        names |= {config_name(c) for configs in installed for c in configs}
    for recording in work.recorded():
        same = [i for i, p in enumerate(recording.problems) if (p.layout, p.dtype, p.acc) == kind]
        passed = (recording.status[same] == CODE[Status.PASSED]).any(axis=0)
        names |= {config_name(c) for c, ok in zip(recording.catalogue, passed, strict=True) if ok}
    for path in work.path.glob(f"*_{'_'.join(kind)}_tune.sqlite".lower()):
        with Store(path) as store:
            runs = ("tune", *DONE_AS)
            names |= {config_name(e.config) for run in runs for e in store.evaluations(run) if _passed_all(e)}
    return frozenset(names)


def _passed_all(e: Evaluation) -> bool:
    return e.status is Status.PASSED and e.verdict is not None and "rules" in e.verdict.gates


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


def note_seconds(work: Work, job: Sequence[str], seconds: float) -> dict[str, float]:
    """Add to the seconds of a job, over all times that it was begun; returns those of every job."""
    path = work.path / "seconds.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    name = " ".join(job)
    known[name] = round(known.get(name, 0.0) + seconds, 1)
    write_json(path, known)
    return dict(known)


def publish_seconds(work: Work, seconds: dict[str, float]) -> str:
    """Write the seconds into the library's provenance; returns the totals in words."""
    making = sum(s for name, s in seconds.items() if name.split()[0] in MAKING)
    if work.library.exists():
        library = Library.load(work.library)
        provenance = {**library.provenance, "seconds": seconds, "seconds_of_making": round(making, 1)}
        provenance.setdefault("kernels", kernels_sha())  # another's, brought here, is not of these kernels by that
        replace(library, provenance=provenance).save(work.library)
    steps = dict.fromkeys(name.split()[0] for name in seconds)
    each = ", ".join(f"{step} {sum(s for n, s in seconds.items() if n.split()[0] == step):.0f} s" for step in steps)
    return f"{each}; the library took {making / 60:.1f} GPU minutes, all {sum(seconds.values()) / 60:.1f}"


def printer(what: str) -> Callable[..., None]:
    """Progress in one line about every 5 seconds, with an estimate of the rest."""
    begin = monotonic()
    last = [begin]

    def progress(done: int, total: int, note: object = "") -> None:
        now = monotonic()
        if now - last[0] > 5 or done == total:
            last[0] = now
            left = (now - begin) / max(1, done) * (total - done)
            print(f"{what}: {done}/{total}, about {left:.0f} s left {note}", flush=True)

    return progress


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
    parser.add_argument("--here", nargs="+", metavar="WORD", help=argparse.SUPPRESS)  # one job, in this process
    options = parser.parse_args(arguments)
    work = Work(options.work, options.gpu_device_id, options.from_nothing)
    work.path.mkdir(parents=True, exist_ok=True)
    if options.here:
        try:
            run_job(work, options.here)
        except OutblasError as error:
            sys.exit(f"error: {error}")
        return
    try:
        tables, extra, recorded = (
            [Table.parse(text) for text in listed.split(",")]
            for listed in (options.tables, options.extra, options.recorded)
        )
        steps, modes = named(options.steps, list(STEPS), "--steps"), named(options.modes, MODES, "--modes")
    except OutblasError as error:
        parser.error(str(error))
    seconds: dict[str, float] = {}
    for job in jobs(steps, tables, modes, extra, recorded):
        begin = monotonic()
        base = [sys.executable, __file__, "--work", str(work.path), "--gpu-device-id", str(work.gpu_index)]
        base += ["--from-nothing"] if work.from_nothing else []
        try:  # each in a fresh process, so that no state of one helps the next
            subprocess.run([*base, "--here", *job], check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(f"{' '.join(job)} failed with status {error.returncode}; the same command goes on where it was")
        finally:
            spent = monotonic() - begin
            seconds = note_seconds(work, job, spent)
            print(f"{' '.join(job)}: {spent:.0f} s", flush=True)
    print(publish_seconds(work, seconds), flush=True)


if __name__ == "__main__":
    main()
