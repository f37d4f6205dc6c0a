"""The whole loop of an evolution against a scripted server, on recorded evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas_lab.llm.archive import ArchiveShape
from outblas_lab.llm.budget import Budget
from outblas_lab.llm.client import RetryPolicy
from outblas_lab.llm.evaluators import EvaluatorChoice
from outblas_lab.llm.evolve import EvolveSettings
from outblas_lab.llm.evolve_folder import EvolveFiles
from outblas_lab.llm.evolve_journal import EvolveJournal
from outblas_lab.llm.evolve_run import EvolveRequest, ServerSettings, run_evolve
from outblas_lab.llm.models import Model
from support.gpus.known import H200
from support.llm_kernels import PROBLEM, failed, kernel, passed, record
from support.llm_server import Say, ScriptedServer

pytest.importorskip("openai")

MODELS = [Model("scripted")]
QUICK = RetryPolicy(silence_s=20, stall_s=20, attempts=4, first_s=0.001)


@pytest.fixture(name="key", autouse=True)
def key_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")


def evolve(
    server: ScriptedServer, recording: Path, folder: Path, requests: int = 8, *, parallel: int = 1, turns: int = 3,
    problems: tuple[Problem, ...] = (PROBLEM,), models: list[Model] | None = None, budget: Budget | None = None,
    retry_policy: RetryPolicy = QUICK, seed: int = 0, shape: ArchiveShape | None = None,
    kinds: tuple[str, ...] = ("code", "config"), counters: Path | None = None,
    place: EvaluatorChoice | None = None, **limits: int,
) -> tuple[str, EvolveFiles]:  # fmt: skip
    settings = EvolveSettings(shape or ArchiveShape(), seed, turns, parallel, kinds, max_tokens=1000, **limits)
    asked, most = ServerSettings(server.url, retry_policy), budget or Budget(requests=requests)
    place = place or EvaluatorChoice(str(recording))
    unwatched = lambda *watched: lambda outcome: None  # noqa: E731
    request = EvolveRequest(problems, models or MODELS, asked, place, most, settings, folder, "test", counters)
    return run_evolve(request, unwatched)


def outcomes(folder: Path) -> list[tuple[str, str]]:
    with EvolveJournal(folder / "store.sqlite") as journal:
        return [(o.kind, o.answer) for o in journal.outcomes().values()]


def last_user(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"])


def in_turn(*says: Say) -> Callable[[dict[str, Any], int], Say]:
    return lambda request, number: says[min(number, len(says) - 1)]


@pytest.fixture(name="recording", scope="module")
def recording_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels 0 to 19 are right and faster and faster; 50 is wrong, 51 a cheat, 52 too fast, 53 does not compile."""
    config = Sm80MmaConfig(64, 64)
    return record(
        tmp_path_factory.mktemp("recording") / "free.jsonl",
        *(passed(kernel(i), 4.2 - 0.1 * i) for i in range(20)),
        failed(kernel(50), Status.WRONG, "exact: 3 of 4096 elements", log="C[63, 5] is 7, not 8"),
        failed(kernel(51), Status.RULE_BROKEN, "the answer is the last call's, keyed by address"),
        passed(kernel(52), 0.5 * floor_us(PROBLEM, H200)),
        failed(kernel(53), Status.COMPILE_ERROR, "gemm does not compile", log='error: identifier "oops" is undefined'),
        passed(config, 3.1),  # type: ignore[arg-type]
    )
