"""examples/llama.py on a CPU: what its decoder computes, by which kernels, and what it fuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the example is of torch")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import outblas  # noqa: E402
from outblas.core.errors import CompileError, UsageError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import fused  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: F401  # noqa: E402
from support.model_steps_fixture import (  # noqa: F401  # noqa: E402
    FOLLOWED,
    LAYERS,
    LAYERS_OF_EACH,
    LINEAR,
    PRODUCTS,
    TINY,
    code_fixture,
    model_fixture,
    ours_fixture,
)
from support.operator_counts import OperatorCounts  # noqa: E402
from support.served_fixture import ANY, Everything, Served, served_fixture  # noqa: F401  # noqa: E402


def test_the_example_runs_and_says_what_it_did(
    code: SimpleNamespace, ours: Served, host: fused.FusedState, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tiny", "--layers", "1", "--batch", "1", "--prompt", "4", "--new-tokens", "3"]
    code.llama.main([*sizes, "--no-outblas"])
    assert not ours.ran
    try:
        code.llama.main(sizes)
    finally:
        outblas.disable()
    assert len(ours.ran) == 5 * 5, "five products, of two and of three tokens"
    try:
        code.llama.main([*sizes, "--fused"])
    finally:
        outblas.disable()
    assert len(ours.ran) == 5 * 5 + 5 * 2, "the other three are fused, and compiled before they are first called"
    assert host.launched == 5 * 3 + 2 * 3, "and run once where they are warmed"
    assert capsys.readouterr().out.count("tokens/s on") == 3
    with pytest.raises(SystemExit):
        code.llama.main([*sizes, "--fused", "--no-outblas"])


@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 32}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}]
)
def test_the_decoder_computes_what_transformers_model_does(code: SimpleNamespace, changes: dict[str, Any]) -> None:
    config = code.llama.llama3_8b(LAYERS, **TINY, **changes)
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for name, weight in theirs.named_parameters():
        weight.uniform_(0.5, 1.5) if "norm" in name else weight.mul_(5)
    ours = code.llama.from_transformers(theirs)
    ids = torch.randint(128, (3, 12))
    expected, cache = theirs(ids).logits, code.llama.Cache(ours, 3, 12)
    found = [ours(ids[:, :7], cache, last=7)]  # a prompt, and tokens one by one
    found += [ours(ids[:, place : place + 1], cache) for place in range(7, 12)]
    assert cache.filled == 12 and expected.abs().max() > 1
    assert torch.allclose(torch.cat(found, 1), expected, atol=1e-4)
    assert torch.equal(ours(ids[:, :3], code.llama.Cache(ours, 3, 12)), ours(ids[:, :3], code.llama.Cache(ours, 3, 3)))
    shapes = {tuple(each.weight.shape) for each in ours.modules() if type(each) is torch.nn.Linear}
    heads = 4 * config.head_dim
    assert shapes == {(2 * heads, 64), (64, heads), (192, 64), (64, 96), (128, 64)}


@pytest.mark.parametrize("kind, size", [("decode", 3), ("prefill", 5)])
def test_a_step_is_few_kernels_and_only_linear_layers_multiply(
    kind: str, size: int, code: SimpleNamespace, model: Any
) -> None:
    work = code.model_runs.Work(model, code.step_rounds.Step(kind, size), context=6)
    with OperatorCounts() as called:
        work.run()
    found = called.counts
    products = {name: found[name] for name in ("mm", "addmm", "bmm", "baddbmm") if found[name]}
    assert products == {"mm": PRODUCTS}
    attention = [name for name in found if "dot_product" in name]
    assert len(attention) == 1 and "flash" in attention[0] and found[attention[0]] == LAYERS
    each = {"flip": 1, "mul_": 1, "addcmul_": 1, "copy_": 1, "silu": 1}
    assert {name: found[name] / LAYERS for name in each} == each
    assert not {"cat", "clone", "index_copy_", "expand", "repeat"} & set(found)


@pytest.mark.parametrize("ids, filled", [((2, 3), 2), ((2, 7), 0), ((2, 1), 6)])
def test_a_cache_takes_no_more_than_it_holds(
    ids: tuple[int, int], filled: int, code: SimpleNamespace, model: Any
) -> None:
    cache = code.llama.Cache(model, 2, 6)
    cache.filled = filled
    with pytest.raises(UsageError, match="behind 2|expected at most 6"):
        model(torch.zeros(ids, dtype=torch.int64), cache)
    assert cache.filled == filled


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}, {"rope_parameters": LINEAR}]
)
def test_what_the_decoder_does_not_compute_is_refused(code: SimpleNamespace, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="plain rotary embeddings, SiLU and no bias"):
        code.llama.random_model(code.llama.llama3_8b(1, **TINY, **changes), "cpu")


def test_a_cache_is_within_the_positions_of_the_model(code: SimpleNamespace) -> None:
    model = code.llama.random_model(code.llama.llama3_8b(1, **TINY, max_position_embeddings=8), "cpu")
    with pytest.raises(UsageError, match="at most 8"):
        code.llama.Cache(model, 1, 9)


@pytest.mark.parametrize("kind, size", [("decode", 3), ("prefill", 5)])
def test_sums_and_gates_are_torchs_operations_without_a_kernel(
    kind: str, size: int, code: SimpleNamespace, model: Any
) -> None:
    """Without a GPU a product and a sum, bit for bit; by the kernel's roundings the same up to these."""
    work = code.model_runs.Work(model, code.step_rounds.Step(kind, size), context=6)
    expected = work.run()
    model.follow_by(code.llama.FUSED)
    work.reset()
    with OperatorCounts() as called:
        found = work.run()
    assert torch.equal(found, expected) and called.counts["mm"] == PRODUCTS


