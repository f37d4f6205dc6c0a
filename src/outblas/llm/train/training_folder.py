"""The run folder: stages, checkpoints, and folders that are published whole or not at all.

- ``RUN/base``: for random:tiny only, the model at the beginning of the training.
- ``RUN/store.sqlite``: every evaluation of all stages.
- ``RUN/tasks.sqlite``: those of the stage ``general``, whose kernels are no products.
- ``RUN/<stage>/settings.json``: settings of the stage.
- ``RUN/<stage>/archive.jsonl``: the kernels with which the archive of the stage's prompts begins.
- ``RUN/<stage>/checkpoint-<step>``: checkpoints to resume.
- ``RUN/<stage>/log.jsonl``: a line per logged step.
- ``RUN/<stage>/answers.jsonl``: a line per answer, with its outcome.
- ``RUN/<stage>/conversations.jsonl``: a line per step with the conversations that go on (``--turns``).
- ``RUN/<stage>/final``: the trained model (or LoRA adapter) and its tokenizer.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.files import write_atomic
from outblas.core.plain_files import open_plain

STAGES = ("supervised", "general", "correctness", "speed")
FINAL = "final"
_STATE = "trainer_state.json"


def publish_folder(folder: Path, save: Callable[[Path], None]) -> Path:
    """Let ``save`` fill a new folder beside ``folder``, then move it there and return ``folder``. An earlier one is
    replaced.

    Example: ``publish_folder(Path("x/y"), lambda new: (new / "a").write_text("b"))`` returns ``Path("x/y")``, which has
    the file ``a``.

    Args:
        folder: path of the result; missing parents are made.
        save: called once with the new folder's path, which exists and is empty; writes its files. Its result is
            ignored.

    Raises:
        RecordError: the disk refuses it (an OSError). An earlier folder then stays.
    """
    scratch = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    former = scratch.with_suffix(".old")
    try:
        for path in (scratch, former):
            shutil.rmtree(path, ignore_errors=True)
        scratch.mkdir(parents=True)
        save(scratch)
        if folder.exists():  # moved away in one step: a process that is killed now leaves no half of a folder
            os.replace(folder, former)
        os.replace(scratch, folder)
        shutil.rmtree(former, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if former.exists() and not folder.exists():
            os.replace(former, folder)
        raise RecordError(
            f"cannot write {folder}: {error.strerror or error}", "a writable disk with free space", "choose another run"
        ) from error
    return folder


def last_checkpoint(stage: Path) -> Path | None:
    """Return the latest complete checkpoint (that of most steps), None without one.

    Its state is written last. A process that is killed while it saves leaves an incomplete checkpoint, which is
    removed. Example: ``last_checkpoint(Path("t/speed"))`` returns ``Path("t/speed/checkpoint-50")``.

    Args:
        stage: the stage's folder, which holds folders ``checkpoint-<step>``. A missing one gives None.
    """
    found = sorted((_step(path), path) for path in stage.glob("checkpoint-*") if _step(path) >= 0)
    whole = None
    for _, path in found:
        if trained_steps(path) is None:
            shutil.rmtree(path, ignore_errors=True)
        else:
            whole = path
    return whole


def trained_steps(checkpoint: Path) -> int | None:
    """Return the number of steps of a checkpoint; None if its state is missing or cut off.

    Example: 5 if ``trainer_state.json`` has ``{"global_step": 5}``. The folder's name does not matter.

    Args:
        checkpoint: folder with ``trainer_state.json``, of which ``global_step`` is read.
    """
    try:
        return int(json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def drop_later_lines(path: Path, steps: int) -> None:
    """Remove the lines of a log with a step after ``steps``, because a resumed training takes those steps again.

    A line that was cut off by a kill, or has no ``step``, is removed, too. A missing file is ignored. Example: of the
    steps 1, 2 and 3, ``drop_later_lines(path, 2)`` keeps 1 and 2.

    Args:
        path: the log, one JSON object with ``step`` a line.
        steps: last step whose lines stay.
    """
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().split(b"\n") if 0 <= _logged(line) <= steps]
    write_atomic(path, b"".join(line + b"\n" for line in kept))


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one row as a line of JSON and sync it to the disk. A missing file is made; its folder must exist.

    Example: ``append_line(path, {"step": 1, "loss": 0.5})`` adds the line ``{"step": 1, "loss": 0.5}``.

    Args:
        row: the row; NaN and infinity raise ValueError.

    Raises:
        RecordError: the disk refuses it, or the folder is missing.
    """
    try:
        with io.BufferedRandom(open_plain(path)) as file:
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror or error}", "a writable disk with free space", "free some; resume"
        ) from error


def _step(path: Path) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else -1


def _logged(line: bytes) -> int:
    try:
        return int(json.loads(line.decode())["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1
