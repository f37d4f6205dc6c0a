"""A recording: the measured matrix problems x candidates of one GPU, with the baselines of the same run.

A recording is two Parquet files in one folder: ``<stem>_cells.parquet`` and ``<stem>_baselines.parquet``. Their schema
metadata (key ``outblas``, JSON) hold the problems, the candidates and the provenance. Both must agree, so that files of
different runs are never mixed. The matrix is dense: each cell has a verdict, or is marked as illegal or left out.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import LAUNCHES, Candidate, KernelConfig, Launch, config_name, launch_of
from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.evaluation import Status
from outblas.core.gpu_records import packaged_data, recorded_gpu
from outblas.core.install_hint import lab_hint
from outblas.core.problem import Problem
from outblas.core.rivals import fastest_baseline
from outblas.core.roofline import Gpu
from outblas.core.suites import SUITES, suite
from outblas.kernels.config_text import config_from_name
from outblas_lab.recordings.recording_files import (
    BASELINES,
    CELLS,
    CHOICE_CODES,
    CHOICES,
    FORMAT,
    STATUS_CODES,
    STATUSES,
    baselines_to_arrays,
    cells_to_arrays,
    read_table,
    write_table,
)

if TYPE_CHECKING:
    import pyarrow as pa

#: Candidates whose indices fit into int16.
MOST_INT16 = 2**15
_NOT_OFFERED = (STATUS_CODES[Status.LEFT_OUT], STATUS_CODES[Status.ILLEGAL])


@dataclass(frozen=True, eq=False)
class Recording:
    """A recording in memory: a matrix of P problems by C candidates.

    Attributes:
        catalogue: the candidates, one per column.
        status: int8[P, C], indices into :data:`outblas_lab.recordings.recording_files.STATUSES`.
        median_us: float32[P, C], GPU time per call in microseconds; NaN unless passed.
        spread: float32[P, C], (p75 - p25) / median; NaN unless passed.
        rounds: int16[P, C], number of interleaved rounds behind the median; 0 unless passed.
        baselines: name -> float32[P], microseconds per call; NaN if not measured.
        baseline_spread: name -> float32[P], (p75 - p25) / median; NaN if not measured.
        baseline_detail: name -> one line per problem (the chosen algorithm).
        chosen: int8[P, C], indices into :data:`outblas_lab.recordings.recording_files.CHOICES`, which says how each
            cell was chosen. By default, every cell comes from the catalogue.

    Raises:
        RecordError: the arrays are inconsistent.
    """

    suite: str
    problems: tuple[Problem, ...]
    catalogue: tuple[KernelConfig, ...]
    status: NDArray[np.int8]
    median_us: NDArray[np.float32]
    spread: NDArray[np.float32]
    rounds: NDArray[np.int16]
    baselines: dict[str, NDArray[np.float32]]
    baseline_spread: dict[str, NDArray[np.float32]]
    baseline_detail: dict[str, tuple[str, ...]]
    provenance: dict[str, Any]
    chosen: NDArray[np.int8] = field(default_factory=lambda: np.empty((0, 0), np.int8))
    _row: dict[Problem, int] = field(init=False, repr=False)
    _column: dict[Candidate, int] = field(init=False, repr=False)
    _launch: NDArray[np.str_] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_row", {p: i for i, p in enumerate(self.problems)})
        object.__setattr__(self, "_column", {c: i for i, c in enumerate(self.catalogue)})
        object.__setattr__(self, "_launch", np.array([launch_of(c) for c in self.catalogue], dtype=np.str_))
        if not self.chosen.size:
            object.__setattr__(self, "chosen", np.full(self.status.shape, CHOICE_CODES["catalogue"]))
        self._validate()

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> Recording:
        """Read all recordings of a directory, or one ``_cells.parquet`` file, as one matrix.

        Args:
            path_or_name: a path, or the name of a packaged recording, e.g. ``h200``. A packaged name takes precedence.

        Raises:
            UsageError: the recording does not exist.
            RecordError: a file is truncated, incomplete, of another version or from another run.
        """
        parts = [_load_part(folder, stem) for folder, stem in find_recordings(path_or_name)]
        return parts[0] if len(parts) == 1 else _merge(parts)

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """Write both files into a folder, each atomically, the cells last. Return the path of the cells.

        Raises:
            RecordError: the disk refuses.
        """
        import pyarrow as pa

        folder = Path(directory)
        stem = stem_of(self.suite, self.problems)
        rows, columns = (a.ravel() for a in np.indices(self.status.shape))
        passed = (self.status == STATUS_CODES[Status.PASSED]).ravel()
        words = pa.array([s.value for s in STATUSES])
        cells: list[pa.Array] = [
            pa.array(rows.astype(np.int32)),
            pa.array(columns.astype(np.int16 if len(self.catalogue) <= MOST_INT16 else np.int32)),
            pa.DictionaryArray.from_arrays(pa.array(self.status.ravel()), words),
            pa.array(self.median_us.ravel(), mask=~passed),
            pa.array(self.spread.ravel(), mask=~passed),
            pa.array(self.rounds.ravel()),
        ]
        if (self.chosen != CHOICE_CODES["catalogue"]).any():
            cells.append(pa.DictionaryArray.from_arrays(pa.array(self.chosen.ravel()), pa.array(CHOICES)))
        measured = [(i, name) for name in self.baselines for i in np.flatnonzero(np.isfinite(self.baselines[name]))]
        baselines: list[pa.Array] = [
            pa.array([i for i, _ in measured], pa.int32()),
            pa.array([name for _, name in measured], pa.string()).dictionary_encode(),
            pa.array([self.baselines[name][i] for i, name in measured], pa.float32()),
            pa.array([self.baseline_spread[name][i] for i, name in measured], pa.float32()),
            pa.array([self.baseline_detail[name][i] for i, name in measured], pa.string()).dictionary_encode(),
        ]
        metadata = {
            "suite": self.suite,
            "problems": [p.key for p in self.problems],
            "catalogue": [config_name(c) for c in self.catalogue],
            "provenance": self.provenance,
        }
        write_table(folder / (stem + BASELINES), BASELINES, baselines, metadata)
        write_table(folder / (stem + CELLS), CELLS, cells, metadata)
        return folder / (stem + CELLS)

    @property
    def gpu(self) -> Gpu:
        """Return the GPU that was measured. Raises RecordError if the file has no record and its GPU is not known."""
        return recorded_gpu(self.provenance)

    def row(self, problem: Problem) -> int:
        """Return the row index of a problem, from 0. Raises UsageError if it was not recorded."""
        index = self._row.get(problem)
        if index is None:
            kind = (problem.layout, problem.dtype, problem.acc)
            kinds = sorted({"_".join((p.layout, p.dtype, p.acc)) for p in self.problems})
            named = [name for name in SUITES if problem in suite(name, *kind)]
            absent = named[:1] if set(named).isdisjoint(self.suite.split("+")) else []
            raise UsageError(
                f"suite {absent[0]} needs a GPU: it is not recorded ({problem.key})"
                if absent
                else f"problem {problem.key} needs a GPU: it is not in the recording",
                f"one of the recording's {len(self.problems)} problems (suite {self.suite}; {', '.join(kinds)})",
                f"pass {'another suite' if absent else 'a recorded problem'} or a live GPU (--device cuda:0)",
            )
        return index

    def catalogue_index(self, config: Candidate) -> int | None:
        """Return the column index of a config, from 0; None if it is not in the catalogue."""
        return self._column.get(config)

    def recorded_mask(self, problem: Problem) -> NDArray[np.bool_]:
        """Return bool[C] of a problem: True for measured cells (passed or failed), False for illegal or skipped."""
        return ~np.isin(self.status[self.row(problem)], _NOT_OFFERED)

    def by_launch(self, problem: Problem) -> dict[Launch, NDArray[np.intp]]:
        """Return launch option -> column indices of the problem's recorded cells that need it. Options without cells
        are absent.
        """
        recorded = self.recorded_mask(problem)
        found = {launch: np.flatnonzero(recorded & (self._launch == launch)) for launch in LAUNCHES}
        return {launch: columns for launch, columns in found.items() if len(columns)}

    def best(self, problem: Problem, pdl: bool = True) -> tuple[KernelConfig, float] | None:
        """Return (fastest passing config, its microseconds), or None. ``pdl=False`` excludes PDL kernels."""
        row = self.row(problem)
        allowed = self.status[row] == STATUS_CODES[Status.PASSED]
        if not pdl:
            allowed &= np.array([not c.pdl for c in self.catalogue], dtype=bool)
        if not allowed.any():
            return None
        index = int(np.argmin(np.where(allowed, self.median_us[row], np.inf)))
        return self.catalogue[index], float(self.median_us[row, index])

    def restricted_to(self, problems: Sequence[Problem]) -> Recording:
        """Return the recording with only these problems, in this order.

        Raises:
            UsageError: a problem was not recorded.
            RecordError: ``problems`` is empty.
        """
        return _rows(self, [self.row(p) for p in problems])

    def baselines_of(self, problem: Problem) -> dict[str, float]:
        """Return baseline name -> microseconds of a problem's measured baselines; UsageError as :meth:`row`."""
        row = self.row(problem)
        return {name: float(us[row]) for name, us in self.baselines.items() if np.isfinite(us[row])}

    def best_baseline(self, problem: Problem) -> tuple[str, float]:
        """Return (name, microseconds) of the fastest rival (:func:`outblas.core.rivals.fastest_baseline`)."""
        found = self.baselines_of(problem)
        name = fastest_baseline(found)
        return name, found[name]

    def _validate(self) -> None:
        """Raise RecordError with the first fault that the arrays have."""
        shape = (len(self.problems), len(self.catalogue))
        faults = {
            "no problem or no candidate": 0 in shape,
            "a problem or candidate listed twice": (len(self._row), len(self._column)) != shape,
            "arrays of another shape than problems x catalogue": any(
                a.shape != shape for a in (self.status, self.median_us, self.spread, self.rounds, self.chosen)
            )
            or any(a.shape != shape[:1] for a in (*self.baselines.values(), *self.baseline_spread.values())),
            "baselines whose names disagree": not self.baselines.keys()
            == self.baseline_spread.keys()
            == self.baseline_detail.keys(),
        }
        if not any(faults.values()):
            passed = self.status == STATUS_CODES[Status.PASSED]
            positive = np.isfinite(self.median_us) & (self.median_us > 0)
            known = np.array([np.isfinite(us) & (us > 0) for us in self.baselines.values()]).reshape(-1, shape[0])
            faults = {
                "a status that does not exist": bool(((self.status < 0) | (self.status >= len(STATUSES))).any()),
                "a choice that does not exist": bool(((self.chosen < 0) | (self.chosen >= len(CHOICES))).any()),
                "a cell that nobody chose, with an answer": bool(
                    (self.status[self.chosen == CHOICE_CODES["none"]] != STATUS_CODES[Status.LEFT_OUT]).any()
                ),
                "a passed cell without a positive time": not positive[passed].all(),
                "a passed cell without spread or rounds": not (
                    (np.isfinite(self.spread) & (self.spread >= 0) & (self.rounds > 0))[passed].all()
                ),
                "a baseline without spread": any(
                    not np.isfinite(self.baseline_spread[name][np.isfinite(us)]).all()
                    for name, us in self.baselines.items()
                ),
                "a time in a cell that did not pass": bool(np.isfinite(self.median_us[~passed]).any()),
                "a baseline whose time is not positive": any((us <= 0).any() for us in self.baselines.values()),
                "a problem without a baseline": not known.any(axis=0).all(),
            }
        for fault, found in faults.items():
            if found:
                raise RecordError(f"the recording has {fault}", "a consistent recording", "record again")


