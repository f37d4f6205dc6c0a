"""The archive of a session: a run folder with the tables that ``outblas evolve`` uses.

New kernels go into folders of this server only. A folder of ``outblas evolve`` is read and stays as it is, because its
run may be resumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outblas.core.config import LAUNCHES, KernelConfig, config_name, config_to_json
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.evaluator import Evaluator
from outblas.core.files import lock_run_folder, write_atomic, write_json
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.version import __version__
from outblas.records.library import Library
from outblas.records.provenance import utc_now
from outblas.records.store import Store
from outblas.tune.tune import decided_row
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.archive import Archive, ArchiveShape, Entry
from outblas_lab.llm.evolve_folder import EvolveFiles, is_evolution
from outblas_lab.llm.evolve_journal import AnswerOutcome, EvolveJournal
from outblas_lab.llm.feedback import kind_of, score_of

FORMAT, KIND = 1, "mcp"
#: Name of the asking model in the tables of the archive.
_MODEL = "mcp"


@dataclass(frozen=True)
class SourcedEvaluation:
    """An evaluation, the GPU of its figures, and their source: ``cuda:0``, ``replay:h200`` or ``recorded:<file>``."""

    evaluation: Evaluation
    gpu: Gpu
    source: str


class KernelFolder(AbstractContextManager["KernelFolder"]):
    """The archive in a folder. Use it as a context manager. A missing folder is made.

    Args:
        path: the folder: of an earlier session, of ``outblas evolve``, or new.

    Raises:
        RecordError: the folder holds something else, cannot be read, or another session works in it.
    """

    def __init__(self, path: Path) -> None:
        self.files = EvolveFiles(path)
        self._open = ExitStack()
        self._read_only = is_evolution(path)
        if not self._read_only:
            self._open.enter_context(lock_run_folder(path))
            self._about()

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def entries(self, problem: Problem | None = None) -> list[Entry]:
        """Return the kernels, each once, in the order in which they were stored.

        Args:
            problem: the problem; None: all.

        Raises:
            RecordError: the store cannot be read.
        """
        if not self.files.store.exists():
            return []
        with Store(self.files.store), EvolveJournal(self.files.store) as journal:
            found = journal.entries()
        return [e for e in found if e.origin == "insert" and problem in (None, Problem.from_key(e.problem))]

    def entry(self, name: str) -> Entry:
        """Return the first kernel of a name.

        Raises:
            UsageError: the archive has no such kernel.
            RecordError: the store cannot be read.
        """
        for entry in self.entries():
            if entry.name == name:
                return entry
        raise UsageError(
            f"the archive has no kernel {name!r}", "the name of an archived kernel", "use action 'list' first"
        )

    def store(self, found: SourcedEvaluation) -> bool:
        """Keep a proven kernel: its evaluation, an entry of the archive, and ``best/`` if its score is the best.

        Returns:
            False if the archive had the kernel for this problem; then nothing changes.

        Raises:
            UsageError: the kernel is not proven, its time is not plausible, or the folder is of ``outblas evolve``.
            RecordError: the disk refuses. Earlier kernels are intact.
        """
        evaluation = found.evaluation
        entry = self._entry_of(evaluation, found.gpu)
        archive = Archive(ArchiveShape(islands=1), entries=self.entries())
        if not archive.insert(entry):
            return False
        run, name = self.files.run, found.gpu.name
        was = self._about().get("gpu", name)
        if was != name:
            wrong = f"{self.files.path} holds results from {was}, but this kernel ran on {name}"
            raise UsageError(wrong, "one GPU per run", "ask the user for another --run")
        if not run.exists():
            write_json(run, {"format": FORMAT, "kind": KIND, "outblas": __version__, "gpu": name, "started": utc_now()})
        if archive.best(entry.problem) == entry:
            self._write_best(evaluation)  # first: a session that is killed here stores the kernel again
        with Store(self.files.store) as store:
            run_id = self.files.path.resolve().name
            store.begin(run_id, {KIND: KIND})
            if (entry.problem, entry.name) not in store.recorded_pairs(run_id):
                store.append(run_id, evaluation)  # otherwise a session was killed after this line
            with EvolveJournal(self.files.store) as journal:
                number = sum(1 for _ in journal.questions())  # a killed session may have left one open
                question = journal.ask(number, 0, entry.problem, 0, _MODEL, "new", (), ())
                speedup = evaluation.speedup
                outcome = AnswerOutcome(
                    question.id,
                    "proven",
                    "code" if isinstance(evaluation.config, FreeKernel) else "config",
                    entry.name,
                    entry.us,
                    None if speedup is None else speedup.ratio,
                    words=f"from {found.source}",
                )
                journal.settle(outcome, [replace(entry, question=question.id)])
        return True

    def install(self, problem: Problem, evaluator: Evaluator) -> dict[str, Any] | None:
        """Write the decision for a problem into ``library.json``, by the rule of every library.

        Returns:
            Launch option -> name of the installed kernel; None if no kernel qualifies, and nothing is written.

        Raises:
            RecordError: the library cannot be read or written.
        """
        with Store(self.files.store) as store:
            kept = [e for e in store.evaluations() if e.problem == problem and isinstance(e.config, KernelConfig)]
        row = decided_row(problem, kept, evaluator)
        chosen = {launch: row.choice(launch) for launch in LAUNCHES}
        installed: dict[str, Any] = {
            launch: config_name(choice.config) for launch, choice in chosen.items() if choice is not None
        }
        if not installed:
            return None
        path = self.library
        before = Library.load(path) if path.exists() else Library(evaluator.gpu.name, ())
        rows = [other for other in before.rows if other.problem != problem]
        provenance = {"command": "outblas mcp", "source": evaluator.source, "date": utc_now()}
        Library(evaluator.gpu.name, (*rows, row), provenance).save(path)
        return installed

    @property
    def library(self) -> Path:
        """Return the path of ``library.json``, which ``outblas.use_library`` reads."""
        return self.files.path / "library.json"

    def _entry_of(self, evaluation: Evaluation, gpu: Gpu) -> Entry:
        """Return the archive's entry of a proven kernel. Raises UsageError if it is not proven."""
        if self._read_only:
            wrong = f"{self.files.path} is a run of `outblas evolve`"
            raise UsageError(wrong, "a run directory of this server", "ask the user for another --run")
        name, kind, score = config_name(evaluation.config), kind_of(evaluation, gpu), score_of(evaluation)
        if kind != "proven" or score is None or evaluation.timing is None:
            wrong = f"{name} on {evaluation.problem.key} is not proven ({evaluation.status} {evaluation.detail})"
            do = "correct the kernel first"
            raise UsageError(wrong, "a kernel that passed every gate, with a plausible time", do)
        candidate = config_to_json(evaluation.config)
        return Entry(evaluation.problem.key, 0, name, candidate, score, evaluation.timing.median_us, 0)

    def _about(self) -> dict[str, Any]:
        """Return the content of run.json; empty without one. Raise RecordError if it is not ours."""
        run, expected = self.files.run, f"a run of `outblas mcp` (kind {KIND}, format {FORMAT}) or `outblas evolve`"
        if not run.exists():
            return {}
        return read_object(run, expected, "pass another --run", kind=KIND, format=FORMAT)

    def _write_best(self, evaluation: Evaluation) -> None:
        candidate, key = evaluation.config, evaluation.problem.key
        free = isinstance(candidate, FreeKernel)
        body = candidate.text if isinstance(candidate, FreeKernel) else json.dumps(config_to_json(candidate), indent=1)
        write_atomic(self.files.best / f"{key}.{'cu' if free else 'json'}", body.encode())
        (self.files.best / f"{key}.{'json' if free else 'cu'}").unlink(missing_ok=True)


def listed(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return one JSON object per entry: ``problem``, ``name``, ``us`` and ``speedup_low``, without the kernel."""
    return [
        {"problem": e.problem, "name": e.name, "us": round(e.us, 3), "speedup_low": round(math.exp(e.score), 4)}
        for e in entries
    ]
