"""benchmarks/transformer/moe_model.py on a CPU: a tiny model by every way, its logits, and a resumed run."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")

import torch  # noqa: E402

from outblas.core.errors import UsageError  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: F401  # noqa: E402
from support.helpers import ROOT  # noqa: E402
from support.model_steps_fixture import ours_fixture  # noqa: F401  # noqa: E402
from support.served_fixture import Served, served_fixture  # noqa: F401  # noqa: E402

TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}


@pytest.fixture(name="bench")
def bench_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "transformer"))
    bench = importlib.import_module("moe_model")
    monkeypatch.setattr(bench, "PLACES", 3)
    return bench


@pytest.fixture(name="ways")
def ways_fixture(bench: Any) -> Any:
    return importlib.import_module("moe_ways")


def tiny(bench: Any, dtype: Any = torch.bfloat16) -> Any:
    shape = replace(bench.SHAPE, fields=bench.SHAPE.fields | TINY)
    return bench.random_model(shape.configuration(2, tiny=False), torch.device("cpu"), dtype)


def test_the_model_has_the_published_shape(bench: Any) -> None:
    whole = bench.SHAPE.configuration(6, tiny=False)
    assert (whole.num_hidden_layers, whole.hidden_size, whole.moe_intermediate_size) == (6, 2048, 768)
    assert (whole.num_experts, whole.num_experts_per_tok, whole.head_dim) == (128, 8, 128) and whole.norm_topk_prob
    model = tiny(bench)
    experts = [each for name, each in model.named_parameters() if "experts" in name]
    assert len(experts) == 2 * 2 and all(0.015 < float(each.float().std()) < 0.025 for each in experts)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_computes_the_same_logits(bench: Any, ways: Any, experts: str) -> None:
    model = tiny(bench, torch.float32)
    ids = torch.arange(10).view(2, 5)
    before = model.config._experts_implementation
    with torch.no_grad(), ways.experts_by(model, "eager"):
        want = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad(), ways.running(model, ways.Way(experts)):
        assert {each.config._experts_implementation for each in model.modules() if hasattr(each, "config")} == {experts}
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, want, rtol=1e-4, atol=1e-5)
    assert model.config._experts_implementation == before


@pytest.mark.parametrize("step", ["decode_3", "prefill_6"])
def test_all_ways_run_the_same_step(bench: Any, ours: Served, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grouped_product", "moe_layer"):
        module = importlib.import_module(f"outblas.dispatch.grouped.{name}")
        monkeypatch.setattr(module, "grouped_state", lambda index: None)  # no kernel runs here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    row = bench.measure(tiny(bench), bench.Step.parse(step), list(bench.WAYS), 3, 4)
    assert set(row["ways"]) == set(bench.WAYS) and not row["left_out"]
    assert row["context"] == (4 if step == "decode_3" else 0)
    for name, each in row["ways"].items():
        assert each["ms"][0] > 0 and each["logits"]["mean"] < 0.05 * each["logits"]["rms"], name
        assert bool(each["no_graph"]) == (name == "eager")
    assert row["ways"]["grouped_mm"]["as_good"] and row["ways"]["outblas"]["products"]["ours"] > 0 and ours.ran
    assert row["fastest_own"] in bench.WAYS and row["over_fastest_own"][0] > 0
    assert bench.line_of(row).startswith(f"{step}: ")


def test_what_cannot_be_captured_runs_without_a_graph(bench: Any, ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = ways.ready_way

    def only_without(work: Any, model: Any, name: str, graph: bool) -> Any:
        if graph:
            raise RuntimeError("operation not permitted when stream is capturing")
        return ready(work, model, name, graph)

    monkeypatch.setattr(ways, "ready_way", only_without)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    row = bench.measure(tiny(bench), bench.Step.parse("decode_2"), ["grouped_mm"], 3, 4)
    assert "not permitted" in row["ways"]["grouped_mm"]["no_graph"] and "over_fastest_own" not in row


def test_a_way_that_cannot_run_is_left_out(bench: Any, ways: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "MOST_GATHERED", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    row = bench.measure(tiny(bench), bench.Step.parse("decode_2"), ["eager", "batched_mm", "outblas"], 3, 4)
    assert set(row["ways"]) == {"eager"} and row["ways"]["eager"]["as_good"] is None
    assert "GiB of weights" in row["left_out"]["batched_mm"] and "OutBLAS is not on" in row["left_out"]["outblas"]


def test_only_few_tokens_gather_weights(ways: Any) -> None:
    config = ways.SHAPE.configuration(1, tiny=False)
    assert ways.gathered_bytes(config, 64) <= ways.MOST_GATHERED < ways.gathered_bytes(config, 2048)


def test_the_fastest_own_way_is_compared_in_pairs_only_within_a_kind(bench: Any) -> None:
    errors = {"mean": 1.0, "largest": 2.0}
    ready = {name: SimpleNamespace(entry=SimpleNamespace(products={})) for name in bench.WAYS}
    made = bench.ReadyWays(ready, dict.fromkeys(bench.WAYS, errors), {"eager": "it waits"})
    times = {"eager": [9.0, 9.0, 9.0], "grouped_mm": [4.0, 6.0, 8.0], "outblas": [2.0, 3.0, 4.0]}
    row = bench.figures_of(times, made)
    assert row["fastest_own"] == "grouped_mm" and row["over_fastest_own"] == pytest.approx([2.0, 2.0, 2.0])
    assert row["ways"]["outblas"]["ms"][0] == pytest.approx(0.003)
    times["eager"] = [3.0, 3.0, 3.0]
    row = bench.figures_of(times, made)
    assert row["fastest_own"] == "eager" and row["over_fastest_own"][0] == pytest.approx(1.0)
    assert not bench.as_good({"mean": 1.3, "largest": 2.0}, errors)
    assert not bench.as_good({"mean": float("nan"), "largest": 2.0}, errors)


def test_an_interrupted_run_resumes(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(model: Any, step: Any, *_: Any) -> dict[str, Any]:
        asked.append(step.name)
        return {"step": step.name, "ways": {}, "left_out": {}}

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "random_model", lambda *_: None)
    monkeypatch.setattr(bench, "collect_provenance", lambda command: {"command": command})
    out = tmp_path / "moe_model.json"
    bench.main(["--steps", "decode_8", "--out", str(out)])
    bench.main(["--out", str(out)])
    assert asked == ["decode_8", "decode_1", "decode_64", "prefill_2048"]
    assert [row["step"] for row in json.loads(out.read_text())["rows"]] == asked
    with pytest.raises(UsageError, match="the same settings"):
        bench.main(["--layers", "2", "--out", str(out)])
