"""An evolution on a real GPU, with a scripted server; then from what it recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.records.store import Store  # noqa: E402
from outblas_lab.custom.free_kernel import FreeKernel  # noqa: E402
from outblas_lab.llm.budget import Budget  # noqa: E402
from outblas_lab.llm.evaluators import parse_evaluator  # noqa: E402
from outblas_lab.llm.evolve import EvolveSettings  # noqa: E402
from outblas_lab.llm.evolve_journal import EvolveJournal  # noqa: E402
from outblas_lab.llm.evolve_run import EvolveRequest, ServerSettings, run_evolve  # noqa: E402
from outblas_lab.llm.models import Model  # noqa: E402
from outblas_lab.publish.html.tune_page import write_report  # noqa: E402
from support.helpers import ROOT  # noqa: E402
from support.llm_kernels import answer, config_answer  # noqa: E402
from support.llm_server import Say, serving  # noqa: E402

pytestmark = pytest.mark.gpu
PROBLEM = Problem(256, 256, 512)
EXPLOITS = ROOT / "tests" / "adversarial" / "exploits"


def text(name: str) -> str:
    return (EXPLOITS / name).read_text()


def outcomes(folder: Path) -> list[tuple[str, str]]:
    with EvolveJournal(folder / "store.sqlite") as journal:
        return [(o.kind, o.answer) for o in journal.outcomes().values()]


def test_an_evolution_on_a_gpu_and_again_from_what_it_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    right = text("honest_device.cu")
    wrong = right.replace("i < k; ++i", "i < k - 1; ++i")
    assert wrong != right
    says = [
        answer(wrong),
        answer(right),
        answer(text("keyed_by_pointer.cu")),
        answer(text("honest_tensor_cores.cu")),
        config_answer(family="sm80_mma_gemm", bm=64, bn=64),
        config_answer(family="sm80_mma_gemm", bm=32, bn=32),
    ]
    script: Callable[[dict[str, Any], int], Say] = lambda request, number: Say(says[number % len(says)])  # noqa: E731

    def evolve(device: str, folder: Path) -> None:
        with serving(script) as server:
            settings, budget, place = (
                EvolveSettings(turns=2, parallel=1),
                Budget(requests=len(says)),
                parse_evaluator(device),
            )
            unwatched = lambda *watched: lambda outcome: None  # noqa: E731
            request = EvolveRequest(
                [PROBLEM], [Model("m")], ServerSettings(server.url), place, budget, settings, folder, "test"
            )
            run_evolve(request, unwatched)

    live = tmp_path / "live"
    evolve("cuda:0", live)
    told = outcomes(live)
    assert told[:2] == [("wrong", "code"), ("proven", "code")]
    assert told[2][0] not in ("proven", "compiled") and told[3] == ("proven", "code")
    assert told[4:] == [("proven", "config")] * 2
    with Store(live / "store.sqlite") as store:
        found = {str(e.config.name) if isinstance(e.config, FreeKernel) else "": e for e in store.evaluations()}
    honest = found[FreeKernel.parse(right).name]
    assert honest.status is Status.PASSED and honest.speedup is not None and honest.counters["registers"] > 0
    best = json.loads((live / "run.json").read_text())["best"][PROBLEM.key]
    assert (live / "best" / best["file"]).is_file() and write_report(live, live / "report.html").is_file()

    evolve(str(live / "recorded.jsonl"), tmp_path / "again")
    assert outcomes(tmp_path / "again") == told
