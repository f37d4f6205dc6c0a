"""Lines of the published table's notes: earlier kernels, rivals and peers, a library made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from figures.rival_files import ACCURACY_FORMAT, CUTLASS_FORMAT, INDUCTOR_FORMAT, LARGE_FORMAT, cutlass_means

from outblas.core.config import config_name
from outblas.core.problem import Problem
from outblas.core.suites import SUITES, Table
from outblas.core.workload import workload_of_mode
from outblas.records.library import Library
from outblas.records.result_rows import launch_of_row, problem_of
from outblas.records.results import Result, read_meta
from outblas_lab.build.library_tables import kernels_since
from outblas_lab.pool.averages import table_label
from outblas_lab.pool.retuning import RETUNE_FILE, RETUNE_FORMAT, seconds_by_step
from pages.gpu_folders import bench_files_of, json_files_of
from pages.json_files import use_json


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
                f"- {table}: from an earlier library; {count} of {len(result.rows)} rows now have another kernel"
            )
    return notes


def notes_of_earlier_kernels(directory: Path) -> list[str]:
    """Return one line of Markdown that names result files older than the library's kernels; empty if none is."""
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

    Those of unlisted shapes are in a sibling folder.
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

    Example: ``"; the library now has another kernel for 3 of 60"``. Nothing if none has, or without such a library.

    Args:
        rows: rows with ``problem``, a key, and ``config``, the name of a kernel for plain launches or None.
    """
    library = Library.packaged(Path(directory).name, missing_ok=True)
    count = sum(_plain_kernel(library, str(row["problem"])) != row["config"] for row in rows) if library.rows else 0
    return f"; the library now has another kernel for {count} of {len(rows)}" if count else ""


def _plain_kernel(library: Library, key: str) -> str | None:
    row = library.lookup(Problem.from_key(key))
    choice = row.choice("plain") if row else None
    return config_name(choice.config) if choice else None


class NotedFile(NamedTuple):
    """A result file in JSON from which a note or a table is made.

    Attributes:
        name: its name beside the result files.
        made_by: the program that writes it.
        text: takes the content and the folder; returns lines of Markdown.
    """

    name: str
    form: str
    made_by: str
    text: Callable[[dict[str, Any], Path], str]

    def lines(self, folder: Path) -> list[str]:
        """Return the lines of the file in a folder; an empty list if it is missing.

        Raises:
            RecordError: the file is there and cannot be used.
        """
        path = Path(folder) / self.name
        if not path.exists():
            return []
        return use_json(path, self.made_by, lambda data: self.text(data, folder), self.form).splitlines()


def _when(made: Mapping[str, Any]) -> str:
    """Return the day and the commit of a provenance for the end of a note; each line may be of another time."""
    return f", {made['date'][:10]}, commit {made['commit'][:7]}"


def _large_line(data: dict[str, Any], _: Path) -> str:
    """Return a line with the wins of each library timed in blocks."""
    libraries = sorted(data["libraries"].items())
    each = [
        f"{found['wins']} of {found['with_kernel']} kernels ({name}{_when(found['provenance'])})"
        for name, found in libraries
    ]
    return f"- matmuls of 1e11 FLOP or more, each kernel timed alone, that win by 0.5% or more: {', '.join(each)}"


#: Wins over products that are timed in blocks.
LARGE = NotedFile("large_products.json", LARGE_FORMAT, "benchmarks/large_products.py", _large_line)


def _cutlass_line(data: dict[str, Any], directory: Path) -> str:
    rows, instances = data["rows"], len(data["instances"])
    found = cutlass_means(rows)
    both = [row for row in rows if row["cutlass"] is not None]
    ahead = sum(row["ours_over_cutlass"]["low"] > 1.0 for row in both)
    return (
        f"- CUTLASS 3.x, the fastest of {instances} kernels of its collective builder on each of {len(both)} problems "
        f"of grid1000 (TN, fp16/fp32, offline, without PDL): {found['cutlass_over_baseline']:.3f}× the fastest "
        f"baseline; the library's kernels reach {found['ours_over_baseline']:.3f}× there and "
        f"{found['ours_over_cutlass']:.3f}× CUTLASS, significantly faster on {ahead}{_when(data['provenance'])}"
        f"{replaced_words(directory, rows)}"
    )


CUTLASS = NotedFile("cutlass_peer.json", CUTLASS_FORMAT, "benchmarks/cutlass_peer.py", _cutlass_line)


def _inductor_lines(data: dict[str, Any], directory: Path) -> str:
    """Return a line for each suite that was timed beside torch.compile."""
    rows = {suite: [row for row in data["rows"] if row["suite"] == suite] for suite in data["means"]}
    counts = Counter(row["suite"] for row in data["rows"] if row["inductor"])
    return "\n".join(
        f"- torch.compile with max-autotune on {counts[suite]} problems of {suite} (TN, fp16/fp32, offline, "
        f"without PDL): {found['inductor']:.3f}× the fastest baseline; the library's kernels reach "
        f"{found['ours']:.3f}× there and {found['ours_over_inductor']:.3f}× torch.compile"
        f"{_when(data['provenance'])}{replaced_words(directory, rows[suite])}"
        for suite, found in data["means"].items()
    )


INDUCTOR = NotedFile("inductor_rival.json", INDUCTOR_FORMAT, "benchmarks/inductor_rival.py", _inductor_lines)


def _accuracy_line(data: dict[str, Any], _: Path) -> str:
    """Return a line on the products outside the bound of fp32 sums."""
    names = {
        "torch": "torch.matmul by default",
        "torch_full": "torch.matmul with both switches off",
        "outblas_kernel": "OutBLAS kernels",
        "outblas_fallback": "OutBLAS fallbacks",
        "outblas_accurate": "`accurate=True`",
    }
    each = []
    for side, name in names.items():
        found = [by_side[side] for by_side in data["by_dtype"].values() if side in by_side]
        each.append(f"{sum(one['outside'] for one in found)} of {sum(one['n'] for one in found)} with {name}")
    costs = data["cost_of_full_precision"]
    shared = "; ".join(
        f"{name} takes {costs[group][who]['geomean']:.3f}× the time on {costs[group][who]['n']} {group} matmuls"
        for group in costs
        for who, name in (("torch", names["torch_full"]), ("outblas", f"OutBLAS with {names['outblas_accurate']}"))
    )
    return f"- matmuls outside the error bound of fp32 sums: {', '.join(each)}; {shared}{_when(data['provenance'])}"


ACCURACY = NotedFile("torch_accuracy.json", ACCURACY_FORMAT, "benchmarks/torch_accuracy.py", _accuracy_line)


def _retune_line(data: dict[str, Any], _: Path) -> str:
    """Return a line with the time that a library from nothing took."""
    steps = seconds_by_step(data["seconds"])
    tables = (Table.parse(name) for name in data["tables"])
    names = " and ".join(f"{t.suite} {t.layout} {t.dtype}/{t.acc}" for t in tables)
    each = ", ".join(f"{step} {seconds / 60:.1f}" for step, seconds in steps.items())
    made = data["provenance"]
    minutes = f"{sum(steps.values()) / 60:.1f} minutes of one {made['gpu']}"
    return f"- {names}, tuned from scratch: {minutes} ({each}){_when(made)}"


RETUNE = NotedFile(RETUNE_FILE, RETUNE_FORMAT, "outblas build-library --from-nothing", _retune_line)
#: Files with lines under the published table, in the order of the lines.
NOTED = (LARGE, RETUNE, CUTLASS, INDUCTOR, ACCURACY)
