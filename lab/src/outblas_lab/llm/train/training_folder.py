"""The run folder: stages, checkpoints, logs, and folders that are published whole or not at all.

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
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outblas.core.errors import RecordError
from outblas.core.files import write_atomic
from outblas.core.plain_files import open_plain
from outblas_lab.llm.train.rewards import PART_NAMES

STAGES = ("supervised", "general", "correctness", "speed")
#: Name of the model that :func:`outblas_lab.llm.train.base_models.make_tiny` makes.
RANDOM_TINY = "random:tiny"
FINAL = "final"
_STATE = "trainer_state.json"


def publish_folder(folder: Path, save: Callable[[Path], None]) -> Path:
    """Let ``save`` fill a new folder, then move it to ``folder``, which it replaces; return ``folder``.

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
            f"cannot write {folder}: {error.strerror or error}", "a writable disk with free space", "pass another --run"
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
    """
    try:
        return int(json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def drop_later_lines(path: Path, steps: int) -> None:
    """Remove the lines of a log with a step after ``steps``, because a resumed training takes those steps again.

    A line that was cut off by a kill, or has no ``step``, is removed, too. A missing file is ignored. Example: of the
    steps 1, 2 and 3, ``drop_later_lines(path, 2)`` keeps 1 and 2.
    """
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().split(b"\n") if 0 <= _logged(line) <= steps]
    write_atomic(path, b"".join(line + b"\n" for line in kept))


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one row as a line of JSON and sync it to the disk. A missing file is made; its folder must exist.

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
            f"cannot write {path}: {error.strerror or error}",
            "a writable disk with free space",
            "free some space and pass --resume",
        ) from error


def _step(path: Path) -> int:
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else -1


def _logged(line: bytes) -> int:
    try:
        return int(json.loads(line.decode())["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1


Own = TypeVar("Own")
Done = TypeVar("Done")


def on_first_process(own: Sequence[Own], work: Callable[[list[Own]], list[Done]]) -> list[Done]:
    """Do work on the items of all processes in the first process, and return this process its share.

    Every process must call it, with equally many items. An error of the work is raised in all processes.

    Args:
        own: items of this process; they are pickled.
        work: makes one result of each item, in order; only the first process calls it.
    """
    from accelerate.state import PartialState
    from accelerate.utils import broadcast_object_list, gather_object

    state = PartialState()
    everyone: list[Own] = gather_object(list(own))
    shared: list[Any] = [None]
    if state.is_main_process:
        try:
            shared = [work(everyone)]
        except Exception as error:  # the other processes wait: they must hear of it, and end as well
            shared = [error]
    broadcast_object_list(shared)
    (found,) = shared
    if isinstance(found, Exception):
        raise found
    start = state.process_index * len(own)
    done: list[Done] = found[start : start + len(own)]
    return done


#: trl's name -> ours, of figures beside the parts of the reward.
_FIGURES = {
    "loss": "loss", "kl": "kl", "entropy": "entropy", "grad_norm": "grad_norm", "learning_rate": "learning_rate",
    "completions/mean_length": "answer_tokens_mean", "completions/max_length": "answer_tokens_max",
    "completions/clipped_ratio": "answers_cut_off", "frac_reward_zero_std": "groups_without_variance",
    "answers/compiled": "share_compiled", "answers/passed": "share_passed", "answers/different": "share_different",
    "mean_token_accuracy": "token_accuracy", "step_time": "step_seconds",
}  # fmt: skip


def set_callbacks(trainer: Any, path: Path, say: Callable[[str], None], best: Callable[[], float | None]) -> None:
    """Make a trainer write a log file and print a line for each logged step, on the first process.

    Return None. The trainer's own lines of figures are switched off; its progress bar stays.

    Args:
        path: file to which lines of JSON are appended, see :func:`row_of`.
        say: called with each line, see :func:`line_of`; ``print`` will do.
        best: called without arguments for each logged step; returns the best speed-up so far, None if nothing was
            timed.
    """
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if not state.is_world_process_zero or not logs or "train_runtime" in logs:
                return
            row = row_of(int(state.global_step), logs)
            append_line(path, row)
            say(line_of(row, int(state.max_steps), best()))

    class Bar(ProgressCallback):  # type: ignore[misc]
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            return None

    bar = trainer.pop_callback(ProgressCallback) is not None
    trainer.remove_callback(PrinterCallback)
    if bar:
        trainer.add_callback(Bar)
    trainer.add_callback(Log)


def row_of(step: int, logs: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the log as JSON values.

    Returns:
        ``step``; ``rewards`` (part, ``total`` or ``advantage`` -> ``{"mean", "std"}``) if rewards were logged; and the
        other known figures that were. Unknown names are left out. A value that is no finite number is None.
    """
    row: dict[str, Any] = {"step": step}
    rewards = {
        name: {"mean": _figure(logs[f"rewards/{name}/mean"]), "std": _figure(logs.get(f"rewards/{name}/std"))}
        for name in (*PART_NAMES, "total", "advantage")
        if f"rewards/{name}/mean" in logs
    }
    if rewards:
        row["rewards"] = rewards
    row |= {ours: _figure(logs[theirs]) for theirs, ours in _FIGURES.items() if theirs in logs}
    return row


def line_of(row: dict[str, Any], steps: int, best: float | None) -> str:
    """Return a logged step as one line for a person.

    Example: ``step 3/100, reward -1.23 ± 0.5, loss 0.5, 25% passed, best 1.200x``. What ``row`` lacks is left out, and
    so are parts of the reward and shares of 0.
    """
    said = [f"step {row['step']}/{steps}"]
    rewards = row.get("rewards", {})
    if "total" in rewards:
        said.append(f"reward {_text(rewards['total']['mean'])} ± {_text(rewards['total']['std'])}")
        means = [(name, rewards.get(name, {}).get("mean")) for name in PART_NAMES]
        said += [f"{name} {_text(mean)}" for name, mean in means if mean]
    said += [f"{name} {_text(row[name])}" for name in ("loss", "kl") if name in row]
    said += [f"{row[f'share_{name}']:.0%} {name}" for name in ("compiled", "passed") if row.get(f"share_{name}")]
    if best is not None:
        said.append(f"best {best:.3f}x")
    return ", ".join(said)


def _figure(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
