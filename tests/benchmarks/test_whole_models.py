"""benchmarks/transformer/whole_models.py on a CPU: tiny models, arrangements, errors, variants and resumed runs."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")

import torch  # noqa: E402

from outblas.core.errors import RecordError, UsageError  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: F401  # noqa: E402
from support.helpers import ROOT  # noqa: E402
from support.model_steps_fixture import ours_fixture  # noqa: F401  # noqa: E402
from support.served_fixture import Served, served_fixture  # noqa: F401  # noqa: E402

LAYERS = 2
#: Linear layers of a tiny model: q, k, v, o, gate, up, down; the head.
PRODUCTS = 7 * LAYERS + 1
CPU = torch.device("cpu")
OURS = ["enable", "enable_pdl", "enable_torch_bias", "batch_invariant", "optimize"]


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "transformer"))
    parts = ("errors", "file", "measure", "runs", "weights")
    modules = {name: importlib.import_module(f"whole_model_{name}") for name in parts}
    return SimpleNamespace(
        command=importlib.import_module("whole_models"), rounds=importlib.import_module("step_rounds"), **modules
    )


def tiny(code: SimpleNamespace, name: str, dtype: Any = torch.bfloat16, layers: int = LAYERS) -> Any:
    return code.weights.random_model(code.weights.MODELS[name].configuration(layers, tiny=True), CPU, dtype)


def logits_of(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(10).view(2, 5), use_cache=False).logits


@pytest.mark.parametrize("name", ["llama_8b", "qwen_7b"])
def test_models_have_the_published_shapes(name: str, code: SimpleNamespace) -> None:
    whole = code.weights.MODELS[name].configuration(None, tiny=False)
    assert (whole.hidden_size, whole.num_hidden_layers) == {"llama_8b": (4096, 32), "qwen_7b": (3584, 28)}[name]
    assert code.weights.MODELS[name].configuration(8, tiny=False).num_hidden_layers == 8
    biases = [each for key, each in tiny(code, name).named_parameters() if key.endswith("bias")]
    assert len(biases) == (3 * LAYERS if name == "qwen_7b" else 0) and all(each.any() for each in biases)


@pytest.mark.parametrize("name", ["llama_8b", "qwen_7b"])
def test_arrangements_compute_the_same_and_share_what_they_can(name: str, code: SimpleNamespace) -> None:
    plain = tiny(code, name)
    before = logits_of(plain)
    weights = code.weights.ModelWeights(plain)
    size = code.weights.tensor_bytes(plain.parameters())
    models = [weights.get(each) for each in ("plain", "merged", "optimised")]
    for model in models[1:]:
        torch.testing.assert_close(logits_of(model), before, rtol=0.02, atol=0.005)
        assert code.weights.tensor_bytes(model.parameters()) == size
    assert torch.equal(logits_of(plain), before), "a copy changes nothing of the first"
    groups = sum(each.numel() * 2 for model in models[1:2] for each in merged_parameters(code, model))
    together = code.weights.tensor_bytes(each for model in models for each in model.parameters())
    assert together == size + 2 * groups and weights.get("merged") is models[1]
    assert weights.report.count("q_proj, k_proj, v_proj") == 1 and weights.seconds["optimised"] > 0


def merged_parameters(code: SimpleNamespace, model: Any) -> list[Any]:
    layers = [each for each in model.modules() if isinstance(each, code.weights.MergedLinear)]
    assert len(layers) == 2 * LAYERS
    return [parameter for layer in layers for parameter in layer.parameters()]


def test_the_reference_has_the_same_weights_in_fp32(code: SimpleNamespace) -> None:
    model = tiny(code, "qwen_7b")
    pointers = [each.data_ptr() for each in model.parameters()]
    wide = code.errors.in_fp32(model)
    sequences = torch.arange(12).view(2, 6)
    found = code.errors.reference_logits(wide, sequences, 4)
    with torch.no_grad():
        expected = copy.deepcopy(model).float()(input_ids=sequences).logits[:, -4:]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert [each.data_ptr() for each in model.parameters()] == pointers
    assert [each.data_ptr() for each in wide.parameters()] == pointers, "no weight stays up-cast"


def test_errors_of_logits(code: SimpleNamespace) -> None:
    reference = torch.tensor([[[1.0, 3.0], [2.0, -2.0]]])
    found = code.errors.logit_errors(reference + torch.tensor([[[0.0, 0.5], [-1.5, 3.0]]]), reference)
    assert found == {"largest": 3.0, "mean": 1.25, "agree": 0.5, "places": 2, "rms": pytest.approx(4.5**0.5)}
    reference[0, 0, 0] = float("nan")
    assert code.errors.logit_errors(torch.zeros(1, 2, 2), reference)["largest"] != 0
    with pytest.raises(ArithmeticError, match="not finite"):
        code.measure._finite(code.errors.logit_errors(torch.zeros(1, 2, 2), reference))


@pytest.mark.parametrize("step", ["decode_3", "decode_9", "prefill_7"])
def test_a_step_continues_what_was_really_prefilled(step: str, code: SimpleNamespace) -> None:
    """In fp32 nothing is left of an error, so cache, positions and tokens are those of whole sequences."""
    model = tiny(code, "llama_8b", torch.float32)
    work = code.runs.WholeStep(model, code.rounds.Step.parse(step), context=6, places=4)
    reference = code.errors.reference_logits(model, *work.sequences())
    sequences, places = {"decode_3": (3, 4), "decode_9": (8, 4), "prefill_7": (8, 1)}[step]
    assert reference.shape == (sequences, places, 128)
    ready = code.runs.get_ready(work, model, code.runs.VARIANTS["torch"])
    for _ in range(2):  # the first leaves nothing behind
        found = code.errors.logit_errors(work.logits(ready), reference)
        assert found["largest"] < 1e-4 and found["agree"] == 1
    assert work.cache_bytes == 2 * LAYERS * work.step.shape[0] * 2 * 16 * 4 * (10 if work.begin else 7)
    work.close()


@pytest.mark.parametrize("step", ["decode_3", "prefill_6"])
def test_all_variants_run_the_same_step(
    step: str, code: SimpleNamespace, ours: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code.measure, "PLACES", 3)
    weights = code.weights.ModelWeights(tiny(code, "llama_8b"))
    names = [name for name, variant in code.runs.VARIANTS.items() if not variant.compiled]
    found, left_out = code.measure.measure(weights, code.rounds.Step.parse(step), names, 3, 4)
    assert list(found) == sorted(names, key=lambda name: name == "eager") and not left_out
    assert found["without_products"]["logits"] is None
    for name, each in found.items():
        if name != "without_products":
            assert each["logits"]["largest"] < 0.05 * max(1, each["logits"]["rms"]), name
        assert each["tokens_per_s"] > 0 and each["peak_bytes"] > each["weight_bytes"]
        assert ("speedup" in each) == (name != "torch") and bool(each["products"]) == (name in OURS)
    assert found["enable"]["products"] == {"ours": PRODUCTS, "torchs": 0, "fused": 0}
    # Merged products call OutBLAS by name; gate and up, and two sums, are in fused kernels. The head remains.
    assert found["optimize"]["products"] == {"ours": 1, "torchs": 0, "fused": 3 * LAYERS}
    assert found["optimize"]["speedup_over_merged"][0] > 0 and ours.ran


def test_a_step_without_products_computes_all_else(code: SimpleNamespace) -> None:
    left, weight = torch.ones(2, 3, 8), torch.ones(5, 8)
    product = torch.nn.functional.linear
    with code.runs.VARIANTS["without_products"].active():
        outputs = [product(left, weight), torch.nn.Linear(8, 5, dtype=torch.bfloat16)(left.bfloat16())]
        assert torch.equal(left + 1, 2 * left), "other operations are computed"
    assert [(o.shape, o.dtype) for o in outputs] == [((2, 3, 5), torch.float32), ((2, 3, 5), torch.bfloat16)]
    assert torch.equal(product(left, weight), torch.full((2, 3, 5), 8.0)), "products are back"


def test_a_compiled_step_is_the_same_step(code: SimpleNamespace) -> None:
    model = code.weights.random_model(code.weights.MODELS["qwen_7b"].configuration(1, tiny=True), CPU, torch.float32)
    work = code.runs.WholeStep(model, code.rounds.Step.parse("decode_2"), context=4, places=3)
    expected = work.logits(code.runs.get_ready(work, model, code.runs.VARIANTS["torch"]))
    ready = code.runs.get_ready(work, model, code.runs.VARIANTS["default"], {"backend": "eager"})
    with code.rounds.no_recompilation():
        torch.testing.assert_close(work.logits(ready), expected)
    work.close()


@pytest.mark.parametrize(
    ("model", "names", "shared"),
    [("llama_8b", ["torch", "compile", "compile_optimize"], True), ("qwen_7b", ["torch", "compile_enable"], False)],
)
def test_a_compiled_step_holds_our_products(
    model: str, names: list[str], shared: bool, code: SimpleNamespace, ours: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant takes seconds to compile, so each is with one model alone: that with biases in each layer, or not.

    With one cache for both, the second variant still has its own products.
    """
    monkeypatch.setattr(code.measure, "PLACES", 3)
    weights, step = code.weights.ModelWeights(tiny(code, model, layers=1)), code.rounds.Step.parse("decode_2")
    found, left_out = code.measure.measure(weights, step, names, 3, 4, {"backend": "inductor"}, shared)
    assert list(found) == names and not left_out
    products = {name: each["products"] for name, each in found.items()}
    assert [name for name in names if found[name].get("shares_cache")] == names[2:]
    if model == "qwen_7b":  # the q, k and v of its layer have biases, and engines capture two rows
        assert products["compile_enable"]["compiled"] == 7 + 1
    else:
        # Of its layer: q, k and v; o; gate and up; down. And the head.
        optimised = products["compile_optimize"]
        assert not products["compile"], "it shares no code with the others"
        assert (optimised["compiled"], optimised["fused"]) == (4 + 1, 1)
        assert [name for name in names if "speedup_over_compile" in found[name]] == ["compile_optimize"]
    for name in names[1:]:
        assert found[name]["logits"]["largest"] < 0.05 * max(1, found[name]["logits"]["rms"])