def stem_of(suite: str, problems: Sequence[Problem]) -> str:
    """Return the start of the files' names, of the suite and the first problem: e.g. ``"grid1000_TN_fp16_fp32"``."""
    first = problems[0]
    return "_".join((suite, first.layout, first.dtype, first.acc))


def _load_part(folder: Traversable, stem: str) -> Recording:
    """Return the recording of one pair of files. Raises RecordError if they are damaged or do not match."""
    cells, metadata = read_table(folder.joinpath(stem + CELLS), CELLS)
    baselines, other = read_table(folder.joinpath(stem + BASELINES), BASELINES)
    if {**metadata, "kind": ""} != {**other, "kind": ""}:
        wrong = f"recording {stem}: cells and baselines are from different runs"
        raise RecordError(wrong, "two files written together", "record again, or copy both files again")
    import pyarrow as pa

    try:
        problems = tuple(Problem.from_key(key) for key in metadata["problems"])
        catalogue = tuple(config_from_name(name) for name in metadata["catalogue"])
        status, median, spread, rounds, chosen = cells_to_arrays(cells, len(problems), len(catalogue))
        return Recording(
            str(metadata["suite"]), problems, catalogue, status, median, spread, rounds,
            *baselines_to_arrays(baselines, len(problems)), dict(metadata["provenance"]), chosen=chosen,
        )  # fmt: skip
    except (
        OutblasError, pa.ArrowException, AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError
    ) as error:  # fmt: skip
        raise RecordError(
            f"recording {stem} cannot be used ({error})", f"a complete recording of format {FORMAT}", "record again"
        ) from error


