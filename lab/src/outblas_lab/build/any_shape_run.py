"""Fit the choice for shapes of no library: the offered kernels, their predicted speed, and the margin they must clear.

- ``record`` draws ``--count`` random problems. On each it measures ``--measurements`` kernels beside torch.matmul, in
  the same rounds. The policy chooses them among :func:`outblas_lab.train.fit_any_shape.general_kernels`.
- ``extend`` measures on further random problems the kernels on which the lower bounds are highest, since a fit is too
  sure of some. Problems with unaligned rows also have random kernels of the families for them.
- ``answers`` times all answers of cuBLASLt's heuristic: torch.matmul runs the first, and another is often faster.
- ``collect`` reads the kernels that the trials of the library's build timed.
- ``fit`` learns the speed-up over torch.matmul on these and on the packaged recordings. It chooses the margin that a
  prediction must clear on problems that were kept out (``outblas_lab.train.fit_any_shape_run``).
- ``evaluate`` scores the choice on kept-out problems (``outblas_lab.train.fit_any_shape``).
- ``prove`` proves every offered kernel by all gates, in each layout and dtype in which it ships.
- ``bench`` times the fitted choice on other random problems, beside every baseline.
"""

from __future__ import annotations

import functools
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np

from outblas.core.config import LAUNCHES, KernelConfig, config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.files import write_atomic, write_json
from outblas.core.journal import Journal, read_journal
from outblas.core.problem import Dtype, Layout, Problem
from outblas.core.rivals import LT_AUTO, LT_HEURISTIC, RIVALS
from outblas.core.roofline import Gpu
from outblas.core.stats import geomean
from outblas.core.suites import GRID_EXTENTS, LLM_LAYERS, PUBLISHED_SUITES, suite
from outblas.dispatch.unlisted_shapes import any_shape_chooser, ask_cublaslt, offered_kernels
from outblas.judge.baselines import LtAnswers
from outblas.judge.bench_cell import Options
from outblas.judge.gpu_clock import GpuClock
from outblas.kernels.catalogue import candidates
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import why_illegal
from outblas.predict.any_shape import AnyShapeModel, likeliest, network_inputs
from outblas.predict.extents import log_uniform
from outblas.records.library import Library
from outblas.records.library_row import AnswerChoice, LibraryChoice, LibraryRow
from outblas.records.parquet import parquet_bytes
from outblas.records.provenance import collect_provenance
from outblas.records.results import read_result, write_result
from outblas.records.store import Store
from outblas.runtime.cublas import version
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.device import gpu_of_device
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.live_evaluator import LiveEvaluator
from outblas.tune.tune import SearchOptions, tune
from outblas_lab.build.build_work import BuildFolder, Table
from outblas_lab.build.finalist_trials import OFFLINE_STARTS, TrialEntry, read_trial
from outblas_lab.pool.run_bench import BenchRequest, run_bench
from outblas_lab.train.fit_answers import SLOW
from outblas_lab.train.fit_any_shape import general_kernels
from outblas_lab.train.fit_any_shape_run import export


def collect_trials(work: Path, out: Path) -> str:
    """Write the kernels that the trials of a build timed as a Parquet table, one row per problem and kernel.

    Columns are ``problem`` (key), ``suite``, ``kernel`` (config name), ``torch_us``, ``median_us``, ``rival_us`` (the
    fastest baseline) and ``answer`` (the first answer of cuBLASLt's heuristic). Times are geometric means over the
    starts. A kernel's time is scaled to that of torch.matmul in the same start. Trials in blocks and of other workloads
    are left out, as they are of other clocks. The metadata has the provenance of the last trial.

    Args:
        out: the file, which is replaced. Missing folders are made.

    Returns:
        The counts in words, e.g. ``"12000 cells of 1835 problems"``.

    Raises:
        UsageError: the directory has no finished trial.
    """
    import pyarrow as pa

    entries: dict[tuple[Problem, str], list[TrialEntry]] = defaultdict(list)
    about: dict[str, Any] = {}
    for path in sorted(work.glob("*_trial_*.jsonl")):
        settings, *lines = read_journal(path) or [{"start": None}]
        if settings["start"] not in OFFLINE_STARTS or not settings["table"].endswith("fp32"):
            continue
        table = Table.parse(settings["table"])
        for problem, entry in read_trial(BuildFolder(work), table, settings["start"]).items():
            entries[problem, table.suite].append(entry)
        about = lines[-1]["provenance"]
    if not entries:
        raise UsageError(f"{work} has no finished trial", "a finished build directory", "run or unpack a build first")
    rows = [row for (problem, suite), starts in entries.items() for row in _rows(problem, suite, starts)]
    table_of_rows = pa.Table.from_pylist(rows).replace_schema_metadata({"provenance": json.dumps(about)})
    write_atomic(out, parquet_bytes(table_of_rows))
    return f"{len(rows)} cells of {len(entries)} problems"


