"""The table of every summary row, the notes that its lines cannot hold, and the command of every result file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from outblas.core.evaluation import Status
from outblas.core.gpu_records import gpu_of_product
from outblas.core.rivals import RIVALS
from outblas.core.roofline import Gpu
from outblas.core.suites import SUITES, Table
from outblas.records.library import Library
from outblas.records.result_rows import launch_of_row
from outblas.records.results import MODES, Result
from outblas_lab.jail.plausibility import PLAUSIBLE_SHARE, least_us, why_too_fast
from outblas_lab.pool.averages import Row, launch_label, problem_of, published_us, table_label
from outblas_lab.publish.words import baseline_words
from pages.table_words import mean_in_words, table_lines

#: The launch option as notes have it.
_FLAGS = {"plain": "without PDL", "pdl": "with PDL", "weights": "with constant weights"}
#: Figures of a server's median latency over one baseline, and how the table's notes name it.
_SERVED_OVER = {
    "geomean_torch": "over torch.matmul",
    "geomean_lt_auto": "over a native cuBLASLt call with its algorithm already chosen",
}
#: Figures over what is no rival, and how the table's notes name it.
_UNRANKED = {
    "geomean_torch_full": "torch.matmul with both reduced-precision switches off",
    "geomean_lt_edges": "cuBLASLt with (unsafe) programmatic edges on its captured nodes",
}


def markdown_table(rows: Sequence[dict[str, Any]], more_notes: Sequence[str] = ()) -> str:
    """Return the table of every summary row in Markdown, with its notes and its provenance."""
    head = ["suite", "layout", "types", "mode", "PDL", "problems", "geometric mean", "FLOP-weighted", "worst"]
    head += ["losses", "below 0.98", "fallbacks", "over torch"]
    lines = table_lines(head, 5, [])
    for r in sorted(rows, key=_order):
        parts = {f"{r['suite']}, {name}": {**r, **part} for name, part in r.get("by_alignment", {}).items()}
        lines += [_line(name, figures) for name, figures in {r["suite"]: r, **parts}.items()]
    notes = [*_notes(rows), *more_notes]
    return "\n".join([*lines, "", *notes, *([""] if notes else []), f"Measured on {_cell(_measured_on(rows))}."])


def _line(suite: str, r: dict[str, Any]) -> str:
    cells = [suite, r["layout"], f"{r['dtype']}/{r['acc']}", r["mode"], launch_label(r), r["n"]]
    cells += [mean_in_words(r["geomean"], r["interval"], r.get("bootstrap"))]
    torch = r.get("geomean_torch")
    cells += [*(f"{r[f]:.3f}×" for f in ("flop_weighted", "min")), r["losses"], r["below_098"], r["fallbacks"]]
    return "| " + " | ".join(map(_cell, [*cells, "–" if torch is None else f"{torch:.3f}×"])) + " |"


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    """Hot before cold before server, grid1000 before llm, fp32 accumulation before fp16, TN, NN, then best of both."""
    layouts = ("TN", "NN", "best")
    layout = layouts.index(row["layout"]) if row["layout"] in layouts else len(layouts)
    return (
        MODES.index(row["mode"]),
        row["suite"],
        row["acc"] != "fp32",
        row["dtype"] != "fp16",
        layout,
        row["pdl"],
        row["early"],
    )


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures that have no column: by M, plain choices, and latencies."""
    notes = []
    for r in sorted(rows, key=_order):
        name, flag = table_label(r["suite"], r), _FLAGS[launch_of_row(r)]
        if r.get("by_m"):
            parts = [f"M {m.replace('<=', '≤ ').replace('>', '> ')} {f['geomean']:.3f}×" for m, f in r["by_m"].items()]
            notes.append(f"- {name}, {flag}: {', '.join(parts)}")
        notes += [f"- {name}, {flag}: {r[f]:.3f}× over {whom}" for f, whom in _UNRANKED.items() if r.get(f) is not None]
        if second := r.get("plain_choice"):
            notes.append(
                f"- {name}, {flag}: {second['n']} rows run a second winner; "
                f"{second['geomean']:.3f}× with the plain choice in every row"
            )
        if own := r.get("less_clock"):
            text = f"every time includes {own['us']:.1f} µs of timer overhead; {own['geomean']:.3f}× without it"
            notes.append(f"- {name}, {flag}: {text}")
        if r.get("p99"):
            p50, p99 = (f"{r[q]['geomean']:.3f}×" for q in ("p50", "p99"))
            over = [f"{r[f]:.3f}× {of}" for f, of in _SERVED_OVER.items() if r.get(f) is not None]
            if r.get("p99_torch"):
                over.append(f"99th percentile {r['p99_torch']['geomean']:.3f}× over torch.matmul")
            notes.append(f"- {name}: {', '.join([f'median latency {p50}, 99th percentile {p99}', *over])}")
    return notes


