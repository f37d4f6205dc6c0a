"""Hardware counters of kernels on one GPU, read from files of Nsight Compute, in the words of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import RecordError, UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.gpu_records import gpu_of_product
from outblas.core.roofline import Gpu
from outblas.kernels.config_text import config_from_name
from outblas.kernels.cost.cost_model import predict_us
from outblas.records.run_directory import RunDirectory
from outblas.records.store import Store
from outblas_lab.pool.counter_file import OURS, read_counters
from outblas_lab.pool.counters import COUNTER_COLUMNS, PROFILED_COUNTERS, counter_cells, counters_of_figures

#: Counters of the kernels that one call launches, in order: a free kernel may launch several.
LaunchCounters = tuple[Mapping[str, float], ...]
#: (problem key, name of the kernel).
_Key = tuple[str, str]
#: The cell of a counter that ncu did not report.
_UNKNOWN = "\N{EN DASH}"
#: Traffic in a prompt -> its counter, bytes.
_TRAFFIC = {"HBM read": "dram_read_bytes", "HBM written": "dram_write_bytes", "L2 traffic": "l2_bytes"}


@dataclass(frozen=True)
class KnownCounters:
    """Hardware counters of kernels on one GPU.

    Attributes:
        by_kernel: (problem key, name of the kernel) -> counters of its launches.
    """

    by_kernel: Mapping[_Key, LaunchCounters] = field(default_factory=dict)

    def of(self, evaluation: Evaluation) -> LaunchCounters:
        """Return the counters of an evaluated kernel, those of the evaluation itself first; empty without any."""
        own = {name: value for name, value in evaluation.counters.items() if name in PROFILED_COUNTERS}
        return (own,) if own else self.by_kernel.get((evaluation.problem.key, config_name(evaluation.config)), ())

    def words(self, evaluation: Evaluation, gpu: Gpu) -> str:
        """Return a proven kernel's hardware counters as one line per launch.

        A kernel without counters has a line that says so. For a kernel of the families the cost model's time follows,
        marked as an estimate. Nothing is estimated for a free kernel.
        """
        launches = self.of(evaluation)
        if launches:
            return "\n".join(
                f"Nsight Compute{f', launch {i} of {len(launches)}' if len(launches) > 1 else ''}: {_cells(one)}"
                for i, one in enumerate(launches, 1)
            )
        said = "Nsight Compute: this kernel was not profiled on this GPU."
        config = evaluation.config
        if not isinstance(config, KernelConfig):
            return said
        us = predict_us(evaluation.problem, config, gpu)
        return f"{said} An estimate, not a measurement: the cost model expects {us:.2f} us."


def load_counters(path: Path, gpu: Gpu) -> KnownCounters:
    """Read the counters of our kernels from a file or a folder.

    Args:
        path: a JSON file as ``benchmarks/profile_regimes.py`` writes it, a folder with such files, or the folder of a
            tune run after ``outblas profile``.

    Raises:
        RecordError: the path is missing, or a file cannot be read or is damaged.
        UsageError: the counters are of another GPU, or none is of our kernels.
    """
    if path.is_file():
        pairs = list(_of_file(path, gpu))
    elif RunDirectory(path).store.is_file():
        pairs = list(_of_run(path, gpu))
    elif path.is_dir():
        pairs = [pair for file in sorted(path.glob("*.json")) for pair in _of_file(file, gpu)]
    else:
        raise RecordError(f"--counters {path} does not exist", "a counter file or folder", "pass another path")
    if not pairs:
        wrong, do = f"--counters {path} has no counters of OutBLAS kernels", "pass another path, or omit --counters"
        expected = "a file from benchmarks/profile_regimes.py, or a tuning run profiled with `outblas profile`"
        raise UsageError(wrong, expected, do)
    return KnownCounters(dict(pairs))


def _of_file(path: Path, gpu: Gpu) -> Iterator[tuple[_Key, LaunchCounters]]:
    data = read_counters(path)
    _same_gpu(path, data["provenance"]["gpu"], gpu)
    for row in data["rows"]:
        if row["side"] == OURS:
            name = row["name"]  # as this release writes it: later knobs are at their defaults
            name = config_name(config_from_name(name)) if ":" in name else name
            yield (row["problem"], name), tuple(map(counters_of_figures, row["kernels"]))


def _of_run(path: Path, gpu: Gpu) -> Iterator[tuple[_Key, LaunchCounters]]:
    with Store(RunDirectory(path).store) as store:
        for run in store.runs():
            for product in store.profiled_on(run.run_id):
                _same_gpu(path, product, gpu)
            for key, counters in store.counters_by_pair(run.run_id).items():
                yield key, (counters,)


def _same_gpu(path: Path, product: str, gpu: Gpu) -> None:
    """Counters of another GPU would pass for this one's."""
    found = gpu_of_product(product)
    if found is None or found.name != gpu.name:
        wrong = f"--counters {path} is from {product or 'an unknown GPU'}"
        raise UsageError(wrong, f"counters from {gpu.name}, the target GPU", "profile on that GPU, or omit --counters")


def _cells(counters: Mapping[str, float]) -> str:
    shown = zip(COUNTER_COLUMNS, counter_cells(counters), strict=True)
    said = [f"{name} {cell}" for name, cell in shown if cell != _UNKNOWN]
    moved = [f"{name} {counters[key] / 1e6:.1f} MB" for name, key in _TRAFFIC.items() if key in counters]
    return ", ".join((*said, *moved))