def _each_problem_once(parts: list[Recording]) -> list[Recording]:
    """Return the parts without repeated problems; the first part with a problem keeps it, so its row is of one run.

    Raises RecordError if a part has only problems of earlier parts.
    """
    seen: set[Problem] = set()
    kept: list[Recording] = []
    for part in parts:
        rows = [i for i, p in enumerate(part.problems) if p not in seen]
        seen.update(part.problems)
        if not rows:
            raise RecordError(
                f"all {len(part.problems)} problems of recording {part.suite} are listed twice",
                "one recording per table", "remove one of the two recordings",
            )  # fmt: skip
        kept.append(part if len(rows) == len(part.problems) else _rows(part, rows))
    return kept


def _rows(part: Recording, rows: list[int]) -> Recording:
    """Return the recording with only the rows of these indices, in this order."""
    return replace(
        part,
        problems=tuple(part.problems[i] for i in rows),
        status=part.status[rows],
        median_us=part.median_us[rows],
        spread=part.spread[rows],
        rounds=part.rounds[rows],
        chosen=part.chosen[rows],
        baselines={name: us[rows] for name, us in part.baselines.items()},
        baseline_spread={name: spread[rows] for name, spread in part.baseline_spread.items()},
        baseline_detail={name: tuple(lines[i] for i in rows) for name, lines in part.baseline_detail.items()},
    )


