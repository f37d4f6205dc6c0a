"""Which published benches are of kernels that the packaged library does not have any more."""

from __future__ import annotations

from pathlib import Path

from outblas.averages import launch_of_row, problem_of, table_words
from outblas.config import config_name
from outblas.library import Library
from outblas.results import Result, bench_files, read_result
from outblas.suites import SUITES


def replaced(result: Result, library: Library) -> int:
    """Rows of a bench whose kernel is not what the library has there; what the bench itself demoted is not counted."""
    return sum(_is_replaced(row, library) for row in result.rows)


def _is_replaced(row: dict[str, object], library: Library) -> bool:
    found = library.lookup(problem_of(row))
    choice = found.choice(launch_of_row(row)) if found else None
    if row["fallback"]:
        return choice is not None
    return choice is None or config_name(choice.config) != row["config"]


def notes_of_replaced(directory: Path) -> list[str]:
    """A line of Markdown for each bench in a directory named by its GPU (``results/h200``) that is not, or not in every
    row, of the packaged library; none where no library is packaged for that GPU, and of a bench of no named suite,
    which has a library of its own."""
    library = Library.packaged(Path(directory).name, missing_ok=True)
    notes = []
    for path in bench_files(directory) if library.rows else ():
        result = read_result(path)
        count = replaced(result, library) if result.suite in SUITES else 0
        if count:
            table = table_words(result.suite, result.rows[0])
            notes.append(
                f"- {table}: of an earlier library; {count} of {len(result.rows)} rows have another kernel now"
            )
    return notes