def _measured_on(rows: Sequence[dict[str, Any]]) -> str:
    """GPUs and drivers, the first and last day, and the commits, each once."""

    def each(field: str) -> list[str]:
        return sorted({part for r in rows for part in str(r[field]).split("; ")})

    def short(name: str) -> str:
        return re.sub(r"^([0-9a-f]{7})[0-9a-f]{33}", r"\1", name)

    days = sorted({date[:10] for date in each("date")})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    commits = sorted({short(name) for name in each("commit")})
    what = "commit" if len(commits) == 1 else "commits"
    return f"{', '.join(each('gpu'))}, driver {', '.join(each('driver'))}, {when}, {what} {', '.join(commits)}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def again_table(results: Sequence[Result], gpu: str) -> str:
    """Return Markdown: the common command, then a table of file, further options and GPU minutes.

    Minutes are those of the GPU, all starts together. A dash stands for a file that was made before they were kept.
    """
    rows = []
    for result in results:
        seconds = result.provenance.get("gpu_seconds")
        minutes = "–" if seconds is None else f"{seconds / 60:.1f}"
        rows.append([result.path.stem, f"`{command_of_file(result)}`", minutes])
    lines = table_lines(["file", "command", "GPU minutes"], 2, rows)
    return "\n".join([f"`BUILD` stands for `{build_command(gpu)}`.", "", *lines])


#: (page, name of the block) -> its text for a GPU with benches.
BLOCKS = {("docs/results/method.md", "again"): lambda gpu: again_table(gpu.results, gpu.folder.name)}


def build_command(gpu: str) -> str:
    """Return the start of the commands for the tables that `outblas build-library` makes.

    Args:
        gpu: short name of the GPU. If it has a packaged library, the build begins with that.
    """
    command = f"outblas build-library --work build/{gpu}"
    packaged = Library.packaged(gpu, missing_ok=True).rows
    return f"{command} --begin-with src/outblas/data/libraries/{gpu}.json" if packaged else command


def command_of_file(result: Result) -> str:
    """Return the command that makes a bench file again, ``BUILD`` standing for the start of a build's command.

    Example: ``BUILD --tables grid1000:TN:fp16:fp32 --steps bench --modes server``, or ``--steps judge,merge`` for a
    file of three starts. A suite that no build makes has ``python benchmarks/SCRIPT.py --out FILE``.
    """
    if result.suite not in SUITES:  # a script of benchmarks/ made it
        return f"python benchmarks/{_script(result)} --out {result.path.as_posix()}"
    row = result.rows[0]
    table = Table(result.suite, row["layout"], row["dtype"], row["acc"])
    judged = all(each.get("by_start") for each in result.rows)
    steps = "judge,merge" if judged else f"bench --modes {row['mode']}"
    return f"BUILD --tables {table} --steps {steps}"


def _script(result: Result) -> str:
    """Return the script of ``benchmarks/`` that makes a file of no build, with its options but ``--out``."""
    if result.suite != "drawn":
        return f"{result.suite}.py"
    row, count = result.rows[0], len({problem_of(row) for row in result.rows})
    seed = re.search(r"seed (\d+)", str(result.meta.get("shapes")))
    drawn = f"--count {count}{f' --seed {seed[1]}' if seed else ''} --layout {row['layout']} --dtype {row['dtype']}"
    starts = f" --starts {len(row['by_start'])}" if row.get("by_start") else ""
    return f"{'learning' if row['mode'] == 'learned' else 'new_shapes'}.py --drawn {drawn}{starts}"


def notes_of_rows(results: Sequence[Result]) -> list[str]:
    """Return the lines of Markdown on rows whose figures need a word; empty if no row does."""
    return [*_failed_kernels(results), *_lost_rivals(results), *_below_the_floor(results)]


def _failed_kernels(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each bench in which kernels of the library failed."""
    for result in results:
        fine = (Status.PASSED.value, Status.LEFT_OUT.value)
        failed = Counter(row["status"] for row in result.rows if row["status"] not in fine)
        if failed:
            each = ", ".join(f"{status} in {count}" for status, count in failed.items())
            table = table_label(result.suite, result.rows[0])
            yield f"- {table}: of {len(result.rows)} rows the library's kernel failed and has no result: {each}"


def _lost_rivals(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each bench in which rivals failed, so that others counted as the fastest.

    Mode ``block`` times the two fastest alone, so nothing is lost there.
    """
    for result in results:
        rows = [row for row in result.rows if row["mode"] != "block"]
        lost = Counter(name for row in rows for name in RIVALS if row[f"{name}_us"] is None)
        if lost:
            each = ", ".join(f"{baseline_words(name)} in {count}" for name, count in lost.items())
            yield f"- {table_label(result.suite, rows[0])}: of {len(rows)} rows a rival has no time: {each}"


def _below_the_floor(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line with the number of rows whose time the check of free kernels would not believe."""
    gpus = [(result.rows, gpu_of_product(result.provenance["gpu"])) for result in results]
    of = sum(len(rows) for rows, _ in gpus)
    count = sum(gpu is not None and _too_fast(row, gpu) for rows, gpu in gpus for row in rows)
    if count:
        yield (
            f"- {count} of {of} rows take less than {PLAUSIBLE_SHARE:.0%} of the least plausible time and of "
            "the time of every rival"
        )


def _too_fast(row: Row, gpu: Gpu) -> bool:
    rivals = {name: us for name in RIVALS if (us := row[f"{name}_us"]) is not None}
    least = least_us(problem_of(row), gpu, bool(row["pdl"] or row["early"]))
    return bool(why_too_fast(published_us(row), rivals, least))