def _rows(problem: Problem, suite: str, starts: list[TrialEntry]) -> list[dict[str, Any]]:
    torch_us = geomean([entry.timings["torch"].median_us for entry in starts])
    fastest = [min(entry.timings[name].median_us for name in RIVALS if name in entry.timings) for entry in starts]
    ratios: dict[str, list[float]] = defaultdict(list)
    for entry in starts:
        for name in entry.timings.keys() - set(entry.details):
            ratios[name].append(entry.timings[name].median_us / entry.timings["torch"].median_us)
    answer = next((entry.details[LT_HEURISTIC] for entry in starts if LT_HEURISTIC in entry.details), "")
    times = {"torch_us": torch_us, "rival_us": geomean(fastest)}
    shared = {"problem": problem.key, "suite": suite, **times, "answer": answer}
    return [{**shared, "kernel": name, "median_us": torch_us * geomean(each)} for name, each in sorted(ratios.items())]


def record_answers(problems: Sequence[Problem], store: Path, out: Path) -> str:
    """Time all answers for each problem, and write them as a table (GPU 0; a stopped run resumes in its journal).

    The table has a row per answer, in the heuristic's order: ``problem`` (key), ``answer``
    (:func:`outblas.runtime.cublas.describe`) and ``median_us``. Its metadata has the provenance.

    Args:
        out: path of the Parquet table, which is replaced. Missing folders are made.

    Returns:
        The counts in words, e.g. ``"9600 answers of 1600 problems"``.

    Raises:
        UsageError: the journal is of another GPU or cuBLASLt.
        RecordError: the journal is in use or damaged.
    """
    import pyarrow as pa

    gpu, lt = gpu_of_device(0), LtAnswers()
    journal = Journal(store, {"gpu": gpu.name, "cublaslt": version()})
    try:
        done = {entry["problem"]: entry["answers"] for entry in journal.entries}
        for number, problem in enumerate(problems, 1):
            if problem.key not in done:
                with GpuClock(problem, 0, gpu=gpu) as clock:
                    done[problem.key] = [list(pair) for pair in lt.times(clock).items()]
                journal.append({"problem": problem.key, "answers": done[problem.key]})
            if number % 100 == 0:
                print(f"{number} of {len(problems)} problems", flush=True)
    finally:
        journal.close()
    rows = [{"problem": p.key, "answer": a, "median_us": us} for p in problems for a, us in done[p.key]]
    about = collect_provenance("outblas fit any-shape answers", 0)
    table = pa.Table.from_pylist(rows).replace_schema_metadata({"provenance": json.dumps(about)})
    write_atomic(out, parquet_bytes(table))
    return f"{len(rows)} answers of {len(problems)} problems"


#: A kernel is proved on the first of these that it may compute, and on its representatives.
PROOF_EXTENTS = ((333, 1000, 520), (333, 1001, 521), (8, 512, 8192), (8, 512, 4096), (16, 512, 4096), (256, 256, 8192))
#: Kernels that are measured of each recorded problem.
MEASUREMENTS = 6
#: Above this a single product takes milliseconds, and both sides are as fast as the clock allows.
MAX_FLOPS = 1e12
#: Seeds of what is fitted and of what is benched.
RECORDED, BENCHED = 1, 2


def near_layers(rng: random.Random) -> tuple[int, int, int]:
    """Return (M, N, K): N and K of a random layer of a real model, and a log-uniform M from 1 to 8192."""
    n, k = rng.choice([nk for model in LLM_LAYERS.values() for nk in model])
    return log_uniform(rng, 1, 8192), n, k