def _merge(parts: list[Recording]) -> Recording:
    """Return one matrix over all problems and candidates. A cell that is in no part counts as left out.

    Raises RecordError if the parts are of several GPUs, or a part only repeats others.
    """
    if len({part.gpu.name for part in parts}) > 1:
        wrong = "the folder contains recordings of several GPUs"
        raise RecordError(wrong, "recordings of one GPU", "use one folder per GPU")
    parts = _each_problem_once(parts)
    catalogue = tuple(dict.fromkeys(c for part in parts for c in part.catalogue))
    column = {c: i for i, c in enumerate(catalogue)}
    problems = tuple(p for part in parts for p in part.problems)
    shape = (len(problems), len(catalogue))
    status = np.full(shape, STATUS_CODES[Status.LEFT_OUT], np.int8)
    median, spread = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    rounds, chosen = np.zeros(shape, np.int16), np.full(shape, CHOICE_CODES["none"])
    top = 0
    for part in parts:
        at = np.ix_(range(top, top + len(part.problems)), [column[c] for c in part.catalogue])
        status[at], median[at], spread[at], rounds[at] = part.status, part.median_us, part.spread, part.rounds
        chosen[at] = part.chosen
        top += len(part.problems)
    names = tuple(dict.fromkeys(name for part in parts for name in part.baselines))

    def stacked(arrays: Iterable[dict[str, Any]], name: str) -> NDArray[np.float32]:
        empty = [np.full(len(part.problems), np.nan, np.float32) for part in parts]
        return np.concatenate([a.get(name, e) for a, e in zip(arrays, empty, strict=True)])

    return Recording(
        "+".join(dict.fromkeys(part.suite for part in parts)),
        problems,
        catalogue,
        status,
        median,
        spread,
        rounds,
        {name: stacked((p.baselines for p in parts), name) for name in names},
        {name: stacked((p.baseline_spread for p in parts), name) for name in names},
        {name: tuple(d for p in parts for d in p.baseline_detail.get(name, ("",) * len(p.problems))) for name in names},
        {"gpu": parts[0].provenance.get("gpu"), "parts": [part.provenance for part in parts]},
        chosen,
    )