@pytest.mark.parametrize(("mode", "options"), [("compile", {"mode": "max-autotune-no-cudagraphs"}), ("default", {})])
def test_each_mode_of_torch_compile_has_its_options_and_its_rival(
    mode: str, options: dict[str, Any], code: SimpleNamespace, ours: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(code.measure, "PLACES", 3)
    monkeypatch.setattr(code.runs, "compiled", lambda model, given: (asked.append(given), model)[1])
    names, step = [f"{mode}_enable", f"{mode}_optimize"], code.rounds.Step.parse("decode_2")
    variants, weights = code.command.with_rivals(names), code.weights.ModelWeights(tiny(code, "llama_8b"))
    found, left_out = code.measure.measure(weights, step, variants, 3, 4)
    assert variants == ["torch", mode, *names] and asked == [options] * 3 and not left_out
    assert [name for name, each in found.items() if f"speedup_over_{mode}" in each] == names


def test_a_variant_that_cannot_run_is_left_out(code: SimpleNamespace) -> None:
    weights = code.weights.ModelWeights(tiny(code, "llama_8b"))
    step = code.rounds.Step.parse("decode_2")
    options = {"backend": "no such backend"}
    found, left_out = code.measure.measure(weights, step, ["torch", "compile"], 3, 4, options)
    assert list(found) == ["torch"] and "no such backend" in left_out["compile"]


@pytest.fixture
def measured(code: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The (step, context, variants) that were measured, in order; figures are invented. ``stop`` interrupts."""
    calls: list[Any] = []

    def measure(weights: Any, step: Any, names: Any, rounds: int, context: int, *_: Any) -> Any:
        if calls[-1:] == ["stop"]:
            raise KeyboardInterrupt
        calls.append((step.name, context, list(names)))
        figures = {"us": [float(len(calls)), 1.0, 2.0], "speedup": [1.2, 1.1, 1.3], "startup_s": {}, "products": {}}
        figures["speedup_over_merged"] = [1.04, 1.0, 1.1]
        kept = {name: dict(figures) for name in names if name != "compile"}
        return kept, dict.fromkeys({"compile"} & set(names), "no compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(code.command, "measure", measure)
    return calls


def command(code: SimpleNamespace, out: Path, *arguments: str) -> Any:
    common = ["--hidden", "tiny", "--layers", "1", "--models", "llama_8b", "--context", "512", "--out", str(out)]
    return code.command.main([*common, *arguments])


def test_an_interrupted_run_resumes(
    code: SimpleNamespace, measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, steps = tmp_path / "w.json", ("--steps", "decode_2,prefill_4", "--variants", "eager,compile")
    with pytest.raises(KeyboardInterrupt):
        interrupted_after_a_step(code, measured, out, *steps)
    assert [row["step"] for row in json.loads(out.read_text())["rows"]] == ["decode_2"]
    measured.clear()
    assert command(code, out, *steps) == 0
    assert measured == [("decode_2", 512, ["torch", "compile"]), ("prefill_4", 0, ["torch", "eager", "compile"])]
    data = json.loads(out.read_text())
    assert data["rows"][0]["variants"]["torch"]["us"][0] == 1, "figures that are there stay"
    assert data["rows"][0]["left_out"] == {"compile": "no compiler"} and len(data["rows"][0]["provenance"]) == 2
    measured.clear()
    assert command(code, out, *steps[:2], "--variants", "eager") == 0
    assert not measured and "has every step" in capsys.readouterr().out
    assert command(code, out, *steps, "--context", "9,512") == 0
    assert ("decode_2", 9, ["torch", "eager", "compile"]) in measured, "a further context is measured, too"
    assert [(row["step"], row["context"]) for row in json.loads(out.read_text())["rows"]] == [
        ("decode_2", 512),
        ("prefill_4", 0),
        ("decode_2", 9),
    ]


def interrupted_after_a_step(code: SimpleNamespace, measured: list[Any], out: Path, *arguments: str) -> None:
    add = code.file.WholeModelsFile.add

    def then_stop(file: Any, *row: Any) -> None:
        add(file, *row)
        measured.append("stop")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(code.file.WholeModelsFile, "add", then_stop)
        command(code, out, *arguments)


def test_rivals_are_measured_with_what_is_asked_for(
    code: SimpleNamespace, measured: list[Any], ours: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(code, tmp_path / "w.json", "--steps", "decode_2", "--variants", "optimize") == 0
    assert measured == [("decode_2", 512, ["torch", "merged_norms", "optimize"])]
    data = json.loads((tmp_path / "w.json").read_text())
    assert set(data["models"]["llama_8b"]["startup_s"]["optimize"]) == {"arrange", "enable", "tune"}
    assert [(bar["figure"], bar["passed"]) for bar in data["bars"]] == [
        ("speedup", True),
        ("speedup_over_merged", False),
    ]
    assert "llama_8b 512 optimize speedup_over_merged: 1.040 of 1.05, NOT cleared" in capsys.readouterr().out


def test_tuning_comes_first_and_once(
    code: SimpleNamespace, measured: list[Any], ours: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    report = SimpleNamespace(notes=["tuned"])
    monkeypatch.setenv("OUTBLAS_LIBRARY", "")
    prepare = lambda model, m, tune_seconds: (asked.append((m, tune_seconds, len(measured))), report)[1]  # noqa: E731
    monkeypatch.setattr(code.command.outblas, "prepare", prepare)
    arguments = ("--steps", "decode_2,prefill_4", "--variants", "enable,optimize", "--tune", "9")
    for _ in range(2):
        assert command(code, tmp_path / "w.json", *arguments) == 0
    assert asked == [([2, 4], 9, 0)] * 2, "for each arrangement, before all steps"
    assert command(code, tmp_path / "w.json", "--steps", "decode_3,decode_2", *arguments[2:]) == 0
    assert asked[2:] == [([3], 9, 2)] * 2, "only the tokens of the new step"
    assert code.command.os.environ["OUTBLAS_LIBRARY"] == str(tmp_path / "w_tuned")


def test_what_cannot_be_measured_is_refused_in_a_line(
    code: SimpleNamespace, measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, steps = tmp_path / "w.json", ("--steps", "decode_2", "--variants", "torch")
    assert command(code, out, *steps) == 0
    assert command(code, out, *steps, "--rounds", "99") == 2
    assert "has rounds 30, not 99" in capsys.readouterr().err
    assert command(code, out, "--hidden", "full") == 2 and "no CUDA GPU" in capsys.readouterr().err
    for text in ("[]", "{", '{"format": "another"}', '{"format": "outblas-whole-models-2"}'):
        out.write_text(text)
        with pytest.raises(RecordError):
            code.file.WholeModelsFile(out, {})
    with pytest.raises(UsageError, match="decode_BATCH"):
        code.rounds.Step.parse("decode_0")


def test_files_of_several_gpus_are_joined(
    code: SimpleNamespace, measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, both = (tmp_path / f"{name}.json" for name in ("first", "second", "both"))
    assert command(code, first, "--steps", "prefill_4", "--variants", "eager") == 0
    assert command(code, second, "--steps", "prefill_4", "--variants", "eager", "--models", "qwen_7b") == 0
    assert code.command.main(["--out", str(both), "--join", str(first), str(second)]) == 0
    data, parts = json.loads(both.read_text()), [json.loads(path.read_text()) for path in (first, second)]
    assert list(data["models"]) == ["llama_8b", "qwen_7b"] and data["rows"] == parts[0]["rows"] + parts[1]["rows"]
    assert data["settings"] == parts[0]["settings"]
    assert code.command.main(["--out", str(both), "--join", str(first)]) == 2
    assert "first.json adds nothing to" in capsys.readouterr().err
    other = ("--steps", "prefill_4", "--variants", "eager", "--rounds", "99")
    assert command(code, tmp_path / "third.json", *other) == 0
    assert code.command.main(["--out", str(first), "--join", str(tmp_path / "third.json")]) == 2
    assert "has rounds 99, not 30" in capsys.readouterr().err and json.loads(first.read_text()) == parts[0]


def test_a_file_of_further_variants_is_joined(code: SimpleNamespace, measured: list[Any], tmp_path: Path) -> None:
    first, second, both = (tmp_path / f"{name}.json" for name in ("first", "second", "both"))
    assert command(code, first, "--steps", "prefill_4", "--variants", "eager", "--models", "llama_8b,qwen_7b") == 0
    assert command(code, second, "--steps", "prefill_4,decode_2", "--variants", "merged") == 0
    before = json.loads(first.read_text())
    join = ["--out", str(both), "--join", str(first), str(second), "--models", "llama_8b"]
    assert code.command.main(join) == 0
    data, more = json.loads(both.read_text()), json.loads(second.read_text())
    old, new = before["rows"][0], more["rows"][0]
    assert list(data["models"]) == ["llama_8b"], "qwen_7b was not asked for"
    assert data["rows"][0]["variants"] == {**new["variants"], **old["variants"]}, "known figures stay"
    assert data["rows"][0]["provenance"] == old["provenance"] + new["provenance"]
    assert data["rows"][1:] == more["rows"][1:] and "merged" in data["models"]["llama_8b"]["startup_s"]


def test_bars_are_of_a_models_measured_steps(code: SimpleNamespace) -> None:
    def row(model: str, step: str, context: int, enable: float) -> dict[str, Any]:
        figures = {"enable": {"speedup": [enable, 1.0, 2.0]}}
        return {"model": model, "step": step, "context": context, "variants": figures}

    rows = [row("a", "decode_1", 64, 1.2), row("a", "prefill_500", 0, 0.98), row("b", "decode_1", 64, 1.05)]
    first, longer, second = code.file.bars([*rows, row("a", "decode_1", 512, 1.1)])
    assert first["geomean"] == pytest.approx((1.2 * 0.98) ** 0.5) and first["slower"] == ["prefill_500"]
    assert longer["geomean"] == pytest.approx((1.1 * 0.98) ** 0.5) and (first["context"], longer["context"]) == (
        64,
        512,
    )
    assert not first["passed"] and second["passed"] and second["steps"] == 1
