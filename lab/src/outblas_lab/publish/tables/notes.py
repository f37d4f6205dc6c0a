"""Lines of the published table's notes: earlier kernels, rivals and peers, a library made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outblas.core.config import config_name
from outblas.core.errors import RecordError
from outblas.core.plain_files import as_record_error, read_json
from outblas.core.problem import Problem
from outblas.core.stats import geomean
from outblas.core.suites import SUITES, Table
from outblas.core.workload import workload_of_mode
from outblas.records.library import Library
from outblas.records.result_rows import launch_of_row, problem_of
from outblas.records.results import Result, read_meta
from outblas_lab.build.library_tables import kernels_since
from outblas_lab.pool.averages import table_label
from outblas_lab.pool.retuning import RETUNE_FILE, RETUNE_FORMAT, seconds_by_step
from outblas_lab.publish.tables.gpu_folders import bench_files_of, json_files_of


def count_replaced_rows(result: Result, library: Library) -> int:
    """Return the number of rows whose kernel differs from the library's."""
    return sum(_is_replaced(row, library) for row in result.rows)


def _is_replaced(row: dict[str, object], library: Library) -> bool:
    found = library.lookup(problem_of(row))
    kernel = found.kernel(launch_of_row(row), workload_of_mode(str(row["mode"]))) if found else None
    if row["fallback"]:
        return kernel is not None
    return kernel is None or config_name(kernel) != row["config"]


def notes_of_replaced(directory: Path, results: Sequence[Result]) -> list[str]:
    """Return a line of Markdown for each bench that timed another kernel than the packaged library has now.

    Returns:
        An empty list if no library is packaged for the GPU. Benches outside the named suites are left out.
    """
    library = Library.packaged(Path(directory).name, missing_ok=True)
    notes = []
    for result in results if library.rows else ():
        count = count_replaced_rows(result, library) if result.suite in SUITES else 0
        if count:
            table = table_label(result.suite, result.rows[0])
            notes.append(
                f"- {table}: of an earlier library; {count} of {len(result.rows)} rows have another kernel now"
            )
    return notes


def notes_of_earlier_kernels(directory: Path) -> list[str]:
    """Return one line of Markdown that names the result files older than the kernels of the packaged library.

    Returns:
        An empty list if no file is older, or if no library is packaged for the GPU.
    """
    library = Library.packaged(Path(directory).name, missing_ok=True)
    since = kernels_since(library)
    root = Path(directory)
    dated = [(p.stem if p.parent == root else f"{p.parent.name}/{p.stem}", date) for p, date in _dated_files(root)]
    older = [name for name, date in dated if since and date < since]
    if not older:
        return []
    return [f"- measured with earlier kernels, before {since[:10]}: {', '.join(f'`{name}`' for name in sorted(older))}"]


def _dated_files(directory: Path) -> list[tuple[Path, str]]:
    """Return (file, date of its provenance) of the benches and of the JSON files that have one.

    Those of shapes of no list lie in a folder beside this one.
    """
    found = [(path, str(read_meta(path)["provenance"]["date"])) for path in bench_files_of(directory)]
    for path, data in json_files_of(directory):
        made = data.get("provenance") or _packaged_part(data) if isinstance(data, dict) else None
        if isinstance(made, dict) and made.get("date"):
            found.append((path, str(made["date"])))
    return found


