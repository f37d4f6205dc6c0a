"""The gates of a suite's merged gate/up weights in the library of a build: each weight is tuned with its SiLU fused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from outblas.core.suites import Table, engine_gates
from outblas.core.weight import Weight
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.library import Library
from outblas.runtime.device import Device
from outblas.tune.intervals.gate_ranges import gate_plan, rivals_sha, surely_faster
from outblas.tune.intervals.range_choice import ENGINE_BUDGET, ranges_of_suite
from outblas.tune.tune_run import TuneRequest
from outblas_lab.build.build_searches import command_of
from outblas_lab.build.build_work import BuildFolder
from outblas_lab.build.library_tables import with_gates
from outblas_lab.build.weight_intervals import (
    SEED,
    finished_intervals,
    provenance_of,
    ranges_to_search,
    search_weights,
)
from outblas_lab.pool.worker_plan import make_plan


def search_gates(work: BuildFolder, table: Table) -> None:
    """Search kernels with a gate for the gate/up weights of suite ``engine``, and add them to the library.

    Each is a rival of products with one pass: by torch, by autotuned cuBLASLt, and by the library's own kernel. A call
    goes on, and adds what is finished, as :func:`outblas_lab.build.weight_intervals.search_intervals`.

    Args:
        work: directory of the build.
        table: the table, of suite ``engine``; other suites have no gates.

    Raises:
        Interrupted: Ctrl-C.
        OutblasError: as :func:`outblas.tune.tune_run.run_tune`.
    """
    request = _request(work, table)
    search_weights(f"gates {table}", request, lambda: _add_finished(work, table, request))


def _request(work: BuildFolder, table: Table) -> TuneRequest:
    gates = engine_gates() if table.suite == "engine" else frozenset[tuple[int, int]]()
    ranges = ranges_of_suite(table.suite, [p for p in table.problems() if (p.n, p.k) in gates])
    path, known = work.path / f"{table.stem}_gates", partial(_known_weights, table=table)
    ranges = replace(ranges, ranges=ranges_to_search(work, path, ranges.ranges, known))
    return TuneRequest(
        (), table.suite, "transfer", ENGINE_BUDGET, SEED, Device(gpu_index=work.gpu_index), path,
        command_of("gates", table), gate_plan(make_plan("local", gpus=work.gpus), ranges, work.load()), ranges=ranges,
    )  # fmt: skip


def _known_weights(library: Library, table: Table) -> set[Weight]:
    """Return the weights of a library's gates, if those of the table are of today."""
    return {one.weight for one in library.gates} if _are_of_today(library, table) else set()


def _are_of_today(library: Library, table: Table) -> bool:
    """Return whether a library's gates were searched with today's kernel sources and today's pass."""
    about = library.provenance.get("gates", {}).get(str(table), {})
    return (about.get("kernels"), about.get("pass")) == (kernels_sha(), rivals_sha(None))


def _add_finished(work: BuildFolder, table: Table, request: TuneRequest) -> None:
    """Add the gates of the weights that the search has finished, and print their number. Older ones are left out."""
    found = surely_faster(finished_intervals(work, request))
    weights = {one.weight for one in found}
    print(f"gates {table}: {len(weights)} of {len(request.ranges.ranges)} weights searched", flush=True)
    if found:
        library = work.load()
        library = library if _are_of_today(library, table) else replace(library, gates=())
        about = {"kernels": kernels_sha(), "pass": rivals_sha(None), **provenance_of(work, request)}
        with_gates(library, found, table, about).save(work.library)
