"""Tables of single studies: random shapes, several GPUs, language models at work and in training, and counters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from drawn_history import FORMAT
from figures.budget_table import FORMAT as BUDGET_FORMAT
from figures.budget_table import budget_lines
from figures.equal_work import equal_work_ratio, seconds, task_seconds

from outblas.core.problem import Problem
from outblas.kernels.config_text import config_from_name
from outblas_lab.pool.averages import FAR_BELOW
from outblas_lab.pool.counter_file import OURS, read_counters
from outblas_lab.publish.words import short_config
from pages.json_files import use_json
from pages.table_words import NOT_PUBLISHED, mean_in_words, table_lines

#: Number of draws of a protocol that are also counted together.
POOLED = 3


def draws_block(path: Path) -> str:
    """Return the table of all draws and the counts of each protocol; one line if the file is missing.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    if not path.exists():
        return "No draws are recorded."
    return use_json(path, "tools/drawn_history.py", lambda data: "\n".join(_lines(data["draws"])), FORMAT)


def _lines(draws: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    head = ["GPU, mode, layout", "measured", "code", "seed", "shapes", "geometric mean"]
    rows = []
    for draw in draws:
        found = [draw["by_alignment"].get(name) for name in ("aligned", "unaligned")]
        parts = [f"{part['geomean']:.3f}×" if part else "–" for part in found]
        cells = [_protocol(draw), draw["date"][:10], draw["commit"][:7], draw["seed"], draw["n"]]
        cells += [mean_in_words(draw["geomean"], None, draw["bootstrap"]), *parts, f"{draw['min']:.3f}×"]
        rows.append([*cells, draw["below_098"]])
    yield from table_lines([*head, "aligned", "unaligned", "worst", f"below {FAR_BELOW}"], 3, rows)
    yield ""
    for protocol, group in groupby(draws, _protocol):
        members = list(group)
        counts = ", ".join(str(draw["below_098"]) for draw in members)
        last = f"; last {POOLED} draws: {_share(members[-POOLED:])}" if len(members) > POOLED else ""
        yield f"- {protocol}: {counts} below {FAR_BELOW}, in total {_share(members)}{last}"


def _protocol(draw: Mapping[str, Any]) -> str:
    return f"{draw['gpu'].removeprefix('NVIDIA ').split(' ')[0]}, {draw['mode']}, {draw['layout']}"


def _share(draws: Sequence[Mapping[str, Any]]) -> str:
    below, of = (sum(draw[key] for draw in draws) for key in ("below_098", "n"))
    return f"{below:,} of {of:,} ({below / of:.1%})"


#: File name -> what the workers did.
SCALE_FILES = {"scale_out_free.json": "free kernels", "scale_out_ray.json": "candidates of templates, over Ray"}


def scale_block(folder: Path) -> str:
    """Return the table of runs on one and on several GPUs; one line if nothing was measured.

    Raises:
        RecordError: a file is there and cannot be used.
    """
    rows = [_scale_row(folder / name, words) for name, words in SCALE_FILES.items() if (folder / name).exists()]
    if not rows:
        return "Not measured on this GPU."
    head = ["work", "GPUs", "one GPU, s", "its task seconds", "several GPUs, s", "their task seconds", "on equal work"]
    return "\n".join(table_lines(head, 1, rows))


def _scale_row(path: Path, words: str) -> list[object]:
    def cells(data: Mapping[str, Any]) -> list[object]:
        one, several = data["one"], data["several"]
        found = [f"{several['measurements']} {words} (`{path.as_posix()}`)", len(several["gpus"])]
        found += [f"{figure(part):.1f}" for part in (one, several) for figure in (seconds, task_seconds)]
        return [*found, f"**{equal_work_ratio(one, several):.2f}×**"]

    return use_json(path, "benchmarks/scale_out.py", cells)


def _if_published(path: Path, made_by: str, text: Callable[[dict[str, Any]], str], form: str) -> str:
    """Return the text of a result file, by :func:`use_json`; one line if the file is missing."""
    return use_json(path, made_by, text, form) if path.exists() else NOT_PUBLISHED


#: Of ``benchmarks/equal_budgets.py``, beside the bench files.
BUDGETS = "equal_budgets.json"


def budgets_block(path: Path) -> str:
    """Return the table of learners on equal budgets with its source; one line if the file is missing.

    Raises:
        RecordError: the file is there and cannot be used.
    """

    def text(data: dict[str, Any]) -> str:
        about, where = data["recording"], data["provenance"]
        cells = f", cells of choice `{data['chosen']}`" if data["chosen"] else ""
        count = (
            f"{len(data['judged'])} problems of {about['provenance']['gpu']}, launch option {data['launch']}{cells}. "
        )
        count += "Best recorded time over the best time that was found, with 95% intervals over problems"
        weights = f"; language model of SHA-256 {data['weights'][:16]}" if data["weights"] else ""
        commits = " and ".join(commit[:8] for commit in where["commit"].split("; "))
        source = f"Recording `{about['name']}` (SHA-256 {about['sha256'][:16]}){weights}; {where['date'][:10]}, "
        source += f"commit {commits}."
        return "\n".join([f"{count}:", "", *budget_lines(data), "", source])

    return _if_published(path, "benchmarks/equal_budgets.py", text, BUDGET_FORMAT)


#: Of ``benchmarks/knob_training.py``, beside the bench files, and the names of its rows.
KNOBS = "knob_training.json"
_ANSWERERS = {
    "base": "model as loaded", "supervised": "after the supervised stage", "speed": "after GRPO",
    "random_recorded": "recorded kernels by chance", "most_frequent": "most frequent winners",
    "nearest_problem": "winners of the nearest training problems",
}  # fmt: skip
_CURVES = {"supervised": "loss", "speed": "reward"}
_RATES, _SPEEDS = ("parsed", "legal", "recorded"), ("mean_speed", "best_of_samples_speed")


def knobs_block(path: Path) -> str:
    """Return the table of a language model that learned knobs, with its source.

    Raises:
        RecordError: the file cannot be used.
    """

    def text(data: dict[str, Any]) -> str:
        how, where = data["settings"], data["provenance"]
        rows = [
            [words, *(f"{found[name][0]:.1%}" for name in _RATES)]
            + ["{:.3f} ({:.3f} to {:.3f})".format(*found[name]) for name in _SPEEDS]
            for key, words in _ANSWERERS.items() for found in [data["evaluations"][key]]
        ]  # fmt: skip
        head = ["answers of", *_RATES, "mean speed", f"best of {how['samples']}"]
        curves = {stage: [row[figure] for row in data["curves"][stage]] for stage, figure in _CURVES.items()}
        ends = ", and ".join(
            f"the {words} goes from {fmean(curves[stage][:10]):.2f} to {fmean(curves[stage][-10:]):.2f}"
            for stage, words in (("supervised", "loss of the supervised stage"), ("speed", "reward of GRPO"))
        )
        minutes = sum(data["seconds"].values()) / 60
        about = (
            f"From the first ten steps to the last ten, {ends} (means; the file has both curves). "
            f"{len(data['problems']['held_out'])} held-out problems, {how['samples']} answers each; "
            f"{data['problems']['training']} training problems; {how['supervised_steps']} supervised and "
            f"{how['speed_steps']} GRPO steps; {minutes:.0f} minutes on {how['threads']} cores. "
            f"{where['date'][:10]}, commit {where['commit']}, `{path.as_posix()}`."
        )
        return "\n".join([*table_lines(head, 1, rows), "", about])

    return use_json(path, "benchmarks/knob_training.py", text)


#: Of ``benchmarks/llm_answers.py``, beside the bench files, and what each mode demands.
ANSWERS = "llm_answers.json"
_ASKED = {"knobs": "knobs as JSON", "holes": "three parts of a kernel", "free": "a whole kernel"}


def answers_block(path: Path) -> str:
    """Return the table of what a language model wrote, with its source; one line if the file is missing.

    Raises:
        RecordError: the file is there and cannot be used.
    """

    def text(data: dict[str, Any]) -> str:
        rows = []
        for row in sorted(data["rows"], key=lambda row: (list(_ASKED).index(row["mode"]), row["aids"] == "aided")):
            aids, each = "all" if row["aids"] == "aided" else "none", row["answers"]
            rates = [f"{count} ({low:.0%} to {high:.0%})" for count, low, high in row["stages"].values()]
            best = "–" if row["best"] is None else f"{row['best']:.3g}×"
            cost = [f"{row['seconds'] / each:.0f}", f"{row['tokens'] / each:.0f}"]
            rows.append([_ASKED[row["mode"]], aids, each, *rates, best, *cost])
        head = ["asked for", "aids", "answers", *data["rows"][0]["stages"], "best", "s", "tokens"]
        where, asked, settings = data["judged"], data["asked"], data["settings"]
        by = f"{where['gpu']}, driver {where['driver']}, {where['date'][:10]}, commit {where['commit'][:8]}"
        about = (
            f"{sum(row['answers'] for row in data['rows'])} answers of `{settings['model']}` (SHA-256 "
            f"{settings['weights'][:16]}) on {settings['problems']} problems, temperature {settings['temperature']}. "
            f"Asked on a CPU from {asked['date'][:10]} on; proved and timed by {by}; `{path.as_posix()}`."
        )
        return "\n".join([*table_lines(head, 2, rows), "", about])

    return _if_published(path, "benchmarks/llm_answers.py", text, "outblas-llm-answers-table-1")


_HEAD = (
    *("regime", "M x N x K", "L2", "whose", "kernel", "µs", "tensor pipe", "HBM", "HBM read, written MB"),
    *("L2 hits", "L2 traffic MB", "occupancy", "instructions, M", "cycles, k", "main stalls"),
)
_NUMERIC = _HEAD[5:14]


def counters_text(path: Path) -> str:
    """Return the table of counters, or one line with the command that measures them if the file is missing.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    if not path.exists():
        return "To be measured: `python benchmarks/profile_regimes.py`, then `python tools/published_pages.py --write`."
    return counters_table(read_counters(path))


def counters_table(data: Mapping[str, Any]) -> str:
    """Return a Markdown table with a line for each kernel, and the provenance. One side may launch several kernels."""
    lines = ["| " + " | ".join(_HEAD) + " |"]
    lines.append("|" + "|".join(" ---: " if name in _NUMERIC else " --- " for name in _HEAD) + "|")
    for row in data["rows"]:
        for number, kernel in enumerate(row["kernels"]):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row, number, kernel)) + " |")
    where = data["provenance"]
    by = f"Nsight Compute {where['ncu']} on {where['gpu']}, driver {where['driver']}"
    return "\n".join([*lines, "", f"{by}, {where['date'][:10]}, commit {where['commit']}."])


def _cells(row: Mapping[str, Any], number: int, kernel: Mapping[str, Any]) -> list[str]:
    problem = Problem.from_key(row["problem"])
    part = f", kernel {number + 1} of {len(row['kernels'])}" if len(row["kernels"]) > 1 else ""
    ours = row["side"] == OURS
    whose = f"ours ({row['chosen_by']})" if ours else "cuBLASLt"
    name = short_config(config_from_name(row["name"])) if ours else short_name(kernel["kernel"])
    read, written = (_figure(kernel[f"dram_{way}_bytes"], 1e-6) for way in ("read", "write"))
    return [
        *(row["group"], f"{problem.m}x{problem.n}x{problem.k}", row["l2"], f"{whose}{part}", f"`{name}`"),
        *(_figure(kernel["time_ns"], 1e-3, 2), _percent(kernel["tensor_pct"]), _percent(kernel["dram_pct"])),
        *(f"{read}, {written}", _percent(kernel["l2_hit_pct"]), _figure(kernel["l2_bytes"], 1e-6)),
        *(_percent(kernel["occupancy_pct"]), _figure(kernel["instructions"], 1e-6, 2), _figure(kernel["cycles"], 1e-3)),
        ", ".join(f"{reason} {ratio:.2f}" for reason, ratio in kernel["stalls"]) or "–",
    ]


def short_name(kernel: str) -> str:
    """Return a kernel's name without its arguments; for CUTLASS's wrapper, the name of the kernel in it."""
    wrapped = re.match(r"(?:void )?cutlass::\w+<(\w+)", kernel)
    return wrapped[1] if wrapped else re.split(r"[<(]", kernel.removeprefix("void "))[0]


def _figure(value: float | None, scale: float, digits: int = 1) -> str:
    return "–" if value is None else f"{value * scale:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}%"
