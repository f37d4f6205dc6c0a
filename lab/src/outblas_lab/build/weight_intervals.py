"""The intervals and gates of a suite's weights in the library of a build: each weight is tuned for every M."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.suites import Table, engine_gates
from outblas.core.weight import Weight, WeightRange
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.library import Library
from outblas.records.library_row import LibraryInterval
from outblas.records.proved_kernels import unproved_intervals
from outblas.records.provenance import collect_provenance
from outblas.records.store import Store
from outblas.runtime.device import Device, gpu_of_device
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.gate_run import gate_plan, rivals_sha, surely_faster
from outblas.tune.intervals.cells import drawn
from outblas.tune.intervals.range_search import ENGINE_BUDGET, FinishedWeights, ranges_of_suite
from outblas.tune.tune_folder import RunFiles, read_run
from outblas.tune.tune_run import TuneRequest, default_agent, run_tune
from outblas_lab.build.build_searches import command_of
from outblas_lab.build.build_work import BuildFolder, printer, proof_by
from outblas_lab.build.library_tables import with_gates, with_intervals
from outblas_lab.pool.worker_plan import make_plan, open_pool

#: Measurements of each sampled M at most, and the agent's seed: those that `outblas tune` has by default.
BUDGET, SEED = 16, 0


def search_intervals(work: BuildFolder, table: Table) -> None:
    """Search the intervals of each weight of a table on all GPUs, and add them to the library in the work directory.

    The intervals of finished weights are added after an interruption, too, and of a killed run by the next call. It
    goes on with the other weights. A new directory leaves out the weights whose intervals its library has of today's
    kernel sources (``--begin-with``).

    Raises:
        Interrupted: Ctrl-C.
        OutblasError: as :func:`outblas.tune.tune_run.run_tune`.
    """
    request = _request(work, table)
    search_weights(f"intervals {table}", request, lambda: _add_finished(work, table, request))


def search_weights(what: str, request: TuneRequest, add_finished: Callable[[], None]) -> None:
    """Search the weights of a request, and add those that are finished before and after it, however it ends.

    Args:
        request: the search; without a weight it is only said that all was done before.

    Raises:
        Interrupted: Ctrl-C.
        OutblasError: as :func:`outblas.tune.tune_run.run_tune`.
    """
    if not request.ranges.ranges:
        print(f"{what}: already done", flush=True)
        return
    add_finished()
    try:
        run_tune(request, told=printer(what))
    finally:
        add_finished()


def prove_intervals(work: BuildFolder, table: Table) -> None:
    """Prove the kernels of a table's intervals with today's sources: at both ends, and at two M inside.

    It is for intervals that the directory took over from a library of other sources, and prints so for others.

    Raises:
        UsageError: the library has no intervals of the table, or a kernel fails. The library stays as it is.
        OutblasError: as :func:`outblas_lab.pool.worker_plan.open_pool`.
    """
    library = work.load()
    known = library.provenance.get("intervals", {})
    if str(table) not in known:
        wrong = f"{work.library} lacks intervals of {table}"
        raise UsageError(wrong, "intervals of this table", "run step `intervals`")
    if table not in unproved_intervals(library):
        print(f"prove_intervals {table}: already done", flush=True)
        return
    pairs, progress = _proof_pairs(library, table), printer(f"prove_intervals {table}")
    failed: list[str] = []
    with open_pool(make_plan("local", gpus=work.gpus)) as pool:
        for done, e in enumerate(pool.evaluate(pairs), 1):
            if e.status is not Status.PASSED:
                failed.append(f"{e.problem.key} {config_name(e.config)}: {e.status}")
            progress(done, len(pairs))
    if failed:
        wrong = f"{len(failed)} of {len(pairs)} proofs failed, the first for {failed[0]}"
        raise UsageError(wrong, "kernels that pass every gate", "rerun with --steps intervals and another --work")
    made = collect_provenance(command_of("prove_intervals", table), work.gpu_index)
    tables = {**known, str(table): {**known[str(table)], "proved": proof_by(made)}}
    replace(library, provenance={**library.provenance, "intervals": tables}).save(work.library)
    print(f"prove_intervals {table}: {len(pairs)} proofs passed", flush=True)


def _proof_pairs(library: Library, table: Table) -> list[tuple[Problem, KernelConfig]]:
    """Return (problem, kernel) of all proofs of a table's intervals."""
    weights = {asked.weight for asked in ranges_of_suite(table.suite, table.problems()).ranges}
    pairs: dict[tuple[Problem, KernelConfig], None] = {}
    for one in (each for each in library.intervals if each.weight in weights):
        inner = drawn(one.weight, one.first, one.last, range(one.first + 1, one.last))
        problems = [one.weight.problem(m) for m in sorted({one.first, *inner, one.last})]
        pairs.update(dict.fromkeys((problem, config) for problem in problems for config in one.kernels))
    return list(pairs)


def folder_of_intervals(work: BuildFolder, table: Table) -> Path:
    """Return the directory of the search, which `outblas report` reads like that of `outblas tune`."""
    return work.path / f"{table.stem}_intervals"


def _request(work: BuildFolder, table: Table) -> TuneRequest:
    device = Device(gpu_index=work.gpu_index)
    ranges = ranges_of_suite(table.suite, table.problems())
    known, folder = partial(_proved_weights, table=table), folder_of_intervals(work, table)
    ranges = replace(ranges, ranges=ranges_to_search(work, folder, ranges.ranges, known))
    agent, budget = ("transfer", ENGINE_BUDGET) if table.suite == "engine" else (default_agent(device), BUDGET)
    return TuneRequest(
        (), table.suite, agent, budget, SEED, device, folder_of_intervals(work, table),
        command_of("intervals", table), make_plan("local", gpus=work.gpus), ranges=ranges,
    )  # fmt: skip


