"""Tables of rivals: Ampere's instructions, CUDA-L2, CUTLASS on Hopper, and a transformer's steps in torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures.rival_files import (
    AMPERE_FORMAT,
    CUDA_L2_FORMAT,
    ampere_means,
    cuda_l2_groups,
    cutlass_means,
    has_other_sums,
    ratios_of,
)

from outblas.core.errors import RecordError
from outblas.core.plain_files import read_json
from outblas.core.problem import Problem
from outblas.core.stats import geomean
from outblas_lab.publish.words import regime_words
from pages.json_files import use_json
from pages.notes import CUTLASS, NotedFile, replaced_words
from pages.table_words import step_words, table_lines

MODEL_STEPS = "model_steps.json"
NOT_MEASURED = "Not measured yet."
#: Shared memory of a CTA, KiB -> GPUs with it.
_LIMITS = {"163": "163 KiB (A100)", "99": "99 KiB (A10, L40S, GeForce)"}
#: Rival -> its words, and the aim: the least geometric mean.
_RIVALS = {"cutlass": ("fastest CUTLASS 2.x", 1.00), "cuda_l2": ("CUDA-L2's A100 kernel", 1.10)}
#: The problem that has a bar of its own, and the bar over CUTLASS.
_SQUARE, _SQUARE_BAR = "4096_4096_4096", 0.95
_PAIRS = {
    "ours_over_cuda_l2": "OutBLAS / CUDA-L2",
    "cuda_l2_over_lt_auto": "CUDA-L2 / autotuned cuBLASLt",
    "cuda_l2_over_torch": "CUDA-L2 / torch",
    "ours_over_lt_auto": "OutBLAS / autotuned cuBLASLt",
    "ours_over_torch": "OutBLAS / torch",
}


def own_sums_ratios(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return OutBLAS's speed over CUDA-L2's kernel for each problem whose kernel sums as it claims."""
    found = (row for row in rows if "ours_over_cuda_l2" in ratios_of(row) and not has_other_sums(row["kernel"]))
    return [float(ratios_of(row)["ours_over_cuda_l2"]["ratio"]) for row in found]


def each_table(results: Path, file: NotedFile) -> str:
    """Return the table of a file, :data:`AMPERE` or :data:`CUDA_L2`, for every GPU that has it; one line if none has.

    Raises:
        RecordError: a file cannot be used.
    """
    parts = ["\n".join(file.lines(path.parent)) for path in sorted(results.glob(f"*/{file.name}"))]
    return "\n\n".join(parts) or NOT_MEASURED


def _ampere_text(data: dict[str, Any], _: Path) -> str:
    rows = data["rows"]
    cells = []
    for limit, acc, rival, mean in _some(ampere_means(rows)):
        words, aim = _RIVALS[rival]
        bar = f"{aim:.2f}×" if limit == "163" else "–"
        cells.append([_LIMITS[limit], acc, words, mean.problems, f"{mean.ratio:.3f}×", bar, mean.ahead])
    head = ["shared memory per CTA", "sums", "rival", "problems", "OutBLAS / rival", "target", "significantly ahead"]
    return "\n".join([*table_lines(head, 3, cells), "", *_square_lines(rows), *_notes(data)])


def _square_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for row in rows:
        problem = Problem.from_key(row["problem"])
        found = ratios_of(row).get("163", {}).get("cutlass")
        if problem.mnk == _SQUARE and found:
            yield (
                f"On {_SQUARE} with {problem.acc} sums it has {found['ratio']:.3f}× the speed of the fastest CUTLASS "
                f"2.x; the target is {_SQUARE_BAR:.2f}×."
            )


def _cuda_l2_text(data: dict[str, Any], _: Path) -> str:
    rows = data["rows"]
    cells = [
        [words, _PAIRS[pair], mean.problems, f"{mean.ratio:.3f}×", mean.ahead]
        for words, means in _some(list(cuda_l2_groups(rows).items()))
        for pair, mean in means.items()
    ]
    head = ["CUDA-L2's sums", "GPU time", "problems", "speed ratio", "significantly above 1"]
    timed = [row for row in rows if "ours_over_cuda_l2" in ratios_of(row)]
    host = {name: geomean(row["host_us"][name] for row in timed) for name in timed[0]["host_us"]}
    kernels = [row["kernel"] for row in rows if row.get("kernel")]
    other = Counter(
        f"{', '.join(kernel['accumulators'])} where CUDA-L2 claims {kernel['claimed']}"
        for kernel in kernels
        if has_other_sums(kernel)
    )
    sums = "; ".join(f"{count} accumulate in {words}" for words, count in other.items()) or "all sum as claimed"
    waits, padded = sum(kernel["waits"] for kernel in kernels), sum(kernel["padded"] is not None for kernel in kernels)
    lines = [
        *table_lines(head, 2, cells),
        "",
        "Host time per call, geometric mean: " + ", ".join(f"{name} {us:.2f} µs" for name, us in host.items()) + ".",
        f"According to their machine code, of {len(kernels)} kernels {sums}. "
        f"{waits} wait for the GPU in each call. Padded problems: {padded}.",
        *_notes(data),
    ]
    return "\n".join(lines)


def _some(means: list[Any]) -> list[Any]:
    if not means:
        raise RecordError("no rival was timed on any problem", "at least one timed rival", "measure again")
    return means


