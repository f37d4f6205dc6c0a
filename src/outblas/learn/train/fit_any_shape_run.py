"""Export the table of recorded cells for any shape, and fit kernels and margin to it.

``outblas.search.any_shape_run`` records, proves and benches; the command is ``outblas fit any-shape``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import config_name
from outblas.core.errors import OutblasError, RecordError
from outblas.core.gpu_records import gpu_of_product, reference_gpu
from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name
from outblas.learn.any_shape import AnyShapeModel
from outblas.learn.policy import Policy
from outblas.learn.train.fit_any_shape import (
    KeptOutResult,
    OfferedCells,
    cells_of_recording,
    cross_validate,
    fit,
    general_kernels,
    score_choices,
)
from outblas.records.provenance import collect_provenance
from outblas.records.recording import Recording
from outblas.records.store import Store

#: A product below this times torch.matmul's speed is slower; so few may be, of those that a fit had not seen.
SLOW, SLOWER = 0.98, 0.002
MARGINS = (1.04, 1.06, 1.08, 1.1, 1.12, 1.15, 1.2)


def packaged_path() -> Path:
    """Return the package's path of the reference GPU's fitted data."""
    return Path(str(resources.files("outblas"))) / "data" / "any_shape" / f"{reference_gpu().name}.npz"


def export(store: Path, out: Path) -> str:
    """Write the timed kernels of a store's first run as a Parquet table.

    Its columns are ``problem`` (key), ``kernel`` (config name), ``median_us`` and ``torch_us``; its metadata has the
    provenance. Missing folders are made.

    Returns:
        The counts in words, e.g. ``"9600 cells of 1200 problems"``.

    Raises:
        IndexError: the store has no run.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with Store(store) as opened:
        run = opened.runs()[0]
        done = [e for e in opened.evaluations(run.run_id) if e.timing is not None]
    columns: dict[str, list[Any]] = {
        "problem": [e.problem.key for e in done],
        "kernel": [config_name(e.config) for e in done],
        "median_us": [e.timing.median_us for e in done if e.timing],
        "torch_us": [e.baselines_us["torch"] for e in done],
    }
    about = collect_provenance("outblas fit any-shape record", 0) | {"date": run.started}
    table = pa.table(columns).replace_schema_metadata({"provenance": json.dumps(about)})
    out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, out)
    return f"{len(done)} cells of {len(set(columns['problem']))} problems"


def read_cells(path: Path) -> tuple[list[OfferedCells], dict[str, Any]]:
    """Read a file that :func:`export` wrote.

    Returns:
        (one :class:`OfferedCells` per problem with ``outside=True``, the provenance).

    Raises:
        FileNotFoundError: there is no such file.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        grouped.setdefault(row["problem"], []).append(row)
    found = []
    for key, rows in grouped.items():
        gains = np.log([row["torch_us"] / row["median_us"] for row in rows]).astype(np.float32)
        configs = tuple(config_from_name(row["kernel"]) for row in rows)
        found.append(OfferedCells(Problem.from_key(key), configs, gains, outside=True))
    return found, json.loads(table.schema.metadata[b"provenance"])


def fit_all(cells: Path, proved: Path, out: Path, report: Callable[[str], None]) -> str:
    """Fit the kernels on offer, the speed-up over torch.matmul and the margin, and write them.

    Args:
        cells: file that :func:`export` wrote.
        proved: JSON file of proof results; kernels under ``failed`` are left out. It may be missing.
        out: the file to write.
        report: receives one line for each part of the fit.

    Returns:
        One line about the fit.

    Raises:
        OutblasError: no margin keeps nearly all products from getting slower.
        RecordError: the file ``cells`` is missing.
    """
    if not cells.is_file():
        raise RecordError(f"no file {cells}", "recorded cells", "make them: outblas fit any-shape record")
    measured, provenance = read_cells(cells)
    gpu = gpu_of_product(str(provenance["gpu"])) or reference_gpu()
    everything = [*cells_of_recording(Recording.load(gpu.name)), *measured]
    sure, margin, told = _most_for_few(cross_validate(everything, gpu, report))
    failed = json.loads(proved.read_text())["failed"] if proved.exists() else {}
    left_out = {name.split(" ", 1)[1] for name in failed}
    passed = {config for c in measured for config in c.configs if config_name(config) not in left_out}
    where = f"{provenance['gpu']}, driver {provenance['driver']}, {provenance['date'][:10]}"
    about = f"{len(measured)} random problems and {len(everything) - len(measured)} recorded ones; {where}; {told}"
    kernels = tuple(c for c in general_kernels(gpu) if c in passed)
    found = AnyShapeModel(kernels, fit(everything, gpu), margin, sure, Policy.load(gpu.name), about)
    out.parent.mkdir(parents=True, exist_ok=True)
    found.save(out)
    return f"{len(kernels)} kernels, bound {sure:g} deviations below, margin {margin}; {told}"


def _most_for_few(outcomes: Sequence[tuple[float, list[KeptOutResult]]]) -> tuple[float, float, str]:
    """(sure, margin, in words): the most speed where at most :data:`SLOWER` of the problems kept out get slower."""
    best = (0.0, 0.0, 0.0, 0)
    for sure, each in outcomes:
        for margin in MARGINS:
            mean, slower = score_choices(each, sure, margin, SLOW)
            if slower <= SLOWER * len(each) and mean > best[0]:
                best = (mean, sure, margin, slower)
    mean, sure, margin, slower = best
    if not margin:
        raise OutblasError("no margin keeps products from getting slower", "a few problems", "record more problems")
    return sure, margin, f"kept out: {mean:.3f} over torch.matmul, {slower} of {len(outcomes[0][1])} below {SLOW}"
