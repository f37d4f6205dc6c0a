"""Two layers of Llama 3 8B on a GPU: steps in CUDA graphs, greedy tokens and logits, with and without our kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from support.everything_fixture import sums_in_fp32  # noqa: E402
from support.operator_counts import OperatorCounts  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 2
PRODUCTS = 4 * LAYERS + 1
#: Those that two sums and a gate of a layer follow.
FOLLOWED = 3 * LAYERS


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    if gpu_of_device(0).name != "h200":
        pytest.skip("the packaged library is of an H200")
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", "OUTBLAS_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "transformer"))
    names = ("model_explained", "model_greedy", "model_runs", "model_steps", "step_rounds")
    modules = {name: importlib.import_module(name) for name in names}
    with sums_in_fp32():
        yield SimpleNamespace(**modules, llama=importlib.import_module("llama_example").llama)


@pytest.fixture
def model(code: SimpleNamespace) -> Iterator[Any]:
    yield code.llama.random_model(code.llama.llama3_8b(LAYERS, vocab_size=8192), "cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not outblas.enabled()


@pytest.mark.parametrize("kind, size", [("decode", 8), ("prefill", 512)])
def test_a_step_is_made_of_products_and_fused_kernels(code: SimpleNamespace, model: Any, kind: str, size: int) -> None:
    work = code.model_runs.Work(model, code.step_rounds.Step(kind, size), context=64)
    with OperatorCounts() as called:
        work.run()
    found = called.counts
    assert found["mm"] == PRODUCTS and not {"bmm", "addmm", "cat", "clone", "index_copy_"} & set(found)
    assert found["_scaled_dot_product_flash_attention"] == LAYERS
    if hasattr(torch.ops.aten, "_fused_rms_norm"):
        assert found["_fused_rms_norm"] == 2 * LAYERS + 1
    work.close()


@pytest.mark.parametrize("kind, size", [("decode", 8), ("prefill", 512)])
def test_graphs_of_all_variants_compute_the_same_step(code: SimpleNamespace, model: Any, kind: str, size: int) -> None:
    work = code.model_runs.Work(model, code.step_rounds.Step(kind, size), context=64)
    entries = {name: code.model_runs.entry(work, "graph", each) for name, each in code.model_runs.VARIANTS.items()}
    plain = entries["outblas"].products
    assert plain["ours"] + plain["torchs"] >= PRODUCTS and (plain["ours"] or kind == "prefill")
    assert entries["outblas_weights"].products["promised"] == PRODUCTS and not entries["torch"].products
    fused = entries["outblas_fused"].products
    assert fused["fused"] + fused["unfused"] == FOLLOWED and (kind == "prefill" or not fused["unfused"]), fused
    found = {}
    for _ in range(2):  # one after the other, in any order
        for name, entry in entries.items():
            entry.reset()
            written = [layer[:, work.begin :].zero_() for layer in work.cache.layers]
            entry.run()
            torch.cuda.synchronize()
            assert all(bool((each != 0).any(-1).all()) for each in written), "all heads of all new tokens"
            logits = entry.keeps[1].float().clone()
            assert name not in found or torch.equal(found[name], logits), "a replay repeats itself"
            found[name] = logits
    work.reset()
    scale = float(work.run().float().square().mean().sqrt())
    for name, logits in found.items():
        assert float((logits - found["torch"]).abs().max()) < 0.05 * scale, name
    times = code.step_rounds.time_rounds(entries, 3, alone=False)
    assert {len(each) for each in times.values()} == {3} and min(map(min, times.values())) > 0
    work.close()


@pytest.mark.parametrize("size", [1, 8, 64])
def test_a_graph_holds_the_fused_kernels(code: SimpleNamespace, model: Any, size: int) -> None:
    """Each sum and gate of a decode step was one launch of a fused kernel in the capture.

    The replay gives the results of these kernels outside of a graph.
    """
    work = code.model_runs.Work(model, code.step_rounds.Step("decode", size), context=64)
    variants = code.model_runs.VARIANTS
    plain, graph = (code.model_runs.entry(work, "graph", variants[name]) for name in ("outblas", "outblas_fused"))
    eager = code.model_runs.entry(work, "eager", variants["outblas_fused"])
    apart = plain.products["ours"] + plain.products["torchs"]
    for entry in (graph, eager):
        products = dict(entry.products)
        assert (products.pop("fused"), products.pop("unfused")) == (FOLLOWED, 0)
        assert sum(products.values()) == apart - FOLLOWED, "the products that something follows are no others"
    graph.reset()
    graph.run()
    eager.reset()
    with eager.around():
        before = code.step_rounds.fused_launches()
        logits = eager.run()
        assert code.step_rounds.fused_launches() - before == FOLLOWED
    torch.cuda.synchronize()
    error = float((graph.keeps[1].float() - logits.float()).abs().max())
    assert error < 0.05 * float(logits.float().square().mean().sqrt())
    assert all((layer.add, layer.gate) == code.llama.APART for layer in model.layers)
    work.close()


def test_a_compiled_graph_holds_our_products(code: SimpleNamespace, model: Any) -> None:
    """Four of the layer that is compiled for all, and the head's, at most."""
    work = code.model_runs.Work(model, code.step_rounds.Step("decode", 8), context=64)
    variants = code.model_runs.VARIANTS
    theirs = code.model_runs.entry(work, "compiled_graph", variants["torch"])
    ours = code.model_runs.entry(work, "compiled_graph", variants["outblas"])
    assert theirs.products == {} and 0 < ours.products["compiled"] <= 5
    logits = []
    for entry in (theirs, ours):
        entry.reset()
        entry.run()
        torch.cuda.synchronize()
        logits.append(entry.keeps[1].float().clone())
    assert float((logits[0] - logits[1]).abs().max()) < 0.05 * float(logits[0].square().mean().sqrt())
    work.close()


@pytest.mark.parametrize("name", ["outblas", "outblas_fused", "outblas_pdl", "outblas_weights"])
def test_greedy_tokens_and_logits_are_within_rounding(code: SimpleNamespace, model: Any, name: str) -> None:
    reference = code.model_greedy.in_fp32(model)
    for batch in (1, 8):
        found = code.model_greedy.compared(model, reference, batch, 16, code.model_runs.VARIANTS[name], length=32)
        assert found["passed"], (code.model_greedy.line(found), found)


def test_linear_layers_of_the_library_are_ours(code: SimpleNamespace, model: Any) -> None:
    variants = ["torch", "outblas", "outblas_fused", "outblas_weights"]
    rows = code.model_explained.explained(model, code.step_rounds.Step("decode", 8), variants)
    by_shape = {row["mnk"]: row for row in rows}
    assert set(by_shape) == {"8_6144_4096", "8_4096_4096", "8_28672_4096", "8_4096_14336", "8_8192_4096"}
    assert "times" in by_shape["8_4096_4096"]["outblas_weights"]
    assert "torch" not in by_shape["8_4096_4096"]
    for mnk, row in by_shape.items():
        assert row["outblas_fused"].endswith("the sum is fused") == (mnk in ("8_4096_4096", "8_4096_14336")), row
        assert row["outblas_fused"].endswith("the gate is fused") == (mnk == "8_28672_4096"), row
