"""The block of the page on live comparisons, from the result files of ``outblas compare-live`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outblas.core.errors import RecordError
from outblas.publish.tables.compare_picture import PictureWords, compare_svg
from outblas.publish.words import date_words
from outblas.runtime.device import Device
from outblas.search.live_compare.live_arms import SPACES
from outblas.search.live_compare.live_result import LiveResult, read_live
from outblas.search.live_compare.live_tables import as_comparison, best_lines, reinforcement_rows, table_rows
from outblas.search.tune_run import default_agent

#: Beside the bench files of a GPU; a GPU without it has no table.
LIVE, LIVE_PICTURE = "live.parquet", "compare-live.svg"
NOT_MEASURED = "Not measured yet."


def live_files(results: Path) -> list[Path]:
    """Return the result files of all GPUs, sorted by the GPU's folder; empty if nothing was compared.

    Args:
        results: folder of the GPUs' folders.
    """
    return sorted(results.glob(f"*/{LIVE}"))


def measured_live(path: Path) -> LiveResult:
    """Read a result file that was measured on a GPU.

    Raises:
        RecordError: it cannot be read, or a recording answered in place of a GPU.
    """
    result = read_live(path)
    if result.meta["rehearsal"]:
        raise RecordError(f"{path} is a rehearsal on a recording", "measurements of a GPU", "take it away")
    return result


def live_block(files: Sequence[Path], picture: str | None) -> str:
    """Return, in Markdown, the tables of each GPU; one line if nothing was measured.

    Args:
        files: result files of ``outblas compare-live``.
        picture: address of the picture, seen from the page; None leaves it out.

    Raises:
        RecordError: a file cannot be read, or is a rehearsal.
    """
    if not files:
        return NOT_MEASURED
    lines = [
        "A speed-up is the time of the fastest rival over that of the agent's choice. "
        "A share is the time of the fastest kernel that any agent chose on the problem over that of the choice.",
        "Figures are geometric means over problems and seeds, with half of their 95% interval over problems. "
        "A column is a number of measurements.",
        "Bold marks the best of each column, and every agent whose interval overlaps the best one's. "
        "*CPU ms* is the agent's own time for one proposal.",
    ]
    for path in files:
        lines += ["", *_of_gpu(measured_live(path))]
    if picture is not None:
        lines += ["", f"![Share of the best known by measurements]({picture})"]
    return "\n".join(lines)


def _of_gpu(result: LiveResult) -> list[str]:
    """Return the tables of one GPU."""
    meta, made = result.meta, result.provenance
    space, totals, seeds = meta["space"], meta["totals"], meta["seeds"]
    lines = [f"**{made['gpu']}: {len(result.problems)} unseen problems, seed {meta['problem_seed']}; {seeds} seeds**"]
    titles = {"same": f"Same candidates for all, space `{space}`: {SPACES[space]}.", "native": "Each in its own space."}
    for table, title in titles.items():
        if meta[table]:
            for figure, words in (("speedup", "Speed-up over the fastest rival"), ("share", "Share of the best known")):
                lines += ["", f"{title} {words}:", "", *_markdown(table_rows(result, table, figure, bold="**"))]
    reinforced = reinforcement_rows(result)
    if reinforced:
        words = "the paired gain in percent with its 95% interval over problems, with the same candidates"
        lines += ["", f"Where reinforcement pays: {words}:", "", *_markdown(reinforced, words=2)]
    lines += ["", *(f"- {line}." for line in best_lines(result))]
    lines += [
        f"- The default agent on a GPU is `{default_agent(Device(gpu_index=0))}`.",
        f"- {totals['measurements']} measurements of agents took {totals['kernels']} kernels and "
        f"{totals['gpu_s']:.0f} s of the GPU.",
    ]
    lines += [f"- Without figures: {problem}, {why}." for problem, why in meta["left_out"].items()]
    return [*lines, "", f"{made['date'][:10]}, commit {made['commit']}: `{made['command']}`."]


def _markdown(rows: Sequence[Sequence[str]], words: int = 1) -> list[str]:
    """Return the lines of a Markdown table; the first ``words`` columns are to the left."""
    head, *rest = rows
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rest)]


def live_svg(path: Path) -> str:
    """Return the curves of the shares with the same candidates as SVG text.

    Raises:
        RecordError: as :func:`measured_live`.
    """
    result = measured_live(path)
    where = f"{result.provenance['gpu']}, {date_words(result.provenance['date'])}"
    words = PictureWords(
        "Agents live on unseen problems", where, "candidates: ", "best known time / time of the choice"
    )
    return compare_svg(as_comparison(result, "same", "share"), words)