@dataclass(frozen=True)
class TrainingPart:
    """Problems of a recording for a training.

    Attributes:
        problems: recorded problems; a training reads no others.
    """

    recording: Recording
    problems: tuple[Problem, ...]


def packaged() -> list[str]:
    """Return the sorted names of the recordings that come with outblas-lab: ``["h100", "h200"]``."""
    root = _package_root()
    return sorted(d.name for d in root.iterdir() if d.is_dir()) if root.is_dir() else []


def _package_root() -> Traversable:
    return packaged_data("recordings")


def find_recordings(path_or_name: str | os.PathLike[str]) -> list[tuple[Traversable, str]]:
    """Return (folder, stem) of each recording at a path or packaged name.

    Args:
        path_or_name: a folder, a ``_cells.parquet`` file, or a packaged name, which wins over a path.

    Raises:
        UsageError: no such recording.
    """
    text = os.fspath(path_or_name)
    folder: Traversable
    if text in packaged():
        folder = _package_root().joinpath(text)
    else:
        path = Path(text)
        if path.is_file() and path.name.endswith(CELLS):
            return [(cast("Traversable", path.parent), path.name.removesuffix(CELLS))]
        folder = cast("Traversable", path)
    names = sorted(f.name for f in folder.iterdir()) if folder.is_dir() else []
    # A name that starts with a dot belongs to an interrupted write.
    stems = [n.removesuffix(CELLS) for n in names if n.endswith(CELLS) and not n.startswith(".")]
    if not stems:
        known = packaged()
        raise UsageError(
            f"recording {text!r} does not exist",
            (f"the name of a packaged recording ({', '.join(known)}) or " if known else "") + f"a folder of *{CELLS}",
            "check the name, or create one with: outblas record" if known else f"for packaged recordings, {lab_hint()}",
        )
    return [(folder, stem) for stem in stems]


def recording_sha(recording: Recording) -> str:
    """Return the SHA-256 of the matrix, 64 hex digits: problems, candidates, statuses, times, spreads and rounds.

    The choices count, too, if a problem had candidates of its own.
    """
    names = [[p.key for p in recording.problems], [config_name(c) for c in recording.catalogue]]
    digest = hashlib.sha256(json.dumps(names).encode())
    for array in (recording.status, recording.median_us, recording.spread, recording.rounds):
        digest.update(np.nan_to_num(array, nan=-1.0).tobytes())
    if (recording.chosen != CHOICE_CODES["catalogue"]).any():
        digest.update(recording.chosen.tobytes())
    return digest.hexdigest()
