"""benchmarks/moe_layers.py on a CPU: tiny layers by every variant, wrong outputs, a row, its ratios and the table."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from support.helpers import ROOT, module_of_file

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")


@pytest.fixture(name="bench")
def bench_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark with a tiny model, whose graphs are calls that run anew."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    suite = importlib.import_module("shapes.moe_suite")
    monkeypatch.setitem(suite.MODELS, "tiny", suite.MoeModel(64, 32, 8, 2))
    bench = module_of_file(ROOT / "benchmarks" / "moe_layers.py", monkeypatch)
    monkeypatch.setattr(bench, "run_until_compiled", lambda calls: None)
    monkeypatch.setattr(bench, "graph_of", lambda calls: SimpleNamespace(replay=lambda: bench.run_all(calls)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return bench


@pytest.fixture(name="variants")
def variants_fixture(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The variants, where OutBLAS can be on although there is no GPU."""
    variants = importlib.import_module("rivals.layer_variants")
    for name, each in variants.VARIANTS.items():
        monkeypatch.setitem(variants.VARIANTS, name, variants.LayerVariant(each.prepare, contextlib.nullcontext))
    return variants


def layer(bench: Any, tokens: int = 100) -> Any:
    return bench.MoeLayer("tiny", tokens, "zipf")


def fused_experts(x: Any, w1: Any, w2: Any, scores: Any, experts: Any) -> Any:
    """vLLM's function by torch, token by token."""
    assert (scores.dtype, experts.dtype) == (torch.float32, torch.int32)
    rows = []
    for token, chosen, weights in zip(x.float(), experts.tolist(), scores, strict=True):
        parts = []
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (w1[expert].float() @ token).chunk(2)
            parts.append(weight * (w2[expert].float() @ (torch.nn.functional.silu(gate) * up)))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows).to(x.dtype)


@pytest.fixture(name="vllm")
def vllm_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        fused_experts=fused_experts,
        try_get_optimal_moe_config=lambda *shapes: {"BLOCK_SIZE_M": 16},
        get_moe_configs=lambda *extents: None,
    )
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe.fused_moe", module)


def test_thirty_layers_take_turns_in_their_routing(bench: Any) -> None:
    layers = [one for one in bench.moe_layers() if one.model != "tiny"]
    assert len({one.key for one in layers}) == 30
    assert Counter(one.routing for one in layers) == {"uniform": 15, "zipf": 15}
    assert len({one.routing for one in layers if one.tokens == 64}) == 2


def test_every_variant_gives_the_output_of_fp64(bench: Any, variants: Any, vllm: None) -> None:
    sets = bench.layer_sets(layer(bench), 3, "cpu")
    assert len(sets) == bench.SETS and sets[0].gate_up is sets[2].gate_up is not sets[1].gate_up
    assert sets[0].exact.shape == (64, 64) and sets[0].exact.abs().max() > 0
    for name, variant in variants.VARIANTS.items():
        proved = bench.proved_graph(variant, layer(bench), sets)
        assert proved.wrong == "" and len(proved.calls) == len(sets), name
        assert bool(proved.calls[0].note) == (name == "vllm")


def test_few_tokens_are_compared_all(bench: Any, variants: Any) -> None:
    one = layer(bench, tokens=1)
    sets = bench.layer_sets(one, 3, "cpu")
    assert sets[0].exact.shape == (1, 64)
    assert not bench.proved_graph(variants.VARIANTS["transformers_batched"], one, sets).wrong


def test_a_wrong_output_is_found(bench: Any) -> None:
    one = bench.layer_sets(layer(bench), 0, "cpu")[0]
    token = int(one.compared[5])
    good = torch.zeros_like(one.x)
    good[one.compared] = one.exact.bfloat16()
    assert one.wrong(good) == ""
    for value in (good[token, 7] + one.exact[5].square().mean().sqrt(), float("nan"), float("inf")):
        bad = good.clone()
        bad[token, 7] = value
        assert one.wrong(bad).startswith(f"token {token} is off by")
    assert one.wrong(torch.zeros_like(good)) and one.wrong(good.float()) and one.wrong(good[1:])


def test_a_missing_expert_is_found(bench: Any) -> None:
    """The least of a token's experts is left out, as by a kernel that skips a row."""
    one = bench.layer_sets(layer(bench), 0, "cpu")[0]
    scores = one.scores.clone()
    scores[torch.arange(len(scores)), scores.argmin(dim=-1)] = 0
    output = fused_experts(one.x, one.gate_up, one.down, scores.float(), one.experts.int())
    assert one.wrong(output)


def test_a_row_names_what_is_wrong_and_absent(bench: Any, variants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(_: Any, operands: Any) -> Any:
        return variants.LayerCall(lambda: torch.zeros_like(operands.x))

    monkeypatch.setitem(variants.VARIANTS, "transformers", variants.LayerVariant(zeros))
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(variants, "MOST_GATHERED", 100)
    made = bench.layer_sets
    monkeypatch.setattr(bench, "layer_sets", lambda one, seed: made(one, seed, "cpu"))
    monkeypatch.setattr(bench, "times_us", lambda graphs, rounds, calls: {name: [2.0, 3.0, 9.0] for name in graphs})
    row = bench.measure(layer(bench), list(variants.VARIANTS), 0, 3)
    assert row["times_us"] == {"outblas": 3.0, "transformers_outblas": 3.0}
    assert row["wrong"]["transformers"].startswith("token ") and "speedup" not in row
    assert row["absent"]["vllm"].startswith("ModuleNotFoundError")
    assert row["absent"]["transformers_batched"] == "MemoryError: gathered weights of 0 GiB"
    assert (row["problem"], row["tokens"]) == ("tiny_100_zipf", 100)


def test_gathered_weights_are_left_out_where_they_are_large(bench: Any, variants: Any) -> None:
    sizes = {tokens: variants.gathered_bytes(bench.MoeLayer("qwen3-30b-a3b", tokens, "zipf")) for tokens in (64, 512)}
    assert sizes[64] == 64 * 8 * 3 * 768 * 2048 * 2 <= variants.MOST_GATHERED < sizes[512]


def test_without_a_gpu_outblas_cannot_be_on(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    variants = importlib.import_module("rivals.layer_variants")
    monkeypatch.setattr(variants.outblas, "use", lambda: contextlib.nullcontext(False))
    with pytest.raises(bench.OutblasError, match="not on"), variants.by_outblas():
        pass


def test_ratios_and_the_table(bench: Any) -> None:
    times = {"outblas": 2.0, "transformers_outblas": 3.0, "transformers": 6.0, "vllm": 1.0}
    assert bench.ratios_of(times) == {"speedup": 0.5, "over_transformers": 3.0, "enable_over_transformers": 2.0}
    assert bench.ratios_of({"outblas": 2.0, "vllm": 5.0}) == {"speedup": 2.5}
    rows = [{"tokens": 8} | bench.ratios_of(times), {"tokens": 8, "speedup": 2.0}, {"tokens": 1}]
    lines = [line.split() for line in bench.summary(rows)]
    assert lines[1:] == [
        ["1", "1", "-", "-", "-", "0"],
        ["8", "2", "1.000", "3.000", "2.000", "1"],
        ["all", "3", "1.000", "3.000", "2.000", "1"],
    ]


def test_variants_are_chosen_by_name(bench: Any) -> None:
    assert bench.chosen_names("outblas,vllm", bench.VARIANTS, "variant") == ["outblas", "vllm"]
    with pytest.raises(bench.OutblasError, match="did you mean vllm"):
        bench.chosen_names("vlm", bench.VARIANTS, "variant")
