"""The directory of one `outblas build-library`: its files, and the hash of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from outblas.core.config import config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.files import write_json
from outblas.core.journal import read_journal
from outblas.core.plain_files import read_object
from outblas.core.suites import Table
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.library import Library
from outblas.records.proved_kernels import built_by, proved_problems
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES

#: Of every step that draws something at random.
SEEDS = {
    "tune": 2, "bench": 4, "again": 5, "refine": 6, "borrow": 7, "reopen": 8, "reopen_again": 9, "trial": 100,
    "judge": 200, "trial_workloads": 300, "search_cold": 400,
}  # fmt: skip
#: What a second search leaves in the table's provenance, with the number of problems.
PROVENANCE_KEYS = {
    "again": "searched_again", "refine": "refined", "borrow": "borrowed", "reopen": "reopened",
    "reopen_again": "reopened_again",
}  # fmt: skip
#: Starts of the machine that time the finalists of a step. The first three are of the first searches.
REOPENED_STARTS = {"reopen": ("4", "5", "6"), "reopen_again": ("7", "8", "9")}

TABLES = tuple(
    Table(*text.split(":"))
    for text in (
        "grid1000:TN:fp16:fp32",
        "grid1000:NN:fp16:fp32",
        "grid1000:TN:bf16:fp32",
        "grid1000:NN:bf16:fp32",
        "grid1000:TN:fp16:fp16",
        "llm:TN:fp16:fp32",
        "llm:TN:bf16:fp32",
    )
)


@dataclass(frozen=True)
class BuildFolder:
    """The directory of one build: one kind of kernels, one toolchain. The constructor makes and checks nothing.

    Properties: ``library`` is the path ``library.json`` in it, ``stamp`` that of ``work.json``, ``recording`` that of
    its folder ``recording``.
    ``gpu_index`` is the first of ``gpus``; searches run there.

    Attributes:
        gpus: CUDA's indices of the GPUs, all of one kind. They share the problems of trials and benches.
        from_nothing: True if the searches must not begin with packaged kernels.
    """

    path: Path
    gpus: tuple[int, ...] = (0,)
    from_nothing: bool = False

    @property
    def gpu_index(self) -> int:
        return self.gpus[0]

    @property
    def library(self) -> Path:
        return self.path / "library.json"

    @property
    def stamp(self) -> Path:
        return self.path / "work.json"

    @property
    def recording(self) -> Path:
        return self.path / "recording"

    def result(self, table: Table, mode: str) -> Path:
        return self.path / f"{table.stem}_{mode}.parquet"

    def store(self, table: Table) -> Path:
        return self.path / f"{table.stem}_tune.sqlite"

    def finalists(self, table: Table) -> Path:
        return self.path / f"{table.stem}_finalists.json"

    def reopened_finalists(self, table: Table, step: str) -> Path:
        return self.path / f"{table.stem}_{step}_finalists.json"

    def recorded(self) -> tuple[Recording, ...]:
        """Return the recording of this work as a tuple of one. The tuple is empty before step ``record``."""
        return (Recording.load(self.recording),) if any(self.recording.glob("*_cells.parquet")) else ()

    def load(self) -> Library:
        """Return the library of ``library.json``; without that file, a library of this GPU without rows."""
        if self.library.exists():
            return Library.load(self.library)
        return Library(gpu_of_device(self.gpu_index).name, (), {"tables": {}})

    def check(self) -> None:
        """Refuse a directory of other kernels: write ``work.json``, or compare with it if it is there; return None.

        It holds the hash of the kernel sources, the version of NVRTC and the name of the GPU.

        Raises:
            UsageError: the directory is of other kernels, another compiler or another kind of GPU, or the GPUs are of
                several kinds.
            RecordError: ``work.json`` cannot be read.
        """
        kinds = sorted({gpu_of_device(index).name for index in self.gpus})
        if len(kinds) > 1:
            wrong = f"the GPUs are of different models: {', '.join(kinds)}"
            raise UsageError(wrong, "GPUs of the same model", "pass GPUs of the same model in --gpus")
        about = {**built_by(), "gpu": kinds[0]}
        if not self.stamp.exists():
            write_json(self.stamp, about)
        elif (found := {"gpu": about["gpu"], **self._stamped()}) != about:
            raise UsageError(f"{self.path} belongs to a build of {found}", str(about), "pass another --work")

    def check_kernels(self) -> None:
        """Refuse a directory of other kernel sources, without a GPU; return None.

        Raises:
            UsageError: ``work.json`` names other kernels, or is missing.
            RecordError: it cannot be read.
        """
        found = self._stamped().get("kernels") if self.stamp.exists() else "none"
        if found != kernels_sha():
            raise UsageError(f"{self.path} has kernel hash {found}", kernels_sha(), "pass another --work")

    def _stamped(self) -> dict[str, Any]:
        return read_object(self.stamp, "a file written by a build", "pass another --work")


def proof_by(provenance: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what a table's provenance gets as ``proved`` after a proof with today's sources.

    Args:
        provenance: of the proof; it has ``toolchain``, whose ``nvrtc`` is noted, ``date`` and ``commit``.
    """
    noted = {key: provenance[key] for key in ("date", "commit")}
    return {"kernels": kernels_sha(), "nvrtc": provenance["toolchain"].get("nvrtc"), **noted}


