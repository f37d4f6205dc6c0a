"""Log of a training: a line of JSON per logged step, and a line for a person."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outblas.llm.train.rewards import PART_NAMES
from outblas.llm.train.training_folder import append_line

#: trl's name -> ours, of figures beside the parts of the reward.
_FIGURES = {
    "loss": "loss",
    "kl": "kl",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "completions/mean_length": "answer_tokens_mean",
    "completions/max_length": "answer_tokens_max",
    "completions/clipped_ratio": "answers_cut_off",
    "frac_reward_zero_std": "groups_without_variance",
    "answers/compiled": "share_compiled",
    "answers/passed": "share_passed",
    "answers/different": "share_different",
    "mean_token_accuracy": "token_accuracy",
    "step_time": "step_seconds",
}


def set_callbacks(trainer: Any, path: Path, say: Callable[[str], None], best: Callable[[], float | None]) -> None:
    """Make a trainer write a log file and print a line for each logged step, on the first process.

    Return None. The trainer's own lines of figures are switched off; its progress bar stays.

    Args:
        trainer: transformers Trainer, changed in place.
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

    Example: ``row_of(3, {"loss": 0.5, "rewards/total/mean": -1.0})`` returns ``{"step": 3, "rewards": {"total":
    {"mean": -1.0, "std": None}}, "loss": 0.5}``.

    Args:
        logs: what the trainer logs, by its names.

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

    Args:
        row: result of :func:`row_of`.
        best: best speed-up so far; None: not said.
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