def multiples_of_8(rng: random.Random) -> tuple[int, int, int]:
    """Return (M, N, K): N and K multiples of 8 from 32 to 16384, and any M from 1 to 16384, all log-uniform."""
    n, k = (8 * log_uniform(rng, 4, GRID_EXTENTS[-1] // 8) for _ in range(2))
    return log_uniform(rng, 1, GRID_EXTENTS[-1]), n, k


def any_extents(rng: random.Random, least: int = 1) -> tuple[int, int, int]:
    """Return (M, N, K), each log-uniform from ``least`` to 16384."""
    m, n, k = (log_uniform(rng, least, GRID_EXTENTS[-1]) for _ in range(3))
    return m, n, k


EXTENT_GENERATORS: tuple[Callable[[random.Random], tuple[int, int, int]], ...] = (
    near_layers,
    multiples_of_8,
    any_extents,
)


def shapes(count: int, seed: int) -> list[Problem]:
    """Return ``count`` different fp16 problems with fp32 accumulation, whose (M, N, K) is in no published suite.

    Extents come from :data:`EXTENT_GENERATORS` in turns; a product has at most 1e12 FLOP. Layout TN has probability
    3/4, else it is NN. The same arguments give the same problems, in the same order. 0 gives ``[]``.
    """
    rng = random.Random(seed)
    known = {(p.m, p.n, p.k) for name in PUBLISHED_SUITES for p in suite(name)}
    found: dict[Problem, None] = {}
    while len(found) < count:
        mnk = EXTENT_GENERATORS[len(found) % len(EXTENT_GENERATORS)](rng)
        if mnk not in known and 2 * math.prod(mnk) <= MAX_FLOPS:
            found[Problem(*mnk, rng.choice(("TN", "TN", "TN", "NN")))] = None
    return list(found)


def record(problems: Sequence[Problem], measurements: int, store: Path, cells: Path) -> str:
    """Measure the kernels that the policy chooses beside torch, and write them as a table (GPU 0, resumable).

    Args:
        store: file of the evaluations, in which a stopped run resumes.
        cells: path of the Parquet table, which is replaced.

    Returns:
        The counts in words, e.g. ``"9600 cells of 1200 problems"``.
    """
    gpu = gpu_of_device(0)
    general = general_kernels(gpu)
    measure(problems, measurements, store, "ppo", lambda p: [c for c in general if not why_illegal(p, c, gpu)], 1.3)
    return export(store, cells)


def measure(
    problems: Sequence[Problem],
    measurements: int,
    store: Path,
    agent: str,
    offered: Callable[[Problem], Sequence[KernelConfig]],
    drop_beyond: float,
) -> None:
    """Measure kernels that an agent chooses beside torch (GPU 0, resumable).

    Args:
        drop_beyond: see :class:`outblas.judge.bench_cell.Options`.
    """
    gpu = gpu_of_device(0)
    options = Options(0, gpu, rounds=7, baselines=("torch",), drop_beyond=drop_beyond, level="cell")

    def progress(done: int, of: int, mean: float) -> None:
        if done % 500 == 0:
            print(f"{done} of {of}, geometric mean of the best so far {mean:.3f}", flush=True)

    with LiveEvaluator(0, options, offered=offered) as evaluator, Store(store) as opened:
        made, at_once = make_agent(agent, 0, gpu), SearchOptions(per_round=measurements)
        tune(problems, made, measurements, evaluator, opened, "any_shapes", progress, at_once)


def prove(out: Path) -> bool:
    """Put every offered kernel through all gates, on representative problems, too (GPU 0); return True if all passed.

    Each kernel is tried in each layout and dtype in which it is on offer, on the first of :data:`PROOF_EXTENTS` on
    which it is legal.

    Args:
        out: JSON file that is written. ``passed`` is the number of passing (problem, kernel) pairs. ``failed`` is a
            dict: problem key and kernel name -> status and reason. ``provenance`` is the third key.
    """
    gpu, pairs = gpu_of_device(0), []
    library = Library.packaged(gpu.name)
    for layout, dtype in product(get_args(Layout), get_args(Dtype)):
        for config in offered_kernels(gpu.name, library, layout, dtype, "weights"):  # those of every call
            problems = (Problem(*mnk, layout, dtype) for mnk in PROOF_EXTENTS)
            pairs += [(p, config) for p in problems if not why_illegal(p, config, gpu)][:1]
    failed = {}
    with LiveEvaluator(0, Options(0, gpu, rounds=3, baselines=("torch",))) as evaluator:
        for done, e in enumerate(evaluator.evaluate(pairs), 1):
            if e.status is not Status.PASSED:
                failed[f"{e.problem.key} {config_name(e.config)}"] = f"{e.status}: {e.detail}"
            if done % 50 == 0 or done == len(pairs):
                print(f"{done} of {len(pairs)} kernels, {len(failed)} failed", flush=True)
    about = collect_provenance("outblas fit any-shape prove", 0)
    write_json(out, {"passed": len(pairs) - len(failed), "failed": failed, "provenance": about})
    return not failed


def bench(problems: Sequence[Problem], out: Path, summary_file: Path) -> dict[str, Any]:
    """Bench the decisions of :class:`AnyShapeModel` on problems that were never measured (GPU).

    torch runs the problems that the model leaves alone; they count as fall-backs.

    Args:
        summary_file: path of the JSON file with the figures of :func:`summarize_rows`, ``provenance`` and ``fit``.

    Returns:
        The figures of :func:`summarize_rows`, and ``fit``, the description of the model's fit.
    """
    gpu = gpu_of_device(0)
    library = library_of_choices(problems, gpu)
    run_bench(BenchRequest(problems, "any_shapes", library, out, baselines=RIVALS))
    result = read_result(out)
    # The published figures are without PDL; benchmarks/new_shapes.py has the other launch options.
    result = replace(result, rows=[row for row in result.rows if not row["pdl"]])
    write_result(result.rows, result.meta, out)
    about = AnyShapeModel.load(gpu.name).about
    summary = summarize_rows(result.rows)
    write_json(summary_file, {**summary, "provenance": result.meta["provenance"], "fit": about})
    return {**summary, "fit": about}


def library_of_choices(problems: Sequence[Problem], gpu: Gpu) -> Library:
    """Return the choices for problems that no library has, on GPU 0, as a library; cuBLASLt is asked about each.

    A problem of which no kernel is surely faster has a row that names torch, or an algorithm of cuBLASLt.

    Raises:
        UsageError: this GPU has no data for any shape, or ``OUTBLAS_ANY_SHAPE`` switches it off.
    """
    ask = functools.partial(ask_cublaslt, LtAlgorithms(), 0)
    choose = any_shape_chooser(gpu.name, Library.packaged(gpu.name, missing_ok=True), ask)
    if choose is None:
        raise UsageError(
            f"{gpu.name} has no choices for unlisted shapes",
            "a GPU with packaged choices",
            "unset OUTBLAS_ANY_SHAPE or use an H200",
        )
    rows = []
    for problem in problems:
        found = {launch: choose(problem, gpu, launch) for launch in LAUNCHES}
        named = [choice.algorithm for choice in found.values() if isinstance(choice, AnswerChoice)]
        baseline, detail = (LT_AUTO, named[0]) if named else ("torch", "")
        row = LibraryRow(problem, baseline, detail, "any_shape")
        kernels = {launch: choice for launch, choice in found.items() if isinstance(choice, LibraryChoice)}
        rows.append(replace(row, plain=kernels.get("plain"), pdl=kernels.get("pdl"), weights=kernels.get("weights")))
    return Library(gpu.name, tuple(rows))


def summarize_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of benched problems.

    A ratio ``over_torch`` is the time of torch over ours: above 1 we are faster. Means are geometric.

    Args:
        rows: result rows with ``fallback``, ``torch_us``, ``ours_us`` and ``lt_auto_us``. A fall-back counts as 1.

    Returns:
        A dictionary. ``shapes`` and ``ours`` are the numbers of all and of served problems (no fall-backs).
        ``over_torch`` (mean), ``worst_over_torch`` (minimum) and ``slower`` (number of ratios below 0.98) are of all.
        ``ours_over_torch`` and ``ours_over_lt_auto`` are means of the served ones.

    Raises:
        UsageError: no problem is served.
    """
    over = [1.0 if row["fallback"] else row["torch_us"] / row["ours_us"] for row in rows]
    ours = [row for row in rows if not row["fallback"]]
    return {
        "shapes": len(rows),
        "ours": len(ours),
        "over_torch": geomean(over),
        "worst_over_torch": min(over),
        "slower": sum(ratio < SLOW for ratio in over),
        "ours_over_torch": geomean([row["torch_us"] / row["ours_us"] for row in ours]),
        "ours_over_lt_auto": geomean([row["lt_auto_us"] / row["ours_us"] for row in ours]),
    }


#: The range of M of layers that no model has, and the least extent of other problems.
LAYER_M, LEAST_EXTENT = (1, 8192), 12
#: Multiple and range of N and K of layers that no model has.
LAYER_STEP, LAYER_EXTENTS = 64, (1024, 40960)
#: Kernels of a problem and launch option with the highest bounds, and others, drawn; random ones for unaligned rows.
CHOSEN, DRAWN, UNALIGNED = 6, 2, 24
#: Deviations from the prediction down to the bound by which they are ordered.
SURE = 0.5
#: Launch options of which a problem has kernels.
_OPTIONS = LAUNCHES[:2]


def extension_shapes(count: int, seed: int, layouts: Sequence[Layout] = ("TN", "NN")) -> list[Problem]:
    """Return ``count`` different fp16 problems, in turns: model layers, any extents, and layers of any width.

    The same arguments give the same problems, in the same order. 0 gives ``[]``.
    """
    rng = random.Random(seed)
    turns = (near_layers, functools.partial(any_extents, least=LEAST_EXTENT), _wide)
    found: dict[Problem, None] = {}
    while len(found) < count:
        mnk = turns[len(found) % len(turns)](rng)
        if 2 * math.prod(mnk) <= MAX_FLOPS:
            found[Problem(*mnk, layouts[len(found) // len(turns) % len(layouts)])] = None
    return list(found)


def _wide(rng: random.Random) -> tuple[int, int, int]:
    n, k = (LAYER_STEP * log_uniform(rng, *(e // LAYER_STEP for e in LAYER_EXTENTS)) for _ in range(2))
    return log_uniform(rng, *LAYER_M), n, k


def unaligned_kernels(problem: Problem, gpu: Gpu) -> list[KernelConfig]:
    """Return the kernels of families for unaligned rows that a search tries on a problem, without early loads."""
    return [
        config
        for config in candidates(problem, gpu)
        if FAMILIES[config.family].for_unaligned_rows and launch_of(config) in _OPTIONS
    ]


class PromisingKernels:
    """The kernels that are measured of each problem on a GPU, and cuBLASLt's answers on which they depend."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._model, self._library = AnyShapeModel.load(gpu.name), Library.packaged(gpu.name)
        self._lt = LtAlgorithms()

    def answer(self, problem: Problem) -> str:
        """Return the first answer of cuBLASLt's heuristic for a problem; empty without cuBLASLt."""
        return next(iter(ask_cublaslt(self._lt, 0, problem)), "")

    @functools.lru_cache(maxsize=256)  # noqa: B019 - one object per run
    def kernels(self, problem: Problem) -> Sequence[KernelConfig]:
        """Return the kernels of a problem, each once."""
        rng = random.Random(problem.key)
        answer = self.answer(problem)
        found: dict[KernelConfig, None] = {}
        for launch in _OPTIONS:
            offered = offered_kernels(self._gpu.name, self._library, problem.layout, problem.dtype, launch)
            configs = likeliest(problem, offered, self._gpu)
            if not configs:
                continue
            gain, deviation = self._model.nets.predict(network_inputs(problem, configs, self._gpu, answer))
            order = np.argsort(SURE * deviation - gain, kind="stable").tolist()
            rest = order[CHOSEN:]
            taken = order[:CHOSEN] + rng.sample(rest, min(DRAWN, len(rest)))
            found.update(dict.fromkeys(configs[i] for i in taken))
        if not problem.rows_aligned:
            more = unaligned_kernels(problem, self._gpu)
            found.update(dict.fromkeys(rng.sample(more, min(UNALIGNED, len(more)))))
        return tuple(found)


def extend(problems: Sequence[Problem], store: Path, cells: Path) -> str:
    """Measure the kernels of :class:`PromisingKernels` beside torch, and write them as a table (GPU 0, resumable).

    Returns:
        The counts in words, e.g. ``"9600 cells of 600 problems"``.
    """
    promising = PromisingKernels(gpu_of_device(0))
    most = 2 * (CHOSEN + DRAWN) + UNALIGNED
    measure(problems, most, store, "exhaustive", promising.kernels, 1.5)
    return export(store, cells, {problem.key: promising.answer(problem) for problem in problems})