def ranges_to_search(
    work: BuildFolder, folder: Path, ranges: Sequence[WeightRange], known: Callable[[Library], Collection[Weight]]
) -> list[WeightRange]:
    """Return the ranges of a directory's run. A new run has those of weights that the library does not know.

    Args:
        known: returns the weights that a library has of today's kernel sources.
    """
    file = RunFiles(folder).run
    if file.exists():
        begun = set(read_run(file)["ranges"])
        return [asked for asked in ranges if asked.key in begun]
    found = known(work.load())
    return [asked for asked in ranges if asked.weight not in found]


def _proved_weights(library: Library, table: Table) -> set[Weight]:
    """Return the weights of a library's intervals, if those of the table were proved with today's sources."""
    is_proved = str(table) in library.provenance.get("intervals", {}) and table not in unproved_intervals(library)
    return {one.weight for one in library.intervals} if is_proved else set()


def _add_finished(work: BuildFolder, table: Table, request: TuneRequest) -> None:
    """Add the intervals of the weights that the search has finished, and print how many weights have some."""
    intervals, library = finished_intervals(work, request), work.load()
    wanted = {asked.weight for asked in ranges_of_suite(table.suite, table.problems()).ranges}
    new = {one.weight for one in intervals}
    weights = wanted & (new | {one.weight for one in library.intervals})
    if not RunFiles(request.path).store.is_file():
        return
    print(f"intervals {table}: {len(weights)} of {len(wanted)} weights, {len(intervals)} new intervals", flush=True)
    if not new:
        return
    about = {"kernels": kernels_sha(), **provenance_of(work, request), "weights": len(weights), "wanted": len(wanted)}
    with_intervals(library, intervals, table, about).save(work.library)


def finished_intervals(work: BuildFolder, request: TuneRequest) -> list[LibraryInterval]:
    """Return the intervals of the weights that a search has finished; empty before its first measurement."""
    found: list[LibraryInterval] = []
    if not RunFiles(request.path).store.is_file():
        return found
    with Store(RunFiles(request.path).store) as store:
        agent = make_agent(request.agent, request.seed, gpu_of_device(work.gpu_index))
        finished = FinishedWeights(store, request.path.name, agent)
        for asked in request.ranges.ranges:
            outcome = finished.outcome(asked, request.ranges.settings(asked, request.budget, None))
            found += () if outcome is None else outcome[0].intervals
    return found


def provenance_of(work: BuildFolder, request: TuneRequest) -> dict[str, Any]:
    """Return the settings of a search, and the machine on which it runs."""
    about = {"agent": request.agent, "seed": request.seed, "budget": request.budget}
    return {**about, **collect_provenance(request.command, work.gpu_index)}


def search_gates(work: BuildFolder, table: Table) -> None:
    """Search kernels with a gate for the gate/up weights of suite ``engine``, and add them to the library.

    Each is a rival of products with one pass: by torch, by autotuned cuBLASLt, and by the library's own kernel. A call
    goes on, and adds what is finished, as :func:`outblas_lab.build.weight_intervals.search_intervals`.

    Raises:
        Interrupted: Ctrl-C.
        OutblasError: as :func:`outblas.tune.tune_run.run_tune`.
    """
    request = _gates_request(work, table)
    search_weights(f"gates {table}", request, lambda: _add_finished_gates(work, table, request))


def _gates_request(work: BuildFolder, table: Table) -> TuneRequest:
    gates = engine_gates() if table.suite == "engine" else frozenset[tuple[int, int]]()
    ranges = ranges_of_suite(table.suite, [p for p in table.problems() if (p.n, p.k) in gates])
    path = work.path / f"{table.stem}_gates"

    def known(library: Library) -> set[Weight]:
        return {one.weight for one in library.gates} if _are_of_today(library, table) else set()

    ranges = replace(ranges, ranges=ranges_to_search(work, path, ranges.ranges, known))
    return TuneRequest(
        (), table.suite, "transfer", ENGINE_BUDGET, SEED, Device(gpu_index=work.gpu_index), path,
        command_of("gates", table), gate_plan(make_plan("local", gpus=work.gpus), ranges, work.load()), ranges=ranges,
    )  # fmt: skip


def _are_of_today(library: Library, table: Table) -> bool:
    """Return whether a library's gates were searched with today's kernel sources and today's pass."""
    about = library.provenance.get("gates", {}).get(str(table), {})
    return (about.get("kernels"), about.get("pass")) == (kernels_sha(), rivals_sha(None))


def _add_finished_gates(work: BuildFolder, table: Table, request: TuneRequest) -> None:
    """Add the gates of the weights that the search has finished, and print their number. Older ones are left out."""
    found = surely_faster(finished_intervals(work, request))
    weights = {one.weight for one in found}
    print(f"gates {table}: {len(weights)} of {len(request.ranges.ranges)} weights searched", flush=True)
    if found:
        library = work.load()
        library = library if _are_of_today(library, table) else replace(library, gates=())
        about = {"kernels": kernels_sha(), "pass": rivals_sha(None), **provenance_of(work, request)}
        with_gates(library, found, table, about).save(work.library)
