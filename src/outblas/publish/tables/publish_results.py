"""What ``outblas results`` writes or checks: summary.json, the README's table, its picture, the kernel notes' counters.

Where there is a comparison of agents, its block in the README and its picture, too. All come from the committed result
files alone, and are the same bytes every time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.files import write_atomic
from outblas.publish.tables.compare_block import (
    COMPARE_BEGIN,
    COMPARE_END,
    compare_block,
    comparison_of,
    with_section,
)
from outblas.publish.tables.compare_block import PICTURE as COMPARE_PICTURE
from outblas.publish.tables.compare_picture import compare_svg
from outblas.publish.tables.counter_table import counters_text
from outblas.publish.tables.notes import notes_of_cutlass, notes_of_replaced, notes_of_retune
from outblas.publish.tables.speedup_picture import speedup_svg
from outblas.records.averages import launch_label, launch_of_row, table_label
from outblas.records.results import MODES, bench_files, read_result
from outblas.records.summary import summary_text, why_stale
from outblas.search.compare.compare_result import Comparison, read_comparison

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NCU_BEGIN, NCU_END = "<!-- ncu:begin -->", "<!-- ncu:end -->"
RESULTS, README, PICTURE = Path("results/h200"), Path("README.md"), Path("docs/img/speedup.svg")
NOTES = Path("docs/kernels.md")
#: Of ``benchmarks/profile_regimes.py``, beside the result files; the notes say so where it is not there.
COUNTERS = "ncu.json"

#: The launch option as notes have it.
_FLAGS = {"plain": "without PDL", "pdl": "with PDL", "weights": "with constant weights"}
#: Figures of a server's median latency over one baseline, and how the table's notes name it.
_SERVED_OVER = {
    "geomean_torch": "over torch.matmul",
    "geomean_lt_auto": "over a native call of cuBLASLt with the algorithm chosen",
}


def publish(
    directory: Path = RESULTS, readme: Path | None = README, picture: Path | None = PICTURE, notes: Path | None = NOTES
) -> list[Path]:
    """Write ``directory/summary.json``, the README's table, the picture and the notes' counters; return the paths.

    Raises:
        RecordError: when a result file cannot be read, the README or the notes have no markers, or the
            disk refuses a file. Everything is computed before anything is written.
    """
    return [write_atomic(path, text.encode()) for path, text in _wanted(directory, readme, picture, notes).items()]


def check_published(
    directory: Path = RESULTS, readme: Path | None = README, picture: Path | None = PICTURE, notes: Path | None = NOTES
) -> list[str]:
    """One line for each published file that is missing or not what the result files say.

    Raises:
        RecordError: as :func:`publish`.
    """
    lines = (why_stale(path, text) for path, text in _wanted(directory, readme, picture, notes).items())
    return [line for line in lines if line]


def markdown_table(rows: Sequence[dict[str, Any]], more_notes: Sequence[str] = ()) -> str:
    """The README's table: one line per row of summary.json, one block per mode, notes, and where they come from."""
    head = ["suite", "layout", "types", "mode", "PDL", "problems", "geometric mean", "FLOP-weighted", "worst"]
    head += ["losses", "fall-backs", "over torch"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * 5 + " ---: |" * 7]
    for r in sorted(rows, key=_order):
        cells = [r["suite"], r["layout"], f"{r['dtype']}/{r['acc']}", r["mode"], launch_label(r), r["n"]]
        cells += [f"{r[f]:.3f}×" for f in ("geomean", "flop_weighted", "min")]
        torch = r.get("geomean_torch")
        cells += [r["losses"], r["fallbacks"], "–" if torch is None else f"{torch:.3f}×"]
        lines.append("| " + " | ".join(_cell(c) for c in cells) + " |")
    notes = [*_notes(rows), *more_notes]
    return "\n".join([*lines, "", *notes, *([""] if notes else []), f"Measured on {_cell(_measured_on(rows))}."])


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
    """What the table's lines cannot say by themselves: lines of Markdown."""
    notes, demoted = [], dict[str, list[tuple[int, float, str]]]()
    for r in sorted(rows, key=_order):
        name, flag = table_label(r["suite"], r), _FLAGS[launch_of_row(r)]
        if r.get("by_m"):
            parts = [f"M {m.replace('<=', '≤ ').replace('>', '> ')} {f['geomean']:.3f}×" for m, f in r["by_m"].items()]
            notes.append(f"- {name}, {flag}: {', '.join(parts)}")
        if r.get("demoted"):
            demoted.setdefault(name, []).append((r["demoted"]["n"], r["demoted"]["min"], flag))
        if r.get("p99"):
            p50, p99 = (f"{r[q]['geomean']:.3f}×" for q in ("p50", "p99"))
            over = [f"{r[f]:.3f}× {of}" for f, of in _SERVED_OVER.items() if r.get(f) is not None]
            if r.get("p99_torch"):
                over.append(f"99th percentile {r['p99_torch']['geomean']:.3f}× over torch.matmul")
            notes.append(f"- {name}: {', '.join([f'median latency {p50}, 99th percentile {p99}', *over])}")
    if demoted:
        notes.append("- kernels that were not surely ahead and were dropped since:")
    for name, found in demoted.items():
        each = ", ".join(f"{n} {flag}" for n, _, flag in found)
        notes.append(f"  - {name}: {each} (worst {min(worst for _, worst, _ in found):.3f}×)")
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


