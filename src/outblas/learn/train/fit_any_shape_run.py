"""Export the table of recorded cells for any shape, fit kernels and margin to it, and score them on unseen problems.

``outblas.search.any_shape_run`` records, proves and benches; the command is ``outblas fit any-shape``.
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
from outblas.core.errors import OutblasError, RecordError
from outblas.core.files import write_atomic, write_json
from outblas.core.gpu_records import gpu_of_product, reference_gpu
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.config_text import config_from_name
from outblas.kernels.families.registry import FAMILIES
from outblas.learn.any_shape import AnyShapeModel
from outblas.learn.policy import Policy
from outblas.learn.train.fit_any_shape import (
    RANDOM,
    OfferedCells,
    cells_of_recording,
    fit,
    general_kernels,
    unaligned_kernels,
)
from outblas.learn.train.former_choice import FORMER_RULE, former_cells, former_guess
from outblas.learn.train.held_out_choices import (
    KEPT_SUITE,
    SLOW,
    SPLITS,
    Guess,
    choose_rule,
    figures,
    guess_held_out,
    joined,
    outcome,
)
from outblas.records.parquet import parquet_bytes, read_whole
from outblas.records.provenance import collect_provenance
from outblas.records.recording import Recording
from outblas.records.store import Store


def packaged_path(folder: str = "any_shape") -> Path:
    """Return the package's path of the reference GPU's fitted data.

    Args:
        folder: ``any_shape``, or ``answers`` of :mod:`outblas.learn.answer_choice`.
    """
    return Path(str(resources.files("outblas"))) / "data" / folder / f"{reference_gpu().name}.npz"


def export(store: Path, out: Path, answers: Mapping[str, str] | None = None) -> str:
    """Write the timed kernels of a store's first run as a Parquet table.

    Its columns are ``problem`` (key), ``kernel`` (config name), ``median_us`` and ``torch_us``; its metadata has the
    provenance. Missing folders are made.

    Args:
        store: file of the evaluations.
        out: the table, which is replaced.
        answers: key of a problem -> first answer of cuBLASLt's heuristic, one more column ``answer``.

    Returns:
        The counts in words, e.g. ``"9600 cells of 1200 problems"``.

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
    """Read a file that :func:`export` wrote, or :func:`outblas.search.any_shape_trials.collect_trials`.

    Returns:
        (one :class:`OfferedCells` per problem, the provenance). A fit sees all of the kernels.

    Raises:
        RecordError: there is no such file, or it is damaged.
    """
    import pyarrow as pa

    if not path.is_file():
        raise RecordError(f"no file {path}", "recorded cells", "make them: outblas fit any-shape record, or collect")
    try:
        return _cells_of(read_whole(path))
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, OutblasError) as error:
        wrong, do = f"{path} cannot be read ({error})", "make it again: outblas fit any-shape record, or collect"
        raise RecordError(wrong, "a whole table of recorded cells", do) from error


