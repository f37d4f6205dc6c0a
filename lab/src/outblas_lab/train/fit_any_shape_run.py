"""Export the table of recorded cells for any shape, fit kernels and margin to it, and score them on unseen problems.

``outblas_lab.build.any_shape_run`` records, proves and benches; the command is ``outblas fit any-shape``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import KernelConfig, config_name
from outblas.core.files import write_atomic, write_json
from outblas.core.gpu_records import reference_gpu
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.config_text import config_from_name
from outblas.predict.any_shape import AnyShapeModel
from outblas.records.parquet import parquet_bytes
from outblas.records.provenance import collect_provenance
from outblas.records.store import Store
from outblas_lab.recordings.recording import Recording
from outblas_lab.train.fit_any_shape import (
    KEPT_SUITE,
    RANDOM,
    SLOW,
    SPLITS,
    Guess,
    OfferedCells,
    cells_of_recording,
    choose_rule,
    figures,
    fit,
    general_kernels,
    guess_held_out,
    joined,
    outcome,
    read_problems,
    unaligned_kernels,
)


def packaged_folder(name: str) -> Path:
    """Return the package's folder of fitted data, with a file ``<gpu>.npz`` per GPU.

    Args:
        name: ``any_shape``, or ``answers`` of :mod:`outblas.predict.answer_choice`.
    """
    return Path(str(resources.files("outblas"))) / "data" / name


def export(store: Path, out: Path, answers: Mapping[str, str] | None = None) -> str:
    """Write the timed kernels of a store's first run as a Parquet table; return the counts in words.

    Its columns are ``problem`` (key), ``kernel`` (config name), ``median_us`` and ``torch_us``; its metadata has the
    provenance. Missing folders are made.

    Args:
        answers: key of a problem -> first answer of cuBLASLt's heuristic, one more column ``answer``.

    Raises:
        IndexError: the store has no run.
    """
    import pyarrow as pa

    with Store(store) as opened:
        run = opened.runs()[0]
        done = [e for e in opened.evaluations(run.run_id) if e.timing is not None]
    columns: dict[str, list[Any]] = {
        "problem": [e.problem.key for e in done],
        "kernel": [config_name(e.config) for e in done],
        "median_us": [e.timing.median_us for e in done if e.timing],
        "torch_us": [e.baselines_us["torch"] for e in done],
    }
    if answers is not None:
        columns["answer"] = [answers[key] for key in columns["problem"]]
    about = collect_provenance("outblas fit any-shape record", 0) | {"date": run.started}
    table = pa.table(columns).replace_schema_metadata({"provenance": json.dumps(about)})
    write_atomic(out, parquet_bytes(table))
    return f"{len(done)} cells of {len(set(columns['problem']))} problems"


def read_cells(path: Path) -> tuple[list[OfferedCells], dict[str, Any]]:
    """Read a file that :func:`export` wrote, or :func:`outblas_lab.build.any_shape_run.collect_trials`.

    Returns:
        (one :class:`OfferedCells` per problem, the provenance). A fit sees all of the kernels.

    Raises:
        RecordError: there is no such file, or it is damaged.
    """
    return read_problems(path, "recorded cells", "record, or collect", _cells_of_problem)


def _cells_of_problem(problem: Problem, gpu: Gpu, rows: Sequence[Mapping[str, Any]]) -> OfferedCells:
    first = rows[0]
    return OfferedCells(
        problem,
        tuple(config_from_name(row["kernel"]) for row in rows),
        np.log([row["torch_us"] / row["median_us"] for row in rows]).astype(np.float32),
        np.ones(len(rows), dtype=bool),
        first.get("suite", RANDOM),
        gpu,
        first.get("answer", ""),
        math.log(first["torch_us"] / first["rival_us"]) if "rival_us" in first else math.nan,
    )


@dataclass(frozen=True)
class FitData:
    """All cells of a fit.

    Attributes:
        cells: one entry per problem and GPU.
        random: the random problems alone.
        about: GPU -> counts, GPU, driver and date in words.
    """

    cells: list[OfferedCells]
    random: list[OfferedCells]
    about: dict[Gpu, str]


def read_all(files: Sequence[Path], every: int = 1) -> FitData:
    """Read cells of one or more GPUs, and the packaged recordings of these GPUs.

    Args:
        every: take each n-th problem of each source alone; 1: all.

    Raises:
        RecordError: a file is missing.
    """
    read = [read_cells(path) for path in files]
    measured = {cells[0].gpu: provenance for cells, provenance in read if cells}
    recorded = [cells_of_recording(Recording.load(gpu.name), gpu) for gpu in measured]
    all_cells = [each for cells in (*recorded, *(cells for cells, _ in read)) for each in cells]
    together, random = joined(all_cells)[::every], [each for each in all_cells if each.source == RANDOM]
    about = {}
    for gpu, provenance in measured.items():
        counts = Counter(each.source for each in together if each.gpu == gpu)
        words = ", ".join(f"{number} problems of {source}" for source, number in sorted(counts.items()))
        about[gpu] = f"{words}; {provenance['gpu']}, driver {provenance['driver']}, {provenance['date'][:10]}"
    return FitData(together, random, about)


def fit_all(files: Sequence[Path], proved: Path, folder: Path, report: Callable[[str], None]) -> list[str]:
    """Fit the speed-up over torch.matmul on all GPUs at once, and a margin for each; write them with the kernels.

    A GPU's file keeps its kernels, because these are proved and shipped. A new one has those of the reference GPU.

    Args:
        proved: JSON file of proof results; kernels under ``failed`` are left out. It may be missing.

    Returns:
        One line about the fit of each GPU.

    Raises:
        OutblasError: no margin keeps nearly all products from getting slower.
        RecordError: a file is missing.
    """
    data = read_all(files)
    guesses = guess_held_out(data.cells, "problems", report)
    nets, told = fit(data.cells), []
    folder.mkdir(parents=True, exist_ok=True)
    for gpu, about in data.about.items():
        same = [guess for guess in guesses if guess.cells.gpu == gpu]
        rule = choose_rule(same)
        taken = [outcome(guess, rule, "plain") or 0.0 for guess in same]
        slower = sum(gain < math.log(SLOW) for gain in taken)
        words = f"held out: {math.exp(np.mean(taken)):.3f} over torch.matmul, {slower} of {len(taken)} below {SLOW}"
        kernels, path = _kernels_for_any_shape(data, proved, folder, gpu), folder / f"{gpu.name}.npz"
        AnyShapeModel(nets, rule.margin, rule.sure, rule.sure_unaligned, f"{about}; {words}", kernels).save(path)
        bound = f"bound {rule.sure:g} or {rule.sure_unaligned:g} (unaligned) deviations below, margin {rule.margin}"
        told.append(f"{gpu.name}: {len(kernels)} kernels, {bound}; {words}: {path}")
    return told


def _kernels_for_any_shape(data: FitData, proved: Path, folder: Path, gpu: Gpu) -> tuple[KernelConfig, ...]:
    """Return the kernels of the file that is replaced, which ship, or of the reference GPU's file.

    Without both, they are those that were recorded, then those for unaligned rows. Kernels that failed a proof are left
    out.
    """
    do = "recreate it with: outblas fit any-shape prove"
    failed = read_object(proved, "proved kernels", do)["failed"] if proved.exists() else {}
    left_out = {name.split(" ", 1)[1] for name in failed}
    before = [folder / f"{name}.npz" for name in (gpu.name, reference_gpu().name)]
    shipped = next((AnyShapeModel.kernels_of(path.read_bytes()) for path in before if path.is_file()), ())
    if not shipped:
        recorded = {config for each in data.random for config in each.configs}
        found = [config for config in general_kernels(gpu) if config in recorded]
        shipped = (*found, *unaligned_kernels(data.random))
    return tuple(config for config in shipped if config_name(config) not in left_out)


def evaluate(files: Sequence[Path], out: Path, every: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Score the rule on problems that no fit has seen, and write the figures (no GPU).

    The problems are those of the GPU of the first file. The fits see the other GPUs, too.

    Args:
        every: score each n-th problem alone; 1: all.

    Returns:
        Split -> ``today``, a list of :func:`outblas_lab.train.fit_any_shape.figures`, and ``rules``, the rule of
        each fold; then ``data`` in words, ``every`` and ``provenance``.

    Raises:
        RecordError: a file is missing.
    """
    data = read_all(files, every)
    gpu = next(iter(data.about))
    found: dict[str, Any] = {}
    elsewhere: list[Guess] = []
    for split in SPLITS:
        guesses = [guess for guess in guess_held_out(data.cells, split, report) if guess.cells.gpu == gpu]
        # The bound for the suite that is kept out may not come from that suite.
        elsewhere = elsewhere or [guess for guess in guesses if guess.cells.source != KEPT_SUITE]
        rules = {
            fold: choose_rule(elsewhere if split == "suites" else [g for g in guesses if g.fold != fold])
            for fold in {guess.fold for guess in guesses}
        }
        found[split] = {
            "today": figures(guesses, rules),
            "rules": {str(fold): rule._asdict() for fold, rule in sorted(rules.items())},
        }
    found |= {"data": data.about[gpu], "every": every}
    found["provenance"] = collect_provenance("outblas fit any-shape evaluate", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, found)
    return found
