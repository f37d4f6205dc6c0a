"""Lines of the published table's notes on single rows: kernels that failed, rivals without a time, times below the
floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from outblas.core.evaluation import Status
from outblas.core.gpu_records import gpu_of_product
from outblas.core.rivals import RIVALS
from outblas.core.roofline import Gpu
from outblas.records.result_rows import Row, problem_of
from outblas.records.results import Result
from outblas_lab.jail.plausibility import PLAUSIBLE_SHARE, least_us, why_too_fast
from outblas_lab.pool.averages import published_us, table_label
from outblas_lab.publish.words import baseline_words


def notes_of_rows(results: Sequence[Result]) -> list[str]:
    """Return the lines of Markdown on rows whose figures need a word; empty if no row does.

    Args:
        results: bench files of a GPU, read.
    """
    return [*_failed_kernels(results), *_lost_rivals(results), *_below_the_floor(results)]


def _failed_kernels(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each bench in which kernels of the library failed."""
    for result in results:
        fine = (Status.PASSED.value, Status.LEFT_OUT.value)
        failed = Counter(row["status"] for row in result.rows if row["status"] not in fine)
        if failed:
            each = ", ".join(f"{status} in {count}" for status, count in failed.items())
            table = table_label(result.suite, result.rows[0])
            yield f"- {table}: of {len(result.rows)} rows the library's kernel failed and is no figure: {each}"


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
    of_gpu = [(row, gpu_of_product(result.provenance["gpu"])) for result in results for row in result.rows]
    count = sum(gpu is not None and _too_fast(row, gpu) for row, gpu in of_gpu)
    if count:
        yield (
            f"- {count} of {len(of_gpu)} rows take less than {PLAUSIBLE_SHARE:.0%} of the least plausible time and of "
            "the time of every rival"
        )


def _too_fast(row: Row, gpu: Gpu) -> bool:
    rivals = {name: us for name in RIVALS if (us := row[f"{name}_us"]) is not None}
    least = least_us(problem_of(row), gpu, bool(row["pdl"] or row["early"]))
    return bool(why_too_fast(published_us(row), rivals, least))
