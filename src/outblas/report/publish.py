"""What ``outblas results`` writes or checks: summary.json, the README's table and its picture.

All three come from the committed result files alone, and are the same bytes every time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outblas.errors import RecordError
from outblas.files import write_atomic
from outblas.report.picture import speedup_svg
from outblas.results import bench_files, read_result, stale, summary_text

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
RESULTS, README, PICTURE = Path("results/h200"), Path("README.md"), Path("docs/img/speedup.svg")


def publish(directory: Path = RESULTS, readme: Path | None = README, picture: Path | None = PICTURE) -> list[Path]:
    """Write ``directory/summary.json``, the README's table and the picture; return what was written.

    Raises:
        RecordError: when a result file cannot be read, the README has no markers, or the disk
            refuses a file. Everything is computed before anything is written.
    """
    return [write_atomic(path, text.encode()) for path, text in _wanted(directory, readme, picture).items()]


def check_published(
    directory: Path = RESULTS, readme: Path | None = README, picture: Path | None = PICTURE
) -> list[str]:
    """One line for each published file that is missing or not what the result files say.

    Raises:
        RecordError: as :func:`publish`.
    """
    lines = (stale(path, text) for path, text in _wanted(directory, readme, picture).items())
    return [line for line in lines if line]


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """The README's table: one line per row of summary.json."""
    head = ["suite", "layout", "dtype / acc", "mode", "PDL", "problems", "geometric mean", "FLOP-weighted", "worst"]
    head += ["losses", "fall-backs", "file"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * 5 + " ---: |" * 6 + " --- |"]
    for r in rows:
        cells = [r["suite"], r["layout"], f"{r['dtype']} / {r['acc']}", r["mode"], "on" if r["pdl"] else "off", r["n"]]
        cells += [f"{r[f]:.3f}×" for f in ("geomean", "flop_weighted", "min")]
        cells += [r["losses"], r["fallbacks"], f"`{r['file']}`"]
        lines.append("| " + " | ".join(_cell(c) for c in cells) + " |")
    where = sorted({f"{r['gpu']}, driver {r['driver']}, {r['date']}, commit {r['commit']}" for r in rows})
    return "\n".join([*lines, "", f"Measured on: {_cell('; '.join(where))}."])


def with_table(readme: Path, table: str) -> str:
    """The text of ``readme`` with ``table`` between the markers.

    Raises:
        RecordError: when it cannot be read or does not have each marker once, in order.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(
            f"cannot read {readme}: {error.strerror}", "the README", "run it from the repository"
        ) from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise RecordError(f"{readme} has no place for the table", f"{BEGIN} and {END} once each", "add the two lines")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


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
    rows = [r for r in result.rows if tuple(r[c] for c in ("layout", "dtype", "acc", "mode")) == key]
    return speedup_svg(result, rows)


def _wanted(directory: Path, readme: Path | None, picture: Path | None) -> dict[Path, str]:
    summary = summary_text(directory)
    wanted = {Path(directory) / "summary.json": summary}
    if readme is not None:
        wanted[readme] = with_table(readme, markdown_table(json.loads(summary)))
    if picture is not None:
        wanted[picture] = picture_text(directory)
    return wanted


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
