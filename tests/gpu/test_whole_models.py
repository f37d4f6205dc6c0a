"""Two layers of transformers' models on a GPU: every variant's graph, its memory and errors, and a result file."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")

import torch  # noqa: E402
from transformer.whole_model_file import FORMAT  # noqa: E402

import outblas  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 2


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    if gpu_of_device(0).name != "h200":
        pytest.skip("the packaged library is of an H200")
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", "OUTBLAS_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "transformer"))
    parts = ("errors", "measure", "runs", "weights")
    modules = {name: importlib.import_module(f"whole_model_{name}") for name in parts}
    yield SimpleNamespace(
        command=importlib.import_module("whole_models"), rounds=importlib.import_module("step_rounds"), **modules
    )
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert not outblas.enabled()


def weights_of(code: SimpleNamespace, name: str) -> Any:
    config = code.weights.MODELS[name].configuration(LAYERS, tiny=False)
    return code.weights.ModelWeights(code.weights.random_model(config, torch.device("cuda")))


@pytest.mark.parametrize("name", ["llama_8b", "qwen_7b"])
@pytest.mark.parametrize("step", ["decode_8", "decode_13", "prefill_500"])
def test_every_variant_computes_the_step(name: str, step: str, code: SimpleNamespace) -> None:
    weights = weights_of(code, name)
    names = [name for name, variant in code.runs.VARIANTS.items() if not variant.compiled]
    found, left_out = code.measure.measure(weights, code.rounds.Step.parse(step), names, 5, 64)
    assert not left_out and set(found) == set(names)
    torchs = found["torch"]["logits"]
    assert torchs["rms"] > 10 * torchs["mean"] > 0
    assert found.pop("without_products")["us"][0] < found["torch"]["us"][0]
    for each in found.values():
        assert each["logits"]["mean"] <= 1.25 * torchs["mean"] and each["logits"]["largest"] <= 2 * torchs["largest"]
        assert each["peak_bytes"] > each["weight_bytes"] == found["torch"]["weight_bytes"]
    for each in ("enable", "enable_pdl", "batch_invariant", "optimize"):
        assert set(found[each]["startup_s"]) == {"prepare", "first runs", "capture"}
        assert found[each]["products"]["ours"] + found[each]["products"]["torchs"] > 0
    assert found["enable"]["products"]["ours"] > 0 or step == "prefill_500"
    assert found["optimize"]["products"]["fused"] > 0 or step == "prefill_500"
    assert found["batch_invariant"]["products"]["torchs"] == 1, "only the product of the rotary positions is in fp32"


def test_a_graph_repeats_what_an_eager_step_computes(code: SimpleNamespace) -> None:
    """Also at later positions, which a replay reads from the cache's length."""
    weights = weights_of(code, "llama_8b")
    work = code.runs.WholeStep(weights.get("plain"), code.rounds.Step.parse("decode_3"), context=32, places=5)
    graph, eager = (
        code.runs.get_ready(work, weights.get("plain"), code.runs.VARIANTS[name]) for name in ("torch", "eager")
    )
    first = work.logits(graph)
    assert torch.equal(first, work.logits(graph)), "a replay repeats itself"
    torch.testing.assert_close(first, work.logits(eager), rtol=0.05, atol=0.1)
    assert graph.extra_bytes > 0
    work.close()


def test_compiled_steps_are_captured(code: SimpleNamespace) -> None:
    weights, step = weights_of(code, "llama_8b"), code.rounds.Step.parse("decode_8")
    names = ["torch", "compile", "compile_enable", "compile_optimize"]
    found, left_out = code.measure.measure(weights, step, names, 5, 64, {"mode": "default"})
    assert not left_out, left_out
    assert found["compile_enable"]["products"]["compiled"] > 0
    assert found["compile_optimize"]["products"]["fused"] > 0
    for name in names[1:]:
        assert found[name]["logits"]["mean"] <= 1.25 * found["torch"]["logits"]["mean"]


def test_the_command_writes_a_result_file(code: SimpleNamespace, tmp_path: Path) -> None:
    out = tmp_path / "whole_models.json"
    arguments = ["--models", "qwen_7b", "--layers", "1", "--steps", "decode_8", "--context", "64", "--rounds", "5"]
    arguments += ["--variants", "optimize", "--out", str(out)]
    assert code.command.main(arguments) == 0
    data = json.loads(out.read_text())
    assert data["format"] == FORMAT and data["settings"]["gpu"]
    assert set(data["rows"][0]["variants"]) == {"torch", "merged_norms", "optimize"} and len(data["bars"]) == 2


class Block(torch.nn.Module):
    """A gate of one input, and two layers that are split into heads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.q, self.k = (torch.nn.Linear(2048, 2048, bias=False) for _ in range(5))

    def forward(self, x: Any) -> Any:
        x = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return self.q(x).view(x.shape[0], -1, 128), self.k(x).view(x.shape[0], -1, 128)


def test_graphs_replay_the_same_after_weights_have_moved(code: SimpleNamespace) -> None:
    """A graph of the plain block outlives optimize; one of the optimised block outlives restore."""
    torch.manual_seed(0)
    block = Block().to("cuda", torch.bfloat16).eval()
    x, graphs, results = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16), [], []

    def replayed() -> list[Any]:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        return [result.clone() for pair in results for result in pair]

    def captured() -> None:
        for _ in range(3):
            block(x)
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append(block(x))

    with outblas.use() as on, torch.no_grad():
        assert on
        captured()
        report = outblas.optimize(block)
        assert report.fused
        captured()
        wanted = replayed()
    assert all(one.isfinite().all() and one.abs().max() > 0 for one in wanted)
    outblas.restore(block)
    junk = [torch.full((rows, 2048), torch.nan, device="cuda", dtype=torch.bfloat16) for rows in (2048, 4096) * 8]
    assert all(map(torch.equal, replayed(), wanted))
    del junk
