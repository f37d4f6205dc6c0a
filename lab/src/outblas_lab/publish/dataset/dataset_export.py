"""Write a recording as a data set for Hugging Face ``datasets`` and for Kernel Tuner."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outblas.core.config import config_name, launch_of
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.core.files import json_text, write_atomic
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us, regime
from outblas.core.suites import sample
from outblas.core.version import __version__
from outblas.records.parquet import check_parquet, parquet_bytes
from outblas.records.provenance import provenance_field, source_commit, utc_now
from outblas_lab.compare.splits import PUBLIC_SEED, PUBLIC_SHARE, PUBLIC_SPLIT, public_split
from outblas_lab.kernel_tuner.t4_files import task_of, to_cache, to_t4
from outblas_lab.recordings.recording import Recording, recording_sha
from outblas_lab.recordings.recording_files import CHOICE_CODES, CHOICES, STATUS_CODES, STATUSES

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT, KIND = 1, "recording-data-set"
SHEET, CARD = "datasheet.json", "README.md"
#: Folder of the files of Kernel Tuner.
KERNEL_TUNER = "kernel_tuner"
PROTOCOL = (
    "Each kernel passed the gates of OutBLAS on the problem before it was timed.",
    "Times are GPU times of mode offline: CUDA graphs of back-to-back calls, operands that rotate over more memory "
    "than L2 holds, kernel and baselines interleaved in random order.",
    "A median is over the rounds of its cell. Slow kernels have fewer rounds.",
)
#: Start of the name of a temporary folder.
_UNFINISHED = ".outblas-export-"
#: Called with (files done, files in all, name of the file).
Progress = Callable[[int, int, str], None]


def export_recording(
    recording: Recording, name: str, folder: Path, kernel_tuner: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Write a recording as a data set and return its data sheet.

    The folder gets Parquet tables in ``data/``, files of Kernel Tuner, the data sheet and the card. A folder that is
    missing appears as a whole or not at all. An empty one stays the same folder, so it may be a process' current one, a
    mount or a link. Its files appear at the end, the card last.

    Args:
        folder: folder to make or to fill; it must be missing or empty.
        kernel_tuner: number of held-out problems with files of Kernel Tuner, stratified by regime; 0: none.

    Raises:
        UsageError: the folder has files, or there are fewer held-out problems.
        RecordError: the disk refuses.
        ToolchainMissing: pyarrow is not installed.
    """
    check_parquet()
    there = _is_empty_folder(folder)
    split = public_split(recording.problems)
    if not 0 <= kernel_tuner <= len(split.held_out):
        wrong = f"--kernel-tuner is {kernel_tuner}"
        raise UsageError(wrong, f"an integer from 0 to {len(split.held_out)}", "pass another --kernel-tuner")
    chosen = sample(split.held_out, kernel_tuner, PUBLIC_SEED, gpu=recording.gpu) if kernel_tuner else []
    folder = folder.absolute()
    try:
        if not there:
            folder.parent.mkdir(parents=True, exist_ok=True)
        beside = folder if there else folder.parent
        unfinished = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{folder.name}-", dir=beside))
    except OSError as error:
        raise _refused(folder, error) from error
    try:
        parts = {"train": split.training, "test": split.held_out}
        files = _write_files(recording, parts, chosen, unfinished, progress)
        sheet = _data_sheet(recording, name, parts, files)
        write_atomic(unfinished / SHEET, json_text(sheet))
        write_atomic(unfinished / CARD, dataset_card(sheet).encode())
        if there:
            _is_empty_folder(folder)  # somebody may have put files there meanwhile
            for path in sorted(unfinished.iterdir(), key=lambda path: (path.name == CARD, path.name == SHEET)):
                os.replace(path, folder / path.name)
        else:
            unfinished.chmod(0o755)  # a temporary folder is private
            os.replace(unfinished, folder)
    except OSError as error:
        raise _refused(folder, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sheet


def _is_empty_folder(folder: Path) -> bool:
    """Return True for a folder without files, and False if nothing is there. What a killed export left is no file.

    Raises:
        UsageError: it is a file, or a folder with files.
        RecordError: it cannot be read.
    """
    try:
        if not os.path.lexists(folder):
            return False
        if folder.is_dir() and all(file.name.startswith(_UNFINISHED) for file in folder.iterdir()):
            return True
    except OSError as error:
        raise RecordError(
            f"{folder} cannot be read ({error.strerror or error})", "a readable directory", "pass another directory"
        ) from error
    raise UsageError(f"{folder} is not empty", "a new or empty directory", "pass another directory, or empty it")


def _refused(folder: Path, error: OSError) -> RecordError:
    return RecordError(
        f"cannot write {folder} ({error.strerror or error})", "a writable disk", "free some space or pass another path"
    )


def _write_files(
    recording: Recording, parts: dict[str, tuple[Problem, ...]], chosen: Sequence[Problem], folder: Path,
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Write all files but the sheet and the card; return path in the folder -> SHA-256, bytes and rows."""
    makers = {"cells": cells_table, "problems": problems_table, "baselines": baselines_table}
    total = len(makers) * len(parts) + 1 + sum(2 * len(recording.by_launch(p)) for p in chosen)
    files: dict[str, dict[str, Any]] = {}

    def keep(path: str, data: bytes, rows: int) -> None:
        write_atomic(folder / path, data)
        files[path] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "rows": rows}
        if progress is not None:
            progress(len(files), total, path)

    for table, make in makers.items():
        for part, problems in parts.items():
            made = make(recording, problems)
            keep(f"data/{table}-{part}.parquet", parquet_bytes(made), made.num_rows)
    kernels = kernels_table(recording)
    keep("data/kernels.parquet", parquet_bytes(kernels), kernels.num_rows)
    for problem in chosen:
        for launch in recording.by_launch(problem):
            task = task_of(recording, problem, launch)
            stem = f"{KERNEL_TUNER}/{problem.key}_{launch}"
            keep(f"{stem}.t4.json", json.dumps(to_t4(task), indent=1).encode(), len(task.cells))
            keep(f"{stem}.cache.json", to_cache(task).encode(), len(task.cells))
    return files


def _data_sheet(
    recording: Recording, name: str, parts: dict[str, tuple[Problem, ...]], files: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the data sheet: JSON values alone."""
    measured = {field: provenance_field(recording.provenance, field) for field in ("gpu", "driver", "toolchain")}
    counts = {status.value: int((recording.status == code).sum()) for code, status in enumerate(STATUSES)}
    return {
        "format": FORMAT,
        "kind": KIND,
        "recording": {"name": name, "suite": recording.suite, "sha256": recording_sha(recording)},
        **measured,
        "measured": {field: provenance_field(recording.provenance, field) for field in ("date", "commit", "command")},
        "clocks": f"not locked; the GPU's record has {recording.gpu.clock_mhz:.0f} MHz for the SMs",
        "protocol": list(PROTOCOL),
        "licence": "Apache-2.0",
        "problems": len(recording.problems),
        "candidates": len(recording.catalogue),
        "cells": {status: count for status, count in counts.items() if count},
        "split": {
            "kind": PUBLIC_SPLIT,
            "seed": PUBLIC_SEED,
            "share": PUBLIC_SHARE,
            **{part: len(problems) for part, problems in parts.items()},
        },
        "columns": {table: [asdict(column) for column in columns] for table, columns in COLUMNS.items()},
        "limits": _limits(recording, counts),
        "files": files,
        "written": {"outblas": __version__, "commit": source_commit(), "date": utc_now()},
    }


def _limits(recording: Recording, counts: dict[str, int]) -> list[str]:
    """Return what a user of the data must know, computed from them."""
    timed = np.isfinite(recording.median_us)
    spread = float(np.median(recording.spread[timed])) if timed.any() else 0.0
    once = float((recording.rounds[timed] == 1).mean()) if timed.any() else 0.0
    left_out = counts[Status.LEFT_OUT.value] / recording.status.size
    skipped = (recording.status == STATUS_CODES[Status.LEFT_OUT]) & (recording.chosen != CHOICE_CODES["none"])
    why = "a ranking model predicted them to be slow, or nobody chose them" if skipped.any() else "nobody chose them"
    tried = recording.status.size - counts[Status.LEFT_OUT.value] - counts[Status.ILLEGAL.value]
    failed = tried - counts[Status.PASSED.value]
    return [
        f"One GPU of one model was measured: {recording.provenance.get('gpu')}. Its times hold for no other.",
        f"{left_out:.0%} of the cells were left out: {why}.",
        f"{failed} of {tried} tried cells failed a gate.",
        f"The median spread of a cell is {spread:.2%}. {once:.0%} of the timed cells have one round.",
        "The fastest recorded time of a problem is a minimum over noisy times, so it is slightly too good.",
        "Clocks were not locked. Compare a time with the baselines of its own problem only.",
    ]


#: Hugging Face's classes of size: number of rows below which each applies.
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
_LARGEST = "1M<n<10M"


def dataset_card(sheet: Mapping[str, Any]) -> str:
    """Return the text of README.md."""
    recording, split = sheet["recording"], sheet["split"]
    lines = [
        *_header(sheet),
        f"# Kernels for matrix products, measured on {sheet['gpu']}",
        "",
        f"The dense matrix of {sheet['problems']} matrix products and {sheet['candidates']} candidate kernels. "
        "Each cell has a GPU time, or the reason why it has none.",
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'cells = load_dataset("PATH_OF_THIS_FOLDER", "cells")  # splits train and test',
        'kernels = load_dataset("PATH_OF_THIS_FOLDER", "kernels", split="train")  # kernel_id and every knob',
        "```",
        "",
        "## Measurement",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in _facts(sheet).items()),
        "",
        *(f"- {line}" for line in sheet["protocol"]),
        "",
        "## Split",
        "",
        f"`test` holds out {split['share']:.0%} of the (M, N, K), drawn with seed {split['seed']}: {split['test']} of "
        f"{sheet['problems']} problems. `outblas recording score` scores an agent on them.",
        "",
        "## Columns",
    ]
    for table, columns in sheet["columns"].items():
        lines += ["", f"### {table}", "", "| column | unit | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{c['name']}` | {c['unit'] or '–'} | {c['meaning']} |" for c in columns]
    lines += [
        "",
        "Table `kernels` has a column for each knob besides, null for a knob that the family lacks.",
        "",
        "## Limits",
        "",
        *(f"- {line}" for line in sheet["limits"]),
        "",
        *_kernel_tuner(sheet),
        "## Integrity",
        "",
        f"The recording is `{recording['name']}`, SHA-256 `{recording['sha256']}`. `datasheet.json` has the SHA-256 of "
        "every file, and all of this page in a form for programs.",
        "",
    ]
    return "\n".join(lines)


def _header(sheet: Mapping[str, Any]) -> list[str]:
    """Return the YAML header: licence, tags and the tables. Texts in it are quoted as JSON, which is YAML, too."""
    rows = sum(f["rows"] for path, f in sheet["files"].items() if path.startswith("data/cells"))
    size = next((name for below, name in _SIZES if rows < below), _LARGEST)
    lines = ["---", f"license: {sheet['licence'].lower()}", f'pretty_name: "GEMM kernels on {sheet["gpu"]}"']
    lines += ["tags:", *(f"- {tag}" for tag in ("gemm", "cuda", "autotuning", "kernel-tuner", "tabular"))]
    lines += ["task_categories:", "- tabular-regression", "size_categories:", f"- {size}", "configs:"]
    for table in sheet["columns"]:
        lines += [f"- config_name: {table}", *(["  default: true"] if table == "cells" else []), "  data_files:"]
        if table == "kernels":
            lines += ["  - split: train", f"    path: data/{table}.parquet"]
        else:
            for part in ("train", "test"):
                lines += [f"  - split: {part}", f"    path: data/{table}-{part}.parquet"]
    return [*lines, "---", ""]


def _facts(sheet: Mapping[str, Any]) -> dict[str, str]:
    measured, toolchain = sheet["measured"], sheet["toolchain"]
    versions = toolchain
    if isinstance(toolchain, Mapping):
        versions = ", ".join(f"{name} {version}" for name, version in toolchain.items() if version)
    return {
        "GPU": str(sheet["gpu"]),
        "driver": str(sheet["driver"]),
        "toolchain": str(versions),
        "clocks": sheet["clocks"],
        "date": str(measured["date"]),
        "commit": str(measured["commit"]),
        "licence": sheet["licence"],
    }


def _kernel_tuner(sheet: Mapping[str, Any]) -> list[str]:
    """Return the section on the files of Kernel Tuner; empty without such files."""
    count = sum(path.endswith(".cache.json") for path in sheet["files"])
    if not count:
        return []
    return [
        "## Kernel Tuner",
        "",
        f"`kernel_tuner/` has {count} pairs of T4 results and caches for the simulation mode, in milliseconds: a pair "
        "for each of a few problems of `test` and each launch option. `outblas export-t4` writes those of any other "
        "problem.",
        "",
    ]


@dataclass(frozen=True)
class DatasetColumn:
    """A column of a table."""

    name: str
    unit: str
    meaning: str


_PROBLEM = DatasetColumn("problem", "", "M_N_K_LAYOUT_DTYPE_ACC of C = A B")
_KERNEL_ID = DatasetColumn("kernel_id", "", "row of the kernel in table kernels, from 0")
_SPREAD = DatasetColumn("spread", "share", "(p75 - p25) / median over the rounds; null without a time")
#: Table -> its columns. Table ``kernels`` also has one column for each knob.
COLUMNS: dict[str, tuple[DatasetColumn, ...]] = {
    "cells": (
        _PROBLEM,
        _KERNEL_ID,
        DatasetColumn("launch", "", "launch option that the kernel needs: plain, pdl or weights"),
        DatasetColumn("status", "", "passed, left_out, illegal, or the gate that failed"),
        DatasetColumn("chosen", "", "how the cell was chosen: catalogue, model, random, grid or none"),
        DatasetColumn("median_us", "microseconds", "GPU time per call, median over the rounds; null unless passed"),
        _SPREAD,
        DatasetColumn("rounds", "rounds", "interleaved rounds behind the median; 0 unless passed"),
        DatasetColumn("baseline_us", "microseconds", "time of the fastest baseline of the problem"),
        DatasetColumn("speedup", "ratio", "baseline_us / median_us; above 1 the kernel is faster; null unless passed"),
    ),
    "problems": (
        _PROBLEM,
        DatasetColumn("m", "elements", "rows of A and C"),
        DatasetColumn("n", "elements", "columns of B and C"),
        DatasetColumn("k", "elements", "columns of A, rows of B"),
        DatasetColumn("layout", "", "TN: B is stored N x K. NN: B is stored K x N"),
        DatasetColumn("dtype", "", "type of A, B and C"),
        DatasetColumn("acc", "", "type of the sums"),
        DatasetColumn("flop", "FLOP", "2 M N K"),
        DatasetColumn("floor_us", "microseconds", "time of the roofline on this GPU"),
        DatasetColumn("regime", "", "the limit that sets the floor, and the size"),
    ),
    "baselines": (
        _PROBLEM,
        DatasetColumn("name", "", "torch, cublas, lt_heuristic, lt_auto or nvmmh"),
        DatasetColumn("median_us", "microseconds", "GPU time per call, median over the rounds"),
        _SPREAD,
        DatasetColumn("detail", "", "the algorithm that the baseline chose; may be empty"),
    ),
    "kernels": (
        _KERNEL_ID,
        DatasetColumn("kernel", "", "family and knobs in one text"),
        DatasetColumn("family", "", "kernel family"),
    ),
}


def cells_table(recording: Recording, problems: Sequence[Problem]) -> pa.Table:
    """Return one row per problem and kernel, problem after problem: len(problems) x C rows."""
    import pyarrow as pa

    part = recording.restricted_to(problems)
    rows, columns = (a.ravel() for a in np.indices(part.status.shape))
    failed = (part.status != STATUS_CODES[Status.PASSED]).ravel()
    baseline = np.array([part.best_baseline(p)[1] for p in part.problems])[rows]
    median = part.median_us.ravel().astype(np.float64)
    values = [
        _words([p.key for p in part.problems], rows),
        pa.array(columns.astype(np.int32)),
        _words([launch_of(c) for c in part.catalogue], columns),
        _words([s.value for s in STATUSES], part.status.ravel()),
        _words(CHOICES, part.chosen.ravel()),
        pa.array(median, mask=failed),
        pa.array(part.spread.ravel().astype(np.float64), mask=failed),
        pa.array(part.rounds.ravel().astype(np.int32)),
        pa.array(baseline),
        pa.array(baseline / np.where(failed, 1.0, median), mask=failed),
    ]
    return _table("cells", values)


def problems_table(recording: Recording, problems: Sequence[Problem]) -> pa.Table:
    """Return one row per problem, in the order of ``problems``."""
    import pyarrow as pa

    gpu = recording.gpu
    rows = [
        (p.key, p.m, p.n, p.k, p.layout, p.dtype, p.acc, p.flops, floor_us(p, gpu), regime(p, gpu)) for p in problems
    ]
    return _table("problems", [pa.array(list(values)) for values in zip(*rows, strict=True)])


def baselines_table(recording: Recording, problems: Sequence[Problem]) -> pa.Table:
    """Return one row per problem and timed baseline."""
    import pyarrow as pa

    rows = []
    for problem in problems:
        row = recording.row(problem)
        for name, us in recording.baselines_of(problem).items():
            spread, detail = recording.baseline_spread[name][row], recording.baseline_detail[name][row]
            rows.append((problem.key, name, us, float(spread), detail))
    return _table("baselines", [pa.array(list(values)) for values in zip(*rows, strict=True)])


def kernels_table(recording: Recording) -> pa.Table:
    """Return one row per candidate, with a column for each knob; null for a knob that its family lacks."""
    import pyarrow as pa

    catalogue = recording.catalogue
    knobs = list(dict.fromkeys(name for c in catalogue for name in c.knobs()))
    table = _table(
        "kernels",
        [
            pa.array(range(len(catalogue)), pa.int32()),
            pa.array([config_name(c) for c in catalogue]),
            pa.array([c.family for c in catalogue]),
        ],
    )
    for name in knobs:
        table = table.append_column(name, pa.array([c.knobs().get(name) for c in catalogue]))
    return table


def _words(words: Sequence[str], indices: np.ndarray) -> Any:
    """Return an Arrow array of texts by their indices; plain texts, which every reader of Parquet knows."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), pa.array(list(words))).cast(pa.string())


def _table(name: str, values: Sequence[Any]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_arrays(list(values), names=[column.name for column in COLUMNS[name]])
