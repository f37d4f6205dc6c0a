"""`outblas evolve` from end to end on what a GPU has answered: its archive ranks as a direct run on the GPU does."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outblas.core.evaluation import Speedup
from outblas.core.problem import Problem
from outblas.records.store import Store
from outblas_lab.custom.examples.example_kernels import all_examples
from outblas_lab.llm.archive import ArchiveShape
from outblas_lab.llm.budget import Budget
from outblas_lab.llm.evaluators import EvaluatorChoice
from outblas_lab.llm.evolve import EvolveSettings
from outblas_lab.llm.evolve_folder import EvolveFiles
from outblas_lab.llm.evolve_journal import EvolveJournal
from outblas_lab.llm.evolve_run import EvolveRequest, ServerSettings, run_evolve
from outblas_lab.llm.models import Model
from support.gpus.known import H200
from support.llm_kernels import answer
from support.llm_server import Say, serving

pytest.importorskip("openai")

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem(512, 512, 512)
RECORDING = ROOT / "results" / "h200" / "free_kernels.jsonl"
DIRECT = ROOT / "results" / "h200" / "free_kernels.json"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def direct_times() -> dict[str, tuple[float, float, float]]:
    """Kernel's name -> (median, low, high), microseconds, of all of them in the same rounds."""
    (row,) = (r for r in json.loads(DIRECT.read_text())["problems"] if r["problem"] == PROBLEM.key)
    return {k["kernel"]: tuple(k["direct_us"].values()) for k in row["kernels"].values()}


def evolved(recording: Path, folder: Path) -> EvolveFiles:
    """A run whose model answers with every example kernel, the slow and the fast ones mixed, in conversations of four
    turns, two at once."""
    texts = [kernel.text for _, kernel in sorted(all_examples().items())]
    with serving(lambda request, number: Say(answer(texts[5 * number % len(texts)]))) as server:
        request = EvolveRequest(
            [PROBLEM], [Model("scripted")], ServerSettings(server.url), EvaluatorChoice(str(recording)),
            Budget(requests=len(texts)),
            EvolveSettings(ArchiveShape(islands=2), turns=4, parallel=2, max_tokens=100), folder, "test",
        )  # fmt: skip
        _, files = run_evolve(request, lambda *watched: lambda outcome: None)
    return files


def ranked(files: EvolveFiles) -> dict[str, Speedup]:
    """Name -> speed-up of what the archive holds, the best first."""
    with EvolveJournal(files.store) as journal, Store(files.store) as store:
        known = {e.config.name: e.speedup for e in store.evaluations(files.path.name)}  # type: ignore[union-attr]
        entries = sorted({e.name: e for e in journal.entries()}.values(), key=lambda e: -e.score)
    return {e.name: speedup for e in entries if (speedup := known[e.name]) is not None}


def against(speedups: Mapping[str, Speedup]) -> Any:
    """Pairs that the direct run has the other way round, but for ties."""
    direct = direct_times()
    timed = {name: s for name, s in speedups.items() if name in direct}
    return importlib.import_module("free_kernels").contradictions(timed, direct)[0]


def test_the_archive_ranks_kernels_as_the_gpu_does(tmp_path: Path) -> None:
    files = evolved(RECORDING, tmp_path / "run")
    found, direct = ranked(files), direct_times()
    names = {kernel.name for kernel in all_examples().values() if kernel.launch.why_not(PROBLEM, H200) is None}
    assert set(found) == names and len(names) >= 12, "every example for the problem was proven, and archived"
    with EvolveJournal(files.store) as journal:
        kinds = Counter(o.kind for o in journal.outcomes().values())
    assert kinds == {"proven": len(names), "contract": len(all_examples()) - len(names)}
    assert names - set(direct) <= set(list(found)[-1:]), "what is too slow for the direct run is the last"
    assert against(found) == []
    by_low = pairwise(found.values())
    assert all(a.ratio > b.ratio or a.low <= b.high for a, b in by_low), "by the lower bound as by the median"
    best = json.loads(files.run.read_text())["best"][PROBLEM.key]
    assert best["candidate"] == min(direct, key=lambda name: direct[name][0])
    assert (files.best / best["file"]).read_text() in {kernel.text for kernel in all_examples().values()}


def test_a_recording_that_the_gpu_contradicts_is_found_out(tmp_path: Path) -> None:
    """Two kernels with each other's figures: the comparison is able to fail."""
    head, *lines = RECORDING.read_text().splitlines()
    rows = sorted((json.loads(line) for line in lines), key=lambda row: row["timing"]["median_us"])
    fast, slow = rows[1], rows[8]
    for key in ("timing", "speedup"):
        fast[key], slow[key] = slow[key], fast[key]
    recording = tmp_path / "exchanged.jsonl"
    recording.write_text("".join(f"{line}\n" for line in (head, *map(json.dumps, rows))))
    assert against(ranked(evolved(recording, tmp_path / "run")))
