"""Evaluations of free kernels as JSON lines: a header with their origin, then one evaluation per line.

    {"format": "outblas-free-1", "gpu": "h200", "provenance": {...}}
    {"problem": {...}, "config": {"family": "free", "text": ...}, "status": ...}

Each line is written and flushed at once, so a killed run loses only the evaluation in progress. A last line that was
cut off is skipped when the file is read, and removed when it is continued.
"""

from __future__ import annotations

import io
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from outblas.core.errors import OutblasError, RecordError
from outblas.core.evaluation import Evaluation
from outblas.core.gpu_records import gpu_of_product
from outblas.core.plain_files import open_plain, read_plain_file
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json
from outblas_lab.custom.free_kernel import FreeKernel

FORMAT = "outblas-free-1"


@dataclass(frozen=True)
class RecordedEvaluations:
    """A recording of free kernels in memory, as :func:`load` returns it.

    ``find(problem, kernel)`` returns one evaluation or None. ``of(problem)`` returns a list.
    """

    gpu: Gpu
    provenance: dict[str, Any]
    evaluations: tuple[Evaluation, ...]
    _by_pair: dict[tuple[str, str], Evaluation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for e in self.evaluations:
            if isinstance(e.config, FreeKernel):
                self._by_pair[e.problem.key, e.config.name] = e

    def find(self, problem: Problem, kernel: FreeKernel) -> Evaluation | None:
        """Return the last recorded evaluation of a kernel on a problem; None if it was not recorded."""
        return self._by_pair.get((problem.key, kernel.name))

    def of(self, problem: Problem) -> list[Evaluation]:
        """Return all evaluations on one problem, in the file's order; empty if it was not recorded."""
        return [e for e in self.evaluations if e.problem == problem]


def load(path: str | Path) -> RecordedEvaluations:
    """Read a recording from a file, as :class:`Recorder` writes it. A last line without an end is ignored.

    The first line is a header, such as ``{"format":"outblas-free-1","gpu":"h200","provenance":{}}``. Every other line
    is an evaluation. A header alone gives no evaluations, without an error.

    Raises:
        RecordError: it is missing, not of this format and version, of an unknown GPU, or damaged elsewhere than at its
            very end.
    """
    path = Path(path)
    try:
        lines = read_plain_file(path).split(b"\n")
    except OSError as error:
        raise _refused(path, f"cannot be read ({error.strerror})") from error
    try:
        head = json.loads(lines[0])
    except (ValueError, RecursionError):
        head = None
    if not (isinstance(head, dict) and head.get("format") == FORMAT and isinstance(head.get("provenance") or {}, dict)):
        raise _refused(path, f"is not a recording of free kernels ({FORMAT})")
    *whole, rest = lines[1:] or [b""]  # what follows the last end of line is whole only if it is nothing
    evaluations = tuple(_evaluation(path, number, line) for number, line in enumerate(whole, 2) if line.strip())
    gpu = gpu_of_product(str(head.get("gpu")))
    if gpu is None:
        raise _refused(path, f"is for GPU {head.get('gpu')!r}")
    return RecordedEvaluations(gpu, dict(head.get("provenance") or {}), evaluations)


class Recorder(AbstractContextManager["Recorder"]):
    """A file to which evaluations are appended. Use it as a context manager, or call ``close``.

    The constructor opens the file. A new file gets a header. An existing one is continued if its GPU is the same, and
    keeps its own provenance. Example: ``with Recorder("runs/a.jsonl", H200, {}) as recorder:
    recorder.append(evaluation)``.

    Args:
        path: the file; missing folders are created.

    Raises:
        RecordError: the file is no recording, is of another GPU, or cannot be written.
    """

    def __init__(self, path: str | Path, gpu: Gpu, provenance: dict[str, Any]) -> None:
        self._path = Path(path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size:
                found = load(self._path)
                if found.gpu != gpu:
                    raise _refused(self._path, f"was recorded on {found.gpu.name}")
                self._open()
                self._cut()
            else:
                self._open()
                self._write({"format": FORMAT, "gpu": gpu.name, "provenance": provenance})
        except OSError as error:
            raise _refused(self._path, f"cannot be written ({error.strerror})") from error

    def _open(self) -> None:
        self._file: IO[bytes] = io.BufferedRandom(open_plain(self._path))

    def append(self, evaluation: Evaluation) -> None:
        """Write one evaluation to the file as a line of JSON; it is on the disk when this returns. Return None.

        Nothing is replaced: a pair that was recorded before is then there twice.

        Raises:
            RecordError: the disk refuses. The file keeps its earlier content.
        """
        try:
            self._write(evaluation_to_json(evaluation))
        except OSError as error:
            raise _refused(self._path, f"cannot be written ({error.strerror})") from error

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self) -> None:
        """Remove half a line that a killed run has left."""
        data = read_plain_file(self._path)
        if b"\n" not in data:  # a whole head, or load() would have refused it
            self._file.seek(0, os.SEEK_END)
            self._file.write(b"\n")
            self._file.flush()
            return
        self._file.truncate(data.rfind(b"\n") + 1)
        self._file.seek(0, os.SEEK_END)

    def _write(self, data: dict[str, Any]) -> None:
        before = self._file.tell()
        try:
            self._file.write(json.dumps(data, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), before)
            raise


def _evaluation(path: Path, number: int, line: bytes) -> Evaluation:
    try:
        return evaluation_from_json(json.loads(line))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OutblasError) as error:
        raise _refused(path, f"has an unreadable line {number} ({error})") from error


def _refused(path: Path, kind: str) -> RecordError:
    do = "restore a backup or choose another path; nothing was lost"
    return RecordError(f"recording {path} {kind}", f"a JSON Lines file in format {FORMAT}", do)