def test_fused_sums_and_gates_are_rounded_once(code: SimpleNamespace, model: Any, host: fused.FusedState) -> None:
    work = code.model_runs.Work(model, code.step_rounds.Step("decode", 3), context=6)
    expected, wide = work.run(), code.model_greedy.in_fp32(model)
    code.model_runs.compile_fused(model, work.step.shape)
    launched = host.launched
    work.reset()
    with code.model_runs.followed(model, code.llama.FUSED):
        found = work.run()
    assert host.launched - launched == FOLLOWED
    assert not torch.equal(found, expected) and torch.allclose(found, expected, atol=0.01)
    assert {(each.add, each.gate) for each in (*model.layers, *wide.layers)} == {tuple(code.llama.APART)}
    again = code.model_greedy.in_fp32(model)
    assert all(each.gated == {3} and each.interleaved is not None for each in model.layers)
    assert all(not each.gated and each.interleaved is None for each in again.layers), "no copy of a copy"


@pytest.mark.parametrize("refused", ["shape", "kernel"])
def test_what_is_not_fused_is_told(
    refused: str, code: SimpleNamespace, model: Any, ours: Served, host: fused.FusedState, monkeypatch: Any
) -> None:
    """No kernel can be fused for the shapes of O, of gate and of up, or none compiles.

    OutBLAS still computes the products: those of O and down by outblas.linear, which does not count them.
    """

    def refuse(*_: Any) -> Any:
        raise CompileError("it spills", "less", "use another")

    work = code.model_runs.Work(model, code.step_rounds.Step("decode", 3), context=6)
    variant, sums = code.model_runs.VARIANTS["outblas_fused"], 2 * LAYERS
    if refused == "kernel":
        host.kernels._find = refuse
        with pytest.warns(RuntimeWarning, match="uses another kernel or torch: .* it spills"):
            entry = code.model_runs.entry(work, "eager", variant)
    else:
        monkeypatch.setattr(fused, "why_not_fused", lambda problem, *_: "too short" if problem.k == 64 else None)
        entry = code.model_runs.entry(work, "eager", variant)
    fused_now = LAYERS if refused == "shape" else 0
    expected = {"fused": fused_now, "unfused": FOLLOWED - fused_now}
    assert entry.products == {"ours": PRODUCTS - sums, "torchs": 0, **expected}


def test_what_is_fused_is_compiled_before_the_first_step_that_counts(
    code: SimpleNamespace, model: Any, ours: Served, host: fused.FusedState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused kernels of all shapes of greedy decoding are compiled before; no step starts a compiler."""
    waited: list[bool] = []
    ready = host.kernel_ready

    def recorded(problem: Problem, config: Any, epilogue: Any, wait: bool = False, capturing: bool = False) -> bool:
        found = ready(problem, config, epilogue, wait, capturing)
        waited.append(wait)
        assert found
        return found

    monkeypatch.setattr(host, "kernel_ready", recorded)
    prompt, variant = torch.zeros((2, 5), dtype=torch.int64), code.model_runs.VARIANTS["outblas_fused"]
    code.model_greedy.decoded(model, prompt, 3, variant)
    assert waited == [True, False] * (2 * FOLLOWED) + [False] * (3 * FOLLOWED)
