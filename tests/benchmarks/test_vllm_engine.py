"""benchmarks/vllm_engine.py without vLLM and without a GPU: order of processes, figures, and what a restart repeats."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.search.intervals.engine_model import engine_products
from support.helpers import ROOT, module_of_file


@pytest.fixture(name="code")
def code_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return module_of_file(ROOT / "benchmarks" / "vllm_engine.py", monkeypatch)


def found(ms: float, prefill: float, logprob: float = -1.0) -> dict[str, Any]:
    return {
        "decode": {"1": [ms, ms + 9, ms], "8": [2 * ms]}, "end_to_end": {"1": [1 / ms]}, "log": [],
        "first_token": {"64": [10.0, 10.0, 30.0]}, "prefill": {"1x2048": [prefill]}, "logprobs": [[logprob, -2.0]],
    }  # fmt: skip


def test_every_second_pair_runs_the_other_way_round(code: Any) -> None:
    assert list(code.order(3, ["torch", "outblas"])) == [
        (0, "torch"), (0, "outblas"), (1, "outblas"), (1, "torch"), (2, "torch"), (2, "outblas"),
    ]  # fmt: skip


def test_a_ratio_above_one_is_a_gain_in_time_and_in_rate(code: Any) -> None:
    processes = [
        {"pair": 0, "variant": "torch", **found(5.0, 100.0)},
        {"pair": 0, "variant": "outblas", **found(4.0, 110.0, -1.5)},
        {"pair": 1, "variant": "torch", **found(5.0, 100.0)},
        {"pair": 1, "variant": "outblas", **found(5.0, 90.0)},
        {"pair": 2, "variant": "torch", **found(5.0, 100.0)},
        {"pair": 2, "variant": "outblas", "error": "no GPU", "log": []},
    ]
    made = code.summarised(processes)
    assert "tuned" not in made
    one = made["cells"]["decode"]["1"]
    assert (one["torch"], one["outblas"], one["pairs"]) == (5.0, 4.5, [1.25, 1.0])
    assert one["ratio"] == 1.125 and one["low"] < 1 < one["high"]
    assert made["cells"]["prefill"]["1x2048"]["pairs"] == [1.1, 0.9]
    assert made["cells"]["first_token"]["64"]["ratio"] == 1.0 and made["geomean"]["first_token"] == 1.0
    assert made["geomean"]["decode"] == pytest.approx(1.125)
    assert [(row["variant"], row["max"], row["mean"]) for row in made["differences"]] == [
        ("outblas", 0.5, 0.25), ("torch", 0.0, 0.0), ("outblas", 0.0, 0.0), ("torch", 0.0, 0.0),
    ]  # fmt: skip


def test_one_pair_has_no_interval_and_none_has_no_figure(code: Any) -> None:
    pair = [{"pair": 0, "variant": name, **found(5.0, 100.0)} for name in ("torch", "outblas")]
    assert code.compared(pair, "outblas")["cells"]["decode"]["8"]["low"] is None
    assert code.compared(pair[:1], "outblas")["cells"] == {}


def test_a_tuned_library_stands_beside_the_packaged_one(
    code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = zip(("torch", "outblas", "tuned"), (5.0, 4.0, 2.5), strict=True)
    made = code.summarised([{"pair": 0, "variant": name, **found(ms, 100.0)} for name, ms in figures])
    assert (made["geomean"]["decode"], made["tuned"]["geomean"]["decode"]) == (1.25, 2.0)
    ran: list[list[str]] = []

    def run(command: list[str], env: Any, check: bool = False, **_: Any) -> None:
        ran.append(command)
        if check:
            library = tmp_path / "qwen2.5-3b-tuned" / "run" / "library.json"
            library.parent.mkdir(parents=True)
            library.write_text("{}")
        else:
            assert env["OUTBLAS_LIBRARY"].endswith("library.json")
            Path(command[command.index("--out") + 1]).write_text(json.dumps(found(5.0, 100.0)))

    monkeypatch.setattr(code.subprocess, "run", run)
    arguments = SimpleNamespace(repeats=1, limit=9, caches=tmp_path, tune=60)
    for _ in range(2):
        assert code.run_process("qwen2.5-3b", "tuned", arguments)["tuning_s"] >= 0
    assert [command[1:4] == ["-m", "outblas", "tune"] for command in ran] == [True, False, False], "tuned once"
    assert "12,60s" in ran[0] and "--no-install" in ran[0]


@pytest.mark.parametrize("seed", range(20))
def test_two_models_of_both_kinds_are_drawn(code: Any, seed: int) -> None:
    from outblas.core.suites import engine_weights

    models = code.untuned(seed)
    assert len({*models}) == 2 and code.MODELS[models[0]]["tie_word_embeddings"] and models == code.untuned(seed)
    assert engine_products(code.MODELS[models[1]])[0].bias
    for model in models:
        weights = {(product.n, product.k) for product in engine_products(code.MODELS[model])}
        assert len(weights & engine_weights().keys()) <= 1


def test_a_restart_runs_what_is_missing_and_what_failed(
    code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []

    def run_process(model: str, variant: str, arguments: Any, gpu: str | None) -> dict[str, Any]:
        ran.append((model, variant))
        assert gpu is None
        return {"error": "no memory", "log": []} if len(ran) == 2 else found(5.0, 100.0)

    monkeypatch.setattr(code, "run_process", run_process)
    monkeypatch.setattr(code, "collect_provenance", lambda *_: {"gpu": None})
    out = tmp_path / "vllm.json"
    arguments = SimpleNamespace(out=out, models=["qwen2.5-7b"], pairs=1, variants=["torch", "outblas"], gpus=[])
    code.run_all(arguments)
    assert "error" in json.loads(out.read_text())["models"]["qwen2.5-7b"]["processes"][1]
    code.run_all(arguments)
    assert ran == [("qwen2.5-7b", "torch"), ("qwen2.5-7b", "outblas"), ("qwen2.5-7b", "outblas")]
    entry = json.loads(out.read_text())["models"]["qwen2.5-7b"]
    assert len(entry["processes"]) == 2 and entry["geomean"]["decode"] == 1.0


def test_models_run_side_by_side_on_gpus_of_their_own(
    code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, ran = threading.Barrier(2, timeout=30), list[tuple[str, str | None]]()

    def run_process(model: str, variant: str, arguments: Any, gpu: str | None) -> dict[str, Any]:
        ran.append((model, gpu))
        both.wait()
        return found(5.0, 100.0)

    monkeypatch.setattr(code, "run_process", run_process)
    monkeypatch.setattr(code, "collect_provenance", lambda *_: {"gpu": None})
    out, models = tmp_path / "vllm.json", ["llama-3-8b", "qwen2.5-7b"]
    code.run_all(SimpleNamespace(out=out, models=models, pairs=1, variants=["torch", "outblas"], gpus=["0", "1"]))
    gpu_of = dict(ran)
    assert set(ran) == set(gpu_of.items()) and set(gpu_of.values()) == {"0", "1"}
    made = json.loads(out.read_text())["models"]
    assert all(len(made[model]["processes"]) == 2 and made[model]["geomean"]["decode"] == 1.0 for model in models)
    assert code.environment("torch", Path("c"), "1")["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_models_are_such_as_tune_knows(code: Any) -> None:
    for config in code.MODELS.values():
        assert len(engine_products(config)) == 5
    switches = {name: code.environment(name, Path("c"))["OUTBLAS_VLLM"] for name in code.VARIANTS}
    assert switches == {"torch": "0", "outblas": "1", "tuned": "1", "uncompiled": "0"}


def test_a_process_that_takes_too_long_is_an_error(code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "environment", lambda variant, caches, gpu: dict(os.environ))
    found = code.run_process("qwen2.5-3b", "torch", SimpleNamespace(repeats=1, limit=0.01, caches=tmp_path))
    assert "timed out after" in found["error"] and found["log"] == []


def test_a_step_is_that_of_the_request_that_began_last(monkeypatch: pytest.MonkeyPatch) -> None:
    code = module_of_file(ROOT / "benchmarks" / "engine" / "vllm_process.py", monkeypatch)

    def result(first: float, last: float) -> SimpleNamespace:
        return SimpleNamespace(
            metrics=SimpleNamespace(first_token_ts=first, last_token_ts=last, num_generation_tokens=5)
        )

    assert code.step_ms([result(1.0, 9.0), result(3.0, 5.0), result(2.0, 7.0)]) == 500.0