def _cells_of(table: Any) -> tuple[list[OfferedCells], dict[str, Any]]:
    """Return what :func:`read_cells` does, of a table."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        grouped.setdefault(row["problem"], []).append(row)
    found = []
    for key, rows in grouped.items():
        gains = np.log([row["torch_us"] / row["median_us"] for row in rows]).astype(np.float32)
        configs = tuple(config_from_name(row["kernel"]) for row in rows)
        one = rows[0]
        rival = math.log(one["torch_us"] / one["rival_us"]) if "rival_us" in one else math.nan
        about = one.get("suite", RANDOM), one.get("answer", ""), rival
        found.append(OfferedCells(Problem.from_key(key), configs, gains, np.ones(len(rows), dtype=bool), *about))
    return found, json.loads(table.schema.metadata[b"provenance"])


@dataclass(frozen=True)
class FitData:
    """All cells of a fit.

    Attributes:
        cells: one entry per problem.
        random: the random problems alone.
        gpu: the GPU that was measured.
        about: counts, GPU, driver and date in words.
    """

    cells: list[OfferedCells]
    random: list[OfferedCells]
    gpu: Gpu
    about: str


def read_all(cells: Path, trials: Path, more: Sequence[Path] = (), every: int = 1) -> FitData:
    """Read the random problems, the trials of the packaged library, and the packaged recording of their GPU.

    Args:
        cells: file of the random problems.
        trials: file of the trials.
        more: files of further random problems.
        every: take each n-th problem of each source alone; 1: all.

    Raises:
        RecordError: a file is missing.
    """
    random, provenance = read_cells(cells)
    tried, _ = read_cells(trials)
    for path in more:
        random += read_cells(path)[0]
    gpu = gpu_of_product(str(provenance["gpu"])) or reference_gpu()
    together = joined([*cells_of_recording(Recording.load(gpu.name)), *tried, *random])[::every]
    counts = Counter(each.source for each in together)
    where = f"{provenance['gpu']}, driver {provenance['driver']}, {provenance['date'][:10]}"
    words = ", ".join(f"{number} problems of {source}" for source, number in sorted(counts.items()))
    return FitData(together, random, gpu, f"{words}; {where}")


def fit_all(
    cells: Path, trials: Path, more: Sequence[Path], proved: Path, out: Path, report: Callable[[str], None]
) -> str:
    """Fit the speed-up over torch.matmul and the margin, and write them with the kernels for any shape.

    A file at ``out`` keeps its kernels, because these are proved and shipped. Those for unaligned rows are chosen anew.

    Args:
        cells: file that :func:`export` wrote.
        trials: file of the library's trials.
        more: files of :mod:`outblas.search.any_shape_extension`.
        proved: JSON file of proof results; kernels under ``failed`` are left out. It may be missing.
        out: the file to write.
        report: receives one line for each part of the fit.

    Returns:
        One line about the fit.

    Raises:
        OutblasError: no margin keeps nearly all products from getting slower.
        RecordError: a file is missing.
    """
    data = read_all(cells, trials, more)
    guesses = guess_held_out(data.cells, "problems", data.gpu, report)
    rule = choose_rule(guesses, data.gpu)
    taken = [outcome(guess, rule, "plain", data.gpu) or 0.0 for guess in guesses]
    slower = sum(gain < math.log(SLOW) for gain in taken)
    told = f"kept out: {math.exp(np.mean(taken)):.3f} over torch.matmul, {slower} of {len(taken)} below {SLOW}"
    kernels = _kernels_for_any_shape(data, proved, out)
    nets = fit(data.cells, data.gpu)
    out.parent.mkdir(parents=True, exist_ok=True)
    AnyShapeModel(kernels, nets, rule.margin, rule.sure, f"{data.about}; {told}").save(out)
    return f"{len(kernels)} kernels, bound {rule.sure:g} deviations below, margin {rule.margin}; {told}"


def _kernels_for_any_shape(data: FitData, proved: Path, out: Path) -> tuple[KernelConfig, ...]:
    """Return the kernels of the file that is replaced, which ship; without one, those that were recorded.

    Then come those for unaligned rows. Kernels that failed a proof are left out.
    """
    do = "make it again: outblas fit any-shape prove"
    failed = read_object(proved, "proved kernels", do)["failed"] if proved.exists() else {}
    left_out = {name.split(" ", 1)[1] for name in failed}
    recorded = {config for each in data.random for config in each.configs}
    before = AnyShapeModel.kernels_of(out.read_bytes()) if out.is_file() else ()
    kernels = before or [config for config in general_kernels(data.gpu) if config in recorded]
    kernels = [config for config in kernels if not FAMILIES[config.family].for_unaligned_rows]
    kernels += unaligned_kernels(data.random)
    return tuple(config for config in kernels if config_name(config) not in left_out)


def evaluate(
    cells: Path, trials: Path, more: Sequence[Path], out: Path, every: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Score today's rule and the former one on problems that no fit has seen, and write the figures (no GPU).

    Args:
        cells: file that :func:`export` wrote.
        trials: file of the library's trials.
        more: files of :mod:`outblas.search.any_shape_extension`.
        out: JSON file to write.
        every: score each n-th problem alone; 1: all.
        report: receives one line for each part.

    Returns:
        Split -> ``today`` and ``former``, each a list of :func:`outblas.learn.train.held_out_choices.figures`; then
        ``data`` in words, ``every`` and ``provenance``.

    Raises:
        RecordError: a file is missing.
    """
    data = read_all(cells, trials, more, every)
    gpu, policy = data.gpu, Policy.load(data.gpu.name)
    kernels = frozenset(config for each in data.random for config in each.configs)
    found: dict[str, Any] = {}
    elsewhere: list[Guess] = []
    for split in SPLITS:
        guesses = guess_held_out(data.cells, split, gpu, report)
        # The bound for the suite that is kept out may not come from that suite.
        elsewhere = elsewhere or [guess for guess in guesses if guess.cells.source != KEPT_SUITE]
        rules = {
            fold: choose_rule(elsewhere if split == "suites" else [g for g in guesses if g.fold != fold], gpu)
            for fold in {guess.fold for guess in guesses}
        }
        former = guess_held_out(former_cells(data.cells), split, gpu, lambda line: report(f"former rule, {line}"))
        former = [former_guess(guess, kernels, policy, gpu) for guess in former]
        found[split] = {
            "today": figures(guesses, rules, gpu),
            "former": figures(former, dict.fromkeys(rules, FORMER_RULE), gpu),
            "rules": {str(fold): rule._asdict() for fold, rule in sorted(rules.items())},
        }
    found |= {"data": data.about, "every": every}
    found["provenance"] = collect_provenance("outblas fit any-shape evaluate", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, found)
    return found