def with_table(document: Path, table: str, begin: str = BEGIN, end: str = END) -> str:
    """The text of ``document`` with ``table`` between the markers.

    Raises:
        RecordError: when it cannot be read or does not have each marker once, in order.
    """
    return text_with_table(_read(document), table, str(document), begin, end)


def text_with_table(text: str, table: str, document: str, begin: str, end: str) -> str:
    """``text`` of a ``document`` with ``table`` between the markers; raises RecordError without each marker once."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise RecordError(f"{document} has no place for the table", f"{begin} and {end} once each", "add the two lines")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def _read(document: Path) -> str:
    try:
        return document.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(
            f"cannot read {document}: {error.strerror}", "a file of the repository", "run it from there"
        ) from error


def picture_text(directory: Path) -> str:
    """The picture of grid1000 TN fp16 fp32 offline, of the file with most rows of it; without it, of the first."""
    best = None
    for path in bench_files(directory):
        result = read_result(path)
        for row in result.rows:
            key = tuple(row[c] for c in ("layout", "dtype", "acc", "mode"))
            rank = (result.suite != "grid1000", key != ("TN", "fp16", "fp32", "offline"), -len(result.rows))
            if best is None or rank < best[0]:
                best = (rank, result, key)
    assert best is not None, "bench_files gives at least one file, read_result at least one row"
    _, result, key = best
    kind = (*key, False)  # without and with PDL: constant weights are the table's
    rows = [r for r in result.rows if tuple(r[c] for c in ("layout", "dtype", "acc", "mode", "early")) == kind]
    return speedup_svg(result, rows)


def _wanted(directory: Path, readme: Path | None, picture: Path | None, notes: Path | None) -> dict[Path, str]:
    summary = summary_text(directory)
    wanted = {Path(directory) / "summary.json": summary}
    if readme is not None:
        more = [*notes_of_replaced(directory), *notes_of_retune(directory), *notes_of_cutlass(directory)]
        wanted[readme] = with_table(readme, markdown_table(json.loads(summary), more))
    if picture is not None:
        wanted[picture] = picture_text(directory)
    compared = comparison_of(directory)
    if compared is not None:
        _add_comparison(wanted, read_comparison(compared), readme, picture)
    if notes is not None:
        wanted[notes] = with_table(notes, counters_text(Path(directory) / COUNTERS), NCU_BEGIN, NCU_END)
    return wanted


def _add_comparison(wanted: dict[Path, str], comparison: Comparison, readme: Path | None, picture: Path | None) -> None:
    """The README's block on agents, in a section of its own where it has none yet, and its picture."""
    drawn = None if picture is None else picture.with_name(COMPARE_PICTURE)
    if drawn is not None:
        wanted[drawn] = compare_svg(comparison)
    if readme is not None:
        address = None if drawn is None else Path(os.path.relpath(drawn, readme.parent)).as_posix()
        text, block = with_section(wanted[readme]), compare_block(comparison, address)
        wanted[readme] = text_with_table(text, block, str(readme), COMPARE_BEGIN, COMPARE_END)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