def _notes(data: Mapping[str, Any]) -> list[str]:
    """Return lines on kernels that failed, problems that were lost, and the origin of a result file."""
    rows, made = data["rows"], data["provenance"]
    lost = [Problem.from_key(row["problem"]).mnk for row in rows if "lost" in row]
    cutlass = f", CUTLASS {made['cutlass']}" if made.get("cutlass") else ""
    return [
        _failures(Counter(name for row in rows for name in row.get("refused", {}))),
        *([f"Not timed, because a kernel ended the process: {', '.join(lost)}."] if lost else []),
        f"{made['gpu']}{cutlass}, {made['date'][:10]}, commit {made['commit'][:7]}.",
    ]


def _failures(counts: Counter[str]) -> str:
    """Return a sentence on the kernels that failed: name -> number of problems."""
    if not counts:
        return "Every kernel passed its proof."
    named = ", ".join(f"`{name}` on {count}" for name, count in counts.most_common(3))
    return f"{sum(counts.values())} builds or proofs failed: {'most often ' if len(counts) > 3 else ''}{named}."


AMPERE = NotedFile("ampere_peers.json", AMPERE_FORMAT, "benchmarks/ampere_peers.py", _ampere_text)
CUDA_L2 = NotedFile("cuda_l2.json", CUDA_L2_FORMAT, "benchmarks/cuda_l2.py", _cuda_l2_text)
#: Variant of a step -> its column.
_VARIANTS = {"outblas": "`enable()`", "outblas_fused": "residuals and gates fused"}
_MODES = {"eager": "eager", "compile": "torch.compile", "graph": "CUDA graph"}


def read_model_steps(path: Path) -> dict[str, Any]:
    """Return the content of a result file of ``benchmarks/transformer/model_steps.py``.

    Raises:
        RecordError: the file cannot be read, or lacks a field.
    """

    def checked(data: dict[str, Any]) -> dict[str, Any]:
        assert all(isinstance(data["provenance"][field], str) for field in ("gpu", "driver", "date"))
        for step in data["steps"]:
            float(step["variants"]["outblas"]["speedup"][0]), float(step["variants"]["torch"]["us"][0])
        return dict(data)

    return use_json(path, "benchmarks/transformer/model_steps.py", checked)


def transformer_table(folder: Path) -> str:
    """Return the table of a model's steps, or one line if they are not measured.

    Raises:
        RecordError: the file is there and cannot be read.
    """
    path = folder / MODEL_STEPS
    if not path.exists():
        return "Not measured on this GPU."
    data = read_model_steps(path)
    names = [name for name in _VARIANTS if any(name in step["variants"] for step in data["steps"])]
    rows: list[list[str]] = []
    for step in data["steps"]:
        torch, mode = step["variants"]["torch"], _MODES.get(step["mode"], step["mode"])
        speed = [f"{torch['us'][0] / 1e3:.2f} ms", f"{torch['tokens_per_s']:,.0f}"]
        rows.append([step_words(step["step"]), mode, *speed, *(_interval(step["variants"].get(n)) for n in names)])
    means = [
        f"{geomean([step['variants'][name]['speedup'][0] for step in data['steps'] if name in step['variants']]):.3f}×"
        for name in names
    ]
    made = data["provenance"]
    lines = [
        *table_lines(["step", "mode", "torch", "tokens/s", *(_VARIANTS[name] for name in names)], 2, rows),
        "| geometric mean | | | | " + " | ".join(means) + " |",
        "",
        f"{data['layers']} layers{', after tuning' if 'tuned' in data else ''}, context {data['context']}, "
        f"{data['rounds']} interleaved rounds; {made['gpu']}, "
        f"driver {made['driver']}, torch {made['toolchain']['torch']}, {made['date'][:10]}, "
        f"commit {made['commit'][:7]}.",
    ]
    return "\n".join(lines)


def _interval(variant: Mapping[str, Any] | None) -> str:
    if variant is None or not variant.get("speedup"):
        return "–"
    ratio, low, high = variant["speedup"]
    return f"{ratio:.3f}× ({low:.3f} to {high:.3f})"


def cutlass_table(folder: Path) -> str:
    """Return CUTLASS and OutBLAS by regime, or one line if it is not measured.

    Raises:
        RecordError: the file is there and cannot be read.
    """
    if not CUTLASS.lines(folder):
        return "Not measured on this GPU."
    data = read_json(folder / CUTLASS.name)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        if row["cutlass"] is not None:
            groups.setdefault(str(row["regime"]), []).append(row)
    cells: list[list[object]] = []
    everything = [row for rows in groups.values() for row in rows]
    for name, rows in [*groups.items(), ("all", everything)]:
        means = cutlass_means(rows)
        words = name if name == "all" else regime_words(name)
        cells.append([words, len(rows), *(f"{value:.3f}×" for value in means.values())])
    made = data["provenance"]
    worst = min(everything, key=lambda row: row["ours_over_cutlass"]["ratio"])
    head = ["regime", "problems", "CUTLASS / fastest rival", "OutBLAS / fastest rival", "OutBLAS / CUTLASS"]
    lines = [
        *table_lines(head, 1, cells),
        "",
        f"The worst problem for OutBLAS is {Problem.from_key(worst['problem']).mnk}, at "
        f"{worst['ours_over_cutlass']['ratio']:.3f}× CUTLASS. "
        f"CUTLASS runs the fastest of {len(data['instances'])} kernels of its collective builder"
        f"{replaced_words(folder, data['rows'])}. "
        f"{made['gpu']}, {made['date'][:10]}, commit {made['commit'][:7]}.",
    ]
    return "\n".join(lines)
