"""The searches that build a library: tune, and what looks at a tuned table again (borrow, refine, again)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outblas.core.config import KernelConfig, Launch, launch_of
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.core.roofline import Gpu
from outblas.core.suites import Table
from outblas.judge.bench_cell import Options
from outblas.kernels.catalogue import first_search_candidates, launch_options, with_launch
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_merge import merge_rows
from outblas.records.library_row import LibraryRow
from outblas.records.provenance import collect_provenance
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas.tune.agents.base import Agent, interleave
from outblas.tune.agents.transfer import Transfer
from outblas.tune.live_evaluator import LiveEvaluator
from outblas.tune.neighbour_winners import LibraryNeighbours, neighbour_winners
from outblas.tune.tune import PROBLEMS_AT_ONCE, SearchOptions, tune
from outblas_lab.agents.recorded_agent import RecordedAgent
from outblas_lab.build.build_work import PROVENANCE_KEYS, REOPENED_STARTS, SEEDS, TABLES, BuildFolder, printer, proved
from outblas_lab.build.library_tables import rows_of_table, with_table_rows
from outblas_lab.build.refine import (
    InOrderAgent,
    PreferredFirstAgent,
    neighbours,
    neighbours_of_winners,
    tried_by_problem,
    winners,
)

#: Measurements per problem, beside those of packaged kernels. The first is for a recorded table. The second is for a
#: table that follows its sisters and the model; the third for one whose only sister has another dtype. The fourth is
#: for suite llm, most of whose problems have no sister at first. The last is for a first table without a recording.
RECORDED_BUDGET, TRANSFER_BUDGET, TWIN_BUDGET, LLM_BUDGET, UNRECORDED_BUDGET = 6, 10, 6, 15, 16
TUNE_ROUNDS = 11
#: A candidate over this x the fastest baseline, or the fastest of its launch option, is timed three rounds only.
SINGLE_LOOK_BEYOND = 1.06
#: Candidates in the same rounds: all of a problem, so that its baselines are timed once.
CANDIDATES_PER_ROUNDS = 24
#: Neighbours of a row's best candidates that are tried: in the first table and in suite llm. Sister tables begin where
#: those led; most of the cost is proving configs that are new. Of 6 in the first table the last three brought 0.05%.
REFINE_BUDGET, REFINE_LLM_BUDGET = 3, 4
#: Neighbours of packaged kernels that are tried with them.
NEAR_PACKAGED = 6
#: Winners of shapes nearby that are tried; most of them are proved already.
NEIGHBOUR_WINNERS_BUDGET = 5


def tune_table(work: BuildFolder, table: Table) -> None:
    """Search the problems of a table that have no row yet and add their rows to the library in the work directory.

    If all have a row, it only prints so. A problem of two tables is tuned in the first.
    """
    library, problems = work.load(), table.problems()
    todo = [p for p in problems if library.row_of(p) is None]
    if not todo:
        print(f"tune {table}: already done", flush=True)
        return
    gpu, progress = gpu_of_device(work.gpu_index), printer(f"tune {table}")
    agent, budget = agent_and_budget(work, table, library, gpu)
    options, known = judge_options(work, table, "tune"), packaged_kernels(work, gpu)
    agent, budget = PreferredFirstAgent(known, agent), budget + max((len(known.get(p, ())) for p in todo), default=0)

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        return list(dict.fromkeys((*known.get(problem, ()), *first_search_candidates(problem, gpu))))

    with LiveEvaluator(work.gpu_index, options, offered=offered) as evaluator, Store(work.store(table)) as store:
        # The library is saved after every group, so that a killed run asks for no baseline twice.
        for start in range(0, len(todo), PROBLEMS_AT_ONCE):
            group, later = todo[start:][:PROBLEMS_AT_ONCE], todo[start:][PROBLEMS_AT_ONCE:]
            evaluator.list_ahead(later[:PROBLEMS_AT_ONCE])
            found = tune(group, agent, budget, evaluator, store, "tune", options=SearchOptions(per_round=budget))
            measured = {**found.provenance, **collect_provenance(command_of("tune", table), work.gpu_index)}
            library = with_table_rows(library, found.rows, table, measured)
            library.save(work.library)
            progress(start + len(group), len(todo), f"geomean {library.restricted_to(problems).geomean('pdl'):.3f}x")
        print(f"tune {table}: {failure_counts(store.evaluations('tune'))}; {seconds_spent(evaluator)}", flush=True)


def command_of(step: str, table: Table) -> str:
    """Return the command that runs one step again."""
    return f"outblas build-library --steps {step} --tables {table}"


def packaged_kernels(work: BuildFolder, gpu: Gpu) -> dict[Problem, list[KernelConfig]]:
    """Return problem -> configs that the packaged library of a GPU installs and that are legal there, then neighbours.

    The neighbours are the nearest of those configs, at most six, legal and of a launch option worth trying. No config
    is repeated. A list is empty if the row falls back. The dictionary is empty if ``work.from_nothing`` or the package
    has no library for the GPU.
    """
    if work.from_nothing:
        return {}
    installed = Library.packaged(gpu.name, missing_ok=True).installed()
    legal = {p: [c for c in configs if why_illegal(p, c, gpu) is None] for p, configs in installed.items()}
    return {p: list(dict.fromkeys((*known, *_nearest(p, known, gpu)))) for p, known in legal.items()}


def _nearest(problem: Problem, known: Sequence[KernelConfig], gpu: Gpu) -> list[KernelConfig]:
    """Return the first neighbours of known kernels that keep to launch options worth trying, kernels in turns."""
    options = launch_options(problem, gpu)
    near = interleave(*(neighbours(problem, config, gpu) for config in known))
    return [c for c in dict.fromkeys(near) if launch_of(c) in options][:NEAR_PACKAGED]


def judge_options(work: BuildFolder, table: Table, step: str) -> Options:
    """Return the options of evaluation for one step of a table: all rivals, known proofs reused.

    A step that reopens rows proves its many candidates on the timed operands only. The trials prove its finalists in
    full.

    Args:
        step: ``tune`` or a key of :data:`outblas_lab.build.build_work.PROVENANCE_KEYS`; it decides the
            seed. An unknown name raises KeyError.
    """
    gpu = gpu_of_device(work.gpu_index)
    return Options(
        work.gpu_index, gpu, rounds=TUNE_ROUNDS, seed=SEEDS[step], level="cell" if step in REOPENED_STARTS else "full",
        baselines=RIVALS, proved=proved(work, table),
        chunk=CANDIDATES_PER_ROUNDS, drop_beyond=SINGLE_LOOK_BEYOND, algorithms=str(work.path / "algorithms.jsonl"),
    )  # fmt: skip


def agent_and_budget(work: BuildFolder, table: Table, library: Library, gpu: Gpu) -> tuple[Agent, int]:
    """Return the agent that proposes for a table, and its number of measurements per problem.

    The agent is ``recorded`` (budget 6) if the work's recording has all problems of the table, else ``transfer``. The
    budget of ``transfer`` is 16 for the first table. It is 6 for a table not in fp16 whose fp16 twin was tuned.
    Otherwise it is 15 for suite llm and 10 for another.

    Args:
        library: the library so far; its kernels are the winners that ``transfer`` follows.
    """
    recordings = work.recorded()
    if recordings and set(table.problems()) <= set(recordings[0].problems):
        agent: Agent = RecordedAgent(0, gpu, recordings[0])
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


def refine_table(work: BuildFolder, table: Table) -> None:
    """Try neighbours of the best candidates of every row: hints, order of tiles, parts of K. The better kernel stays.

    Only the first table (3 neighbours a row) and suite llm (4) are refined; for others it only prints so. A table that
    was refined before is left as it is.

    Raises:
        UsageError: the table is not tuned.
    """
    if "refined" in rows_of_table(work.load(), table).provenance:
        print(f"refine {table}: already done", flush=True)
        return
    gpu, known = gpu_of_device(work.gpu_index), known_kernels(work, table, "refine")
    budget = REFINE_BUDGET if table == TABLES[0] else REFINE_LLM_BUDGET if table.suite == "llm" else 0
    if not budget:
        print(f"refine {table}: skipped; the tables that it starts from are refined", flush=True)
        return

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        return neighbours_of_winners(problem, known[problem].winners, known[problem].tried, gpu)[:budget]

    second_search(work, table, "refine", table.problems(), InOrderAgent(0, gpu), budget, offered)


def try_neighbour_winners(work: BuildFolder, table: Table) -> None:
    """Try up to 5 winners of nearby shapes on every row; the better kernel stays. A second call only prints so.

    Raises:
        UsageError: the table is not tuned.
    """
    if "borrowed" in rows_of_table(work.load(), table).provenance:
        print(f"borrow {table}: already done", flush=True)
        return
    gpu, known = gpu_of_device(work.gpu_index), known_kernels(work, table, "borrow")
    won = {p: found.winners for p, found in known.items()}

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        return neighbour_winners(problem, won, known[problem].tried, gpu)[:NEIGHBOUR_WINNERS_BUDGET]

    second_search(work, table, "borrow", table.problems(), InOrderAgent(0, gpu), NEIGHBOUR_WINNERS_BUDGET, offered)


@dataclass(frozen=True)
class KnownKernels:
    """The kernels of one problem that the library and the searches of a work know.

    Attributes:
        winners: launch option -> the best kernel, see :func:`outblas_lab.build.refine.winners`.
    """

    winners: Mapping[Launch, KernelConfig]
    tried: frozenset[KernelConfig]


def known_kernels(work: BuildFolder, table: Table, but: str) -> dict[Problem, KnownKernels]:
    """Return problem -> what is known of it, for all problems of a tuned table.

    The searches' winners come first. For an option without one it is the library's kernel. So a library counts
    with which the work began.

    Args:
        but: name of the step whose own search is left out.
    """
    library, tried = work.load(), earlier_searches(work, table, but)
    installed = library.restricted_to(table.problems()).installed()
    found = {}
    for problem in table.problems():
        evaluations, configs = tried.get(problem, []), installed.get(problem, [])
        best = {launch_of(config): config for config in configs} | winners(evaluations)
        found[problem] = KnownKernels(best, frozenset((*configs, *(e.template for e in evaluations))))
    return found


def earlier_searches(work: BuildFolder, table: Table, but: str) -> dict[Problem, list[Evaluation]]:
    """Return problem -> evaluations of all searches of a table except step ``but``.

    The searches are ``tune``, ``again``, ``refine`` and ``borrow``, in this order; a step that was not run adds
    nothing.
    """
    with Store(work.store(table)) as store:
        runs = (run for run in ("tune", *PROVENANCE_KEYS) if run != but)
        return tried_by_problem(e for run in runs for e in store.evaluations(run))


def second_search(
    work: BuildFolder, table: Table, step: str, problems: Sequence[Problem], agent: Agent, budget: int,
    offered: Callable[[Problem], Sequence[KernelConfig]], stale: Path | None = None,
) -> None:  # fmt: skip
    """Search some problems of a tuned table once more and keep the better of the old and the new kernel.

    For each launch option, the kernel with the higher lower end of its interval is better; the old one wins a tie. The
    library is saved at the end. The table's provenance then has the number of problems (e.g. ``refined``). Its list of
    finalists is deleted, so that the next trial makes it anew. An interrupted search leaves the library as it was. The
    next call takes what was measured from the store.

    Args:
        step: a key of :data:`outblas_lab.build.build_work.PROVENANCE_KEYS`, the name of the run in the
            table's store. Another raises KeyError.
        stale: list of finalists that is deleted; None: that of the first trials.
    """
    progress, better, rows = printer(f"{step} {table}"), 0, {row.problem: row for row in work.load().rows}
    with (
        LiveEvaluator(work.gpu_index, judge_options(work, table, step), offered=offered) as evaluator,
        Store(work.store(table)) as store,
    ):
        for start in range(0, len(problems), PROBLEMS_AT_ONCE):
            group, later = problems[start:][:PROBLEMS_AT_ONCE], problems[start:][PROBLEMS_AT_ONCE:]
            evaluator.list_ahead(later[:PROBLEMS_AT_ONCE])
            found = tune(group, agent, budget, evaluator, store, step, options=SearchOptions(per_round=budget))
            for row in found.rows:
                old, rows[row.problem] = rows[row.problem], merge_rows(rows[row.problem], row)
                better += rows[row.problem] != old
            progress(start + len(group), len(problems), f"{better} better")
        failed = f"{failure_counts(store.evaluations(step))}; {seconds_spent(evaluator)}"
    library = work.load()
    about = {**rows_of_table(library, table).provenance, PROVENANCE_KEYS[step]: len(problems)}
    (stale or work.finalists(table)).unlink(missing_ok=True)
    with_table_rows(replace(library, rows=tuple(rows.values())), (), table, about).save(work.library)
    print(f"{step} {table}: {len(problems)} problems, {better} have a better kernel; {failed}", flush=True)


def failure_counts(evaluations: Iterable[Evaluation]) -> str:
    """Return the number of failed candidates by kind, in words, most frequent first, e.g. ``3 wrong, 1 hang``.

    Without failures it is ``no candidate failed``. If a whole family fails, it has a bug.
    """
    counts = Counter(e.status.value for e in evaluations if e.status is not Status.PASSED)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "no candidate failed"


def seconds_spent(evaluator: LiveEvaluator) -> str:
    """Return the seconds of a search by phase (outblas.core.phase_times), in words, longest first.

    The form is ``gpu: PHASE 12 s, PHASE 3 s; host: PHASE 4 s``. Phases under 1 s are left out.
    """
    lines = []
    for process, account in evaluator.accounts().items():
        seconds = account.to_json()["seconds"]
        lines.append(f"{process}: " + ", ".join(f"{phase} {s:.0f} s" for phase, s in seconds.items() if s >= 1))
    return "; ".join(lines)


#: A search's winner is about 1% slower when it is timed again, so a row below this is about level with its rivals.
WEAK_BELOW = 1.01
#: Measurements of a weak row, beside those of packaged kernels and of twins.
WEAK_BUDGET = 16
#: Winners of shapes nearby that are measured of a weak row.
NEARBY = 8


def search_weak_rows_again(work: BuildFolder, table: Table) -> None:
    """Search the weak rows of a tuned table once more, among untried candidates. The better kernel stays.

    A row is weak if it has no kernel for plain calls or for PDL, or if its plain kernel's speed-up is below
    :data:`WEAK_BELOW`. First come packaged kernels, their neighbours and the row's kernels with the other launch
    options. Kernels of the weight's intervals follow, and eight that won on shapes nearby, in either dtype. Then come
    what won on sister problems and the model's choices, in turns, 16 of them.

    Raises:
        UsageError: the table is not tuned.
    """
    rows = rows_of_table(work.load(), table).rows
    weak = [r for r in rows if r.plain is None or r.plain.speedup < WEAK_BELOW or r.choice("pdl") is None]
    search_again(work, table, weak)


def search_again(work: BuildFolder, table: Table, rows: Sequence[LibraryRow]) -> None:
    """Search some rows of a tuned table once more, as :func:`search_weak_rows_again` does."""
    gpu, library = gpu_of_device(work.gpu_index), work.load()
    known, packaged = known_kernels(work, table, "again"), packaged_kernels(work, gpu)

    def worth_trying(problem: Problem, configs: Iterable[KernelConfig]) -> list[KernelConfig]:
        tried, options = known[problem].tried, launch_options(problem, gpu)
        return [c for c in dict.fromkeys(configs) if c not in tried and launch_of(c) in options]

    nearby = LibraryNeighbours(library)

    def preferred(row: LibraryRow) -> list[KernelConfig]:
        known_here = (*twins(row, gpu), *packaged.get(row.problem, ()), *of_intervals(row.problem, library, gpu))
        near = worth_trying(row.problem, nearby.of(row.problem, gpu))[:NEARBY]
        return worth_trying(row.problem, (*known_here, *near))

    first = {row.problem: preferred(row) for row in rows}
    then = Transfer(0, gpu, work.recorded(), library.installed())
    budget = WEAK_BUDGET + max(map(len, first.values()), default=0)

    def offered(problem: Problem) -> Sequence[KernelConfig]:
        return worth_trying(problem, (*first[problem], *first_search_candidates(problem, gpu)))

    second_search(work, table, "again", list(first), PreferredFirstAgent(first, then), budget, offered)


def of_intervals(problem: Problem, library: Library, gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels of the interval that holds a problem's M, legal ones only, each once; empty without one."""
    interval = library.interval_index.find(problem)
    configs = dict.fromkeys(() if interval is None else interval.kernels)
    return [config for config in configs if why_illegal(problem, config, gpu) is None]


def twins(row: LibraryRow, gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels of a row with each launch option that matters for the problem, legal ones only, each once."""
    options = launch_options(row.problem, gpu)
    found = (with_launch(config, launch) for config in row.kernels for launch in options)
    return [config for config in dict.fromkeys(found) if why_illegal(row.problem, config, gpu) is None]