def _packaged_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the provenance of the packaged library's part of a file that has several libraries; else nothing."""
    found: Any = data
    for name in ("libraries", "packaged", "provenance"):
        found = found.get(name, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def replaced_words(directory: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many rows of a peer's result file timed another kernel than the packaged library has now, in words.

    Example: ``"; 3 of 60 have another kernel in the library now"``. Nothing if none has, or without such a library.

    Args:
        rows: rows with ``problem``, a key, and ``config``, the name of a kernel for plain launches or None.
    """
    library = Library.packaged(Path(directory).name, missing_ok=True)
    count = sum(_plain_kernel(library, str(row["problem"])) != row["config"] for row in rows) if library.rows else 0
    return f"; {count} of {len(rows)} have another kernel in the library now" if count else ""


def _plain_kernel(library: Library, key: str) -> str | None:
    row = library.lookup(Problem.from_key(key))
    choice = row.choice("plain") if row else None
    return config_name(choice.config) if choice else None


def note_of(path: Path, form: str, made_by: str, note: Callable[[dict[str, Any]], str]) -> list[str]:
    """Return the lines of a note on a result file in JSON; an empty list if the file is missing.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    if not path.exists():
        return []
    do = "measure again, or restore the committed file"
    with as_record_error(f"{path} cannot be read", f"what {made_by} writes", do):
        data = read_json(path)
        if data["format"] != form:
            raise ValueError(f"it is not of format {form}")
        return note(data).splitlines()


def _when(made: Mapping[str, Any]) -> str:
    """Return the day and the commit of a provenance for the end of a note; each line may be of another time."""
    return f", {made['date'][:10]}, commit {made['commit'][:7]}"


LARGE_FORMAT = "outblas-large-products-1"
#: Its name beside the result files.
LARGE_FILE = "large_products.json"


def notes_of_large_products(directory: Path) -> list[str]:
    """Return a line of Markdown with the wins of each library timed in blocks; an empty list without the file.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    return note_of(Path(directory) / LARGE_FILE, LARGE_FORMAT, "benchmarks/large_products.py", _large_line)


def _large_line(data: dict[str, Any]) -> str:
    libraries = sorted(data["libraries"].items())
    each = [
        f"{found['wins']} of {found['with_kernel']} kernels ({name}{_when(found['provenance'])})"
        for name, found in libraries
    ]
    return f"- products from 1e11 FLOP on, each kernel alone, that win by 0.5% or more: {', '.join(each)}"


CUTLASS_FORMAT = "outblas-cutlass-1"
#: Its name beside the result files.
CUTLASS_FILE = "cutlass_peer.json"


def cutlass_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return geometric means over the problems on which an instance of CUTLASS passed.

    Returns:
        ``cutlass_over_baseline``, ``ours_over_baseline`` (a fall-back counts as 1 in older files, and as measured in
        others) and ``ours_over_cutlass``.

    Raises:
        RecordError: CUTLASS passed on no problem.
    """
    both = [row for row in rows if row["cutlass"] is not None]
    if not both:
        raise RecordError(
            "no problem on which CUTLASS passed", "the result of benchmarks/cutlass_peer.py", "measure again"
        )
    return {
        "cutlass_over_baseline": geomean(row["cutlass"]["ratio"] for row in both),
        "ours_over_baseline": geomean(row["ours"]["ratio"] if row["ours"] else 1.0 for row in both),
        "ours_over_cutlass": geomean(row["ours_over_cutlass"]["ratio"] for row in both),
    }


def notes_of_cutlass(directory: Path) -> list[str]:
    """Return a line of Markdown for the table's notes; an empty list if CUTLASS was not measured.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    return note_of(
        Path(directory) / CUTLASS_FILE, CUTLASS_FORMAT, "benchmarks/cutlass_peer.py",
        lambda data: _cutlass_line(data) + replaced_words(directory, data["rows"]),
    )  # fmt: skip


def _cutlass_line(data: dict[str, Any]) -> str:
    rows, instances = data["rows"], len(data["instances"])
    found = cutlass_means(rows)
    both = [row for row in rows if row["cutlass"] is not None]
    ahead = sum(row["ours_over_cutlass"]["low"] > 1.0 for row in both)
    return (
        f"- CUTLASS 3.x, the fastest of {instances} kernels of its collective builder on each of {len(both)} problems "
        f"of grid1000 (TN, fp16/fp32, offline, without PDL): {found['cutlass_over_baseline']:.3f}× the fastest "
        f"baseline; the kernels that the library names have {found['ours_over_baseline']:.3f}× there and "
        f"{found['ours_over_cutlass']:.3f}× CUTLASS, surely ahead on {ahead}{_when(data['provenance'])}"
    )


INDUCTOR_FORMAT = "outblas-inductor-rival-1"
#: Its name beside the result files.
INDUCTOR_FILE = "inductor_rival.json"


def notes_of_inductor(directory: Path) -> list[str]:
    """Return a line of Markdown for each suite that was timed beside torch.compile; an empty list without the file.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    return note_of(
        Path(directory) / INDUCTOR_FILE, INDUCTOR_FORMAT, "benchmarks/inductor_rival.py",
        lambda data: _inductor_lines(data, directory),
    )  # fmt: skip


def _inductor_lines(data: dict[str, Any], directory: Path) -> str:
    rows = {suite: [row for row in data["rows"] if row["suite"] == suite] for suite in data["means"]}
    counts = Counter(row["suite"] for row in data["rows"] if row["inductor"])
    return "\n".join(
        f"- torch.compile with max-autotune on {counts[suite]} problems of {suite} (TN, fp16/fp32, offline, "
        f"without PDL): {found['inductor']:.3f}× the fastest baseline; the library's kernels have "
        f"{found['ours']:.3f}× there and {found['ours_over_inductor']:.3f}× torch.compile"
        f"{_when(data['provenance'])}{replaced_words(directory, rows[suite])}"
        for suite, found in data["means"].items()
    )


ACCURACY_FORMAT = "outblas-torch-accuracy-3"
#: Its name beside the result files.
ACCURACY_FILE = "torch_accuracy.json"


def notes_of_accuracy(directory: Path) -> list[str]:
    """Return a line of Markdown on the products outside the bound of fp32 sums; an empty list without the file.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    return note_of(Path(directory) / ACCURACY_FILE, ACCURACY_FORMAT, "benchmarks/torch_accuracy.py", _accuracy_line)


def _accuracy_line(data: dict[str, Any]) -> str:
    names = {
        "torch": "torch.matmul by default",
        "torch_full": "torch.matmul with both switches off",
        "outblas_kernel": "OutBLAS' kernels",
        "outblas_fallback": "OutBLAS' fall-backs",
        "outblas_accurate": "`accurate=True`",
    }
    each = []
    for side, name in names.items():
        found = [by_side[side] for by_side in data["by_dtype"].values() if side in by_side]
        each.append(f"{sum(one['outside'] for one in found)} of {sum(one['n'] for one in found)} with {name}")
    costs = data["cost_of_full_precision"]
    shared = "; ".join(
        f"{name} takes {costs[group][who]['geomean']:.3f}× the time on {costs[group][who]['n']} {group} products"
        for group in costs
        for who, name in (("torch", names["torch_full"]), ("outblas", f"OutBLAS with {names['outblas_accurate']}"))
    )
    return f"- products outside the error bound of fp32 sums: {', '.join(each)}; {shared}{_when(data['provenance'])}"


def notes_of_retune(directory: Path) -> list[str]:
    """Return the time that a library from nothing took, as one line of Markdown in a list.

    The list is empty if the directory has no file ``retune.json``, i.e. no library was built from nothing.

    Raises:
        RecordError: ``retune.json`` is there and cannot be used.
    """
    return note_of(Path(directory) / RETUNE_FILE, RETUNE_FORMAT, "outblas build-library --from-nothing", _retune_line)


def _retune_line(data: dict[str, Any]) -> str:
    steps = seconds_by_step(data["seconds"])
    tables = (Table.parse(name) for name in data["tables"])
    names = " and ".join(f"{t.suite} {t.layout} {t.dtype}/{t.acc}" for t in tables)
    each = ", ".join(f"{step} {seconds / 60:.1f}" for step, seconds in steps.items())
    made = data["provenance"]
    minutes = f"{sum(steps.values()) / 60:.1f} minutes of one {made['gpu']}"
    return f"- {names}, tuned from nothing: {minutes} ({each}){_when(made)}"
