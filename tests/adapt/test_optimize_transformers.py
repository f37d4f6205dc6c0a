"""``outblas.optimize`` on transformers' own models, tiny and with random weights: Llama, Mistral, Qwen, Gemma, Phi."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")

import torch  # noqa: E402
import transformers  # noqa: E402

import outblas  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: F401  # noqa: E402
from support.models.decoder_blocks import counted, products  # noqa: E402
from support.served_fixture import Served, served_fixture  # noqa: F401  # noqa: E402

LAYERS = 2
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIZE = {"head_dim": 8}
QKV, GATE, O_SUM, DOWN_SUM = "q_proj, k_proj, v_proj", "silu(gate_proj) * up_proj", "o_proj", "down_proj"
TANH_GATE = "gelu_tanh(gate_proj) * up_proj"
#: Model -> its configuration, the merged and the fused layers of each block, and how many products a block saves.
MODELS: dict[str, tuple[str, dict[str, Any], set[str], set[str], int]] = {
    "llama": ("LlamaConfig", {}, {QKV}, {GATE, O_SUM, DOWN_SUM}, 2),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, {QKV}, {GATE, O_SUM, DOWN_SUM}, 2),
    "mistral": ("MistralConfig", {}, {QKV}, {GATE, O_SUM, DOWN_SUM}, 2),
    "qwen2": ("Qwen2Config", {}, {QKV}, {GATE, O_SUM, DOWN_SUM}, 2),
    "qwen3": ("Qwen3Config", SIZE, {QKV}, {GATE, O_SUM, DOWN_SUM}, 2),
    "gemma": ("GemmaConfig", SIZE, {QKV}, {TANH_GATE, O_SUM, DOWN_SUM}, 2),
    "gemma2": ("Gemma2Config", SIZE, {QKV}, {TANH_GATE}, 2),
    "gemma3": ("Gemma3TextConfig", SIZE, {QKV}, {TANH_GATE}, 2),
    "phi": ("PhiConfig", {}, {QKV}, {"gelu_tanh(fc1)", "fc2"}, 2),
    "phi3": ("Phi3Config", {}, set(), {O_SUM, DOWN_SUM}, 0),
}
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])


def model_of(name: str, dtype: Any = torch.bfloat16) -> Any:
    kind, changes, *_ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**TINY, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) / 4)  # biases and norms are not all alike
    return model


def entries(found: list[str]) -> set[str]:
    """Return what a report lists, without the names of layers and the words for sums."""
    return {text.split(": ")[1].removesuffix(" + residual") for text in found}


@pytest.mark.parametrize("name", MODELS)
def test_each_structure_is_found_and_computes_the_same(name: str) -> None:
    _, _, merged, fused, fewer = MODELS[name]
    model = model_of(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before, counts_before = counted(model, IDS)
    report = outblas.optimize(model)
    assert entries(report.merged) == merged and len(report.merged) == len(merged) * LAYERS
    assert entries(report.fused) == fused and len(report.fused) == len(fused) * LAYERS
    after, counts_after = counted(model, IDS)
    assert products(counts_before) - products(counts_after) == fewer * LAYERS
    torch.testing.assert_close(after.logits, before.logits, rtol=0.02, atol=0.02)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    outblas.restore(model)
    assert torch.equal(counted(model, IDS)[0].logits, before.logits)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_generation_gives_the_same_tokens(name: str) -> None:
    model = model_of(name, torch.float32)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    wanted = model.generate(IDS, **options)
    assert outblas.optimize(model).fused
    assert torch.equal(model.generate(IDS, **options), wanted)


def test_captured_states_and_attentions_are_those_of_the_model_before() -> None:
    model = model_of("llama", torch.float32)
    model.set_attn_implementation("eager")
    options = {"output_hidden_states": True, "output_attentions": True}
    wanted, _ = counted(model, IDS, **options)
    outblas.optimize(model)
    found, _ = counted(model, IDS, **options)
    for kind in ("hidden_states", "attentions"):
        torch.testing.assert_close(found[kind], wanted[kind], rtol=1e-5, atol=1e-5)


def test_activation_checkpoints_and_gradients_stay_as_they_were() -> None:
    model, plain = model_of("llama", torch.float32), model_of("llama", torch.float32)
    outblas.optimize(model)
    for one in (model, plain):
        (getattr(one, "activation_checkpointing_enable", None) or one.gradient_checkpointing_enable)()
        one.train()(IDS, labels=IDS).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_other_activations_are_left_apart() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, hidden_act="quick_gelu")
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(torch.bfloat16)
    before = counted(model, IDS)[0].logits
    report = outblas.optimize(model)
    assert entries(report.fused) == {O_SUM, DOWN_SUM}
    assert "a slice of a wider matrix" in report.left_alone["model.layers.0.mlp.gate_proj"]
    torch.testing.assert_close(counted(model, IDS)[0].logits, before, rtol=0.02, atol=0.02)


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    options = {"r": 2, "target_modules": ["q_proj", "v_proj", "o_proj"], "init_lora_weights": False}
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**options)).eval()


@pytest.mark.parametrize("first", ["adapter", "optimize"])
def test_adapters_of_low_rank_work_before_and_after(first: str) -> None:
    wanted = counted(lora(model_of("llama", torch.float32)), IDS)[0].logits
    model = model_of("llama", torch.float32)
    if first == "optimize":
        outblas.optimize(model)
    adapted = lora(model)
    if first == "adapter":
        report = outblas.optimize(adapted)
        assert "lora" in report.left_alone["base_model.model.model.layers.0.self_attn.q_proj"]
        assert not report.merged and entries(report.fused) == {DOWN_SUM}
    torch.testing.assert_close(counted(adapted, IDS)[0].logits, wanted, rtol=1e-4, atol=1e-4)
    adapted.train()(IDS, labels=IDS).loss.backward()
    gradients = [p.grad.abs().sum() for name, p in adapted.named_parameters() if "lora_" in name]
    assert len(gradients) == 6 * LAYERS and all(one > 0 for one in gradients)


def test_a_served_device_runs_every_fusion_as_one_kernel(
    served: Served, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama", torch.float16)
    before = counted(model, IDS)[0].logits
    outblas.optimize(model)
    ready = host.kernel_ready
    monkeypatch.setattr(host, "kernel_ready", lambda *given: ready(*given[:3], True, *given[4:]))  # wait for compilers
    with torch.no_grad():
        after = model(IDS).logits
    assert host.launched == 3 * LAYERS, "a gate and two sums in each layer"
    assert len(served.ran) == LAYERS, "and the merged product of each"
    torch.testing.assert_close(after, before, rtol=0.02, atol=0.02)


def test_an_optimised_model_is_saved_as_it_was(tmp_path: Path) -> None:
    model = model_of("qwen2")
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    outblas.optimize(model)
    place = model.model.layers[0].mlp.gate_proj.weight.data_ptr()
    model.save_pretrained(tmp_path / "whole")
    copy.deepcopy(model).save_pretrained(tmp_path / "copy")
    model.save_pretrained(tmp_path / "given", state_dict=model.state_dict())
    model.model.save_pretrained(tmp_path / "part")
    torch.save(model, tmp_path / "pickled")
    pickled = torch.load(tmp_path / "pickled", weights_only=False)
    outblas.optimize(pickled)
    pickled.save_pretrained(tmp_path / "again")
    for name in ("whole", "copy", "given", "again"):
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).state_dict()
        assert list(saved) == list(wanted) and all(torch.equal(value, wanted[key]) for key, value in saved.items())
    assert (tmp_path / "part" / "model.safetensors").is_file()
    assert model.model.layers[0].mlp.gate_proj.weight.data_ptr() == place, "the model itself stays optimised"
    outblas.restore(model)
    assert "save_pretrained" not in model.__dict__ and "save_pretrained" not in model.model.__dict__