def proved(work: BuildFolder, table: Table) -> frozenset[str]:
    """Return the names of kernels that passed every gate before, in this work's searches, trials, recording or library.

    Only kernels for the table's layout, dtype and accumulator count. Those of the library and of trials count only if
    these were made, or proved later, with the same sources and compiler (:func:`built_by`).
    """
    names: set[str] = set()
    kind = (table.layout, table.dtype, table.acc)
    library = work.load()
    problems = proved_problems(library)
    same_kind = (c for p, c in library.kernels().items() if (p.layout, p.dtype, p.acc) == kind and p in problems)
    names |= {config_name(c) for configs in same_kind for c in configs}
    for recording in work.recorded():
        same = [i for i, p in enumerate(recording.problems) if (p.layout, p.dtype, p.acc) == kind]
        passed = (recording.status[same] == STATUS_CODES[Status.PASSED]).any(axis=0)
        names |= {config_name(c) for c, ok in zip(recording.catalogue, passed, strict=True) if ok}
    for path in work.path.glob(f"*_{'_'.join(kind)}_tune.sqlite".lower()):
        with Store(path) as store:
            runs = ("tune", *PROVENANCE_KEYS)
            passed_all = (
                e
                for run in runs
                for e in store.evaluations(run)
                if e.status is Status.PASSED and e.verdict is not None and "rules" in e.verdict.gates
            )
            names |= {config_name(e.config) for e in passed_all}
    for path in work.path.glob(f"*_{'_'.join(kind)}_trial_*.jsonl".lower()):
        settings, *lines = read_journal(path) or [{}]
        if settings.items() >= built_by().items():  # a trial proves what it times
            names.update(name for line in lines for name in line.get("kernels", ()))
    return frozenset(names)


def printer(what: str) -> Callable[..., None]:
    """Return a function ``progress(done, total, note="")`` that prints a line at most every 5 seconds, and at the end.

    Nothing is printed in the first 5 seconds unless ``done == total``. A line is e.g.
    ``tune: 3/10, about 14 s left NOTE``.
    """
    begin = monotonic()
    last = [begin]

    def progress(done: int, total: int, note: object = "") -> None:
        now = monotonic()
        if now - last[0] > 5 or done == total:
            last[0] = now
            left = (now - begin) / max(1, done) * (total - done)
            print(f"{what}: {done}/{total}, about {left:.0f} s left {note}", flush=True)

    return progress
