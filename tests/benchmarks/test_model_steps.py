"""benchmarks/transformer on a CPU: the timed, tuned, explained and compared parts of a tiny model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the example is of torch")
pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[examples]'")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.errors import DeviceError  # noqa: E402
from outblas.dispatch import enable, linear  # noqa: E402
from outblas.records.captured_products import CapturedProducts  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.records.user_library import LIBRARY_VARIABLE  # noqa: E402
from outblas.tune.tune_run import RunFiles  # noqa: E402
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
from support.served_fixture import ANY, Everything, Served, served_fixture  # noqa: F401  # noqa: E402


@pytest.mark.parametrize("kind, size", [("decode", 3), ("prefill", 5)])
def test_every_variant_computes_the_same_step(
    kind: str, size: int, code: SimpleNamespace, model: Any, ours: Served
) -> None:
    work = code.model_runs.Work(model, code.step_rounds.Step(kind, size), context=6)
    found = {}
    for mode in ("eager", "compiled"):
        for name, variant in code.model_runs.VARIANTS.items():
            if mode == "compiled" and not variant.compiles:
                continue
            before = len(ours.ran)
            entry = code.model_runs.entry(work, mode, variant, backend="eager")
            calls = code.step_rounds.WARM_UPS + 1 + variant.fused
            apart = PRODUCTS - FOLLOWED * variant.fused
            assert len(ours.ran) - before == (calls * apart if variant.ours else 0), (mode, name)
            expected = {"ours": 0, "promised": PRODUCTS} if variant.weights else {"ours": apart}
            expected |= {"torchs": 0, "fused": FOLLOWED, "unfused": 0} if variant.fused else {}
            expected = {"compiled": 0} if mode == "compiled" else expected  # Inductor has no part in it here
            assert {key: entry.products.get(key) for key in expected} == (
                expected if variant.ours else dict.fromkeys(expected)
            )
            entry.reset()
            with entry.around():
                found[mode, name] = entry.run()
            assert work.cache.filled == (7 if kind == "decode" else 5)
    assert next(iter(found.values())).shape == (size if kind == "decode" else 1, 1, 128)
    reference = found["eager", "torch"].float()
    assert all(torch.allclose(each.float(), reference, atol=0.01) for each in found.values())


@pytest.mark.parametrize("kind, size", [("decode", 3), ("prefill", 5)])
def test_what_is_compiled_writes_the_same_cache(kind: str, size: int, code: SimpleNamespace, model: Any) -> None:
    """Compiled code has no writing in place until it is made so again: by AOTAutograd, without Inductor's compiler."""
    work = code.model_runs.Work(model, code.step_rounds.Step(kind, size), context=6)
    logits, caches = [], []
    for run in (work.run, code.model_runs.compiled(work, "aot_eager")):
        work.reset()
        for layer in work.cache.layers:
            layer[:, work.begin :] = 0
        logits.append(run().float())
        caches.append(torch.stack(work.cache.layers).float())
    assert torch.allclose(*logits, atol=0.01) and torch.allclose(*caches, atol=0.01)
    assert (caches[1][:, :, work.begin :] != 0).any(-1).all()


def test_a_variant_leaves_everything_as_it_was(
    code: SimpleNamespace, model: Any, ours: Served, monkeypatch: Any
) -> None:
    monkeypatch.setenv("OUTBLAS_PDL", "yes")
    variant = code.model_runs.VARIANTS["outblas_weights"]
    with pytest.raises(KeyError), code.model_runs.active(variant, model):
        assert os.environ["OUTBLAS_PDL"] == "1" and "forward" in vars(model.lm_head) and outblas.enabled()
        raise KeyError
    assert os.environ["OUTBLAS_PDL"] == "yes" and "OUTBLAS_WEIGHTS" not in os.environ
    assert "forward" not in vars(model.lm_head) and not outblas.enabled()


def test_without_a_gpu_nothing_is_measured_as_ours(code: SimpleNamespace, model: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OUTBLAS_DISABLE", "1")
    with (
        pytest.warns(RuntimeWarning, match="OUTBLAS_DISABLE"),
        pytest.raises(DeviceError),
        code.model_runs.active(code.model_runs.VARIANTS["outblas"], model),
    ):
        pytest.fail("not reached")


def test_rows_have_all_variants_in_the_same_rounds(
    code: SimpleNamespace, model: Any, ours: Served, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    steps = [code.step_rounds.Step("decode", 2), code.step_rounds.Step("prefill", 4)]
    variants = list(code.model_runs.VARIANTS)
    rows = code.model_steps.measure(model, steps, ["eager", "compiled"], variants, 3, 4, backend="eager")
    assert [(row["step"], row["mode"]) for row in rows] == [
        (step, mode) for step in ("decode_2", "prefill_4") for mode in ("eager", "compiled")
    ]
    compiled = ["torch", "outblas", "outblas_pdl"]
    assert [list(row["variants"]) for row in rows] == [variants, compiled] * 2
    assert rows[0]["variants"]["outblas"]["products"]["ours"] == PRODUCTS and rows[2]["tokens"] == 4
    bars = code.model_steps.bars(rows)
    assert set(bars) == {f"eager/{name}" for name in variants[1:]} | {f"compiled/{name}" for name in compiled[1:]}
    assert all(bar["steps"] == 2 for bar in bars.values())
    assert len(capsys.readouterr().out.splitlines()) == 2 * (len(variants) + len(compiled))


def test_a_mode_that_torch_cannot_run_is_left_out_with_a_line(
    code: SimpleNamespace, model: Any, ours: Served, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    entry, renew = code.model_runs.entry, code.step_rounds.StepGraphs.renew_pool
    broken: dict[str, Exception] = {"compiled_graph": RuntimeError("no capture\nat all")}
    pools, left_out = list[Any](), dict[str, str]()

    def fails(work: Any, mode: str, variant: Any, backend: str) -> Any:
        if mode in broken and variant.ours:
            raise broken[mode]
        return entry(work, mode.removesuffix("_graph"), variant, backend)

    monkeypatch.setattr(code.model_runs, "entry", fails)
    monkeypatch.setattr(code.step_rounds.StepGraphs, "renew_pool", lambda graphs: (pools.append(graphs), renew(graphs)))
    modes, steps = ["eager", "compiled_graph", "compiled"], [code.step_rounds.Step("decode", 2)]
    arguments: Any = (model, steps, modes, ["torch", "outblas"], 3, 4, "eager")
    rows = code.model_steps.measure(*arguments, left_out=left_out)
    assert [row["mode"] for row in rows] == ["eager", "compiled"]
    assert left_out == {"decode_2/compiled_graph": "no capture"}
    assert "decode_2       compiled_graph  left out: no capture\n" in capsys.readouterr().out
    assert len(pools) == 1 + len(modes), "no graph shares the pool of graphs that are gone"
    for mode, error in (("eager", RuntimeError("not even so")), ("compiled", DeviceError("not on", "a GPU", "look"))):
        broken[mode] = error
        with pytest.raises(RuntimeError, match=str(error)):
            code.model_steps.measure(*arguments)
        del broken[mode]


def test_a_step_that_is_warmed_up_is_not_compiled_again(code: SimpleNamespace, model: Any) -> None:
    """Compilation amid a capture is refused by CUDA in words that nobody understands."""
    work = code.model_runs.Work(model, code.step_rounds.Step("decode", 2), context=4)
    run = code.model_runs.compiled(work, "aot_eager")
    expected = run()
    with code.step_rounds.no_recompilation():
        work.reset()
        assert torch.equal(run(), expected)
        work.cache.filled = work.begin - 1  # a constant of the code
        with pytest.raises(RuntimeError, match="recompile"):
            run()


def test_entries_are_run_once_a_round_in_changing_orders(code: SimpleNamespace, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    order: list[str] = []
    entries = {
        name: code.step_rounds.Entry(lambda name=name: order.append(name), lambda: order.append("reset"))
        for name in ("a", "b")
    }
    times = code.step_rounds.time_rounds(entries, 20, alone=True)
    assert order[::2] == ["reset"] * 40
    rounds = {tuple(order[i : i + 4 : 2]) for i in range(1, 80, 4)}
    order.clear()
    queued = code.step_rounds.time_rounds(entries, 1, alone=False)
    assert len(order) == 6 and {len(each) for each in queued.values()} == {1}, "one that is not timed goes before"
    assert rounds == {("a", "b"), ("b", "a")} and {name: len(each) for name, each in times.items()} == {
        "a": 20,
        "b": 20,
    }


def test_figures_and_bars(code: SimpleNamespace) -> None:
    def row(step: str, *speedups: float) -> dict[str, Any]:
        times = {"torch": [100.0, 101.0, 102.0]}
        times |= {f"v{i}": [t / s for t in times["torch"]] for i, s in enumerate(speedups)}
        return {"mode": "graph", "step": step, "variants": code.step_rounds.figures(times)}

    rows = [row("decode_1", 1.2, 1.2, 1.01), row("prefill_512", 1.0, 0.98, 1.01)]
    assert rows[0]["variants"]["torch"]["us"][0] == 101 and "speedup" not in rows[0]["variants"]["torch"]
    bars = code.model_steps.bars(rows)
    assert list(bars) == ["graph/v0", "graph/v1", "graph/v2"]
    assert bars["graph/v0"]["passed"] and bars["graph/v0"]["geomean"] == pytest.approx(1.2**0.5)
    assert bars["graph/v1"]["slower"] == ["prefill_512"] and not bars["graph/v1"]["passed"]
    assert bars["graph/v2"]["slower"] == [] and not bars["graph/v2"]["passed"], "level is no win"


def test_linear_layers_are_explained(
    code: SimpleNamespace, model: Any, ours: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = code.step_rounds.Step("prefill", 6)
    rows = code.model_explained.explained(model, step, list(code.model_runs.VARIANTS))
    assert {row["mnk"] for row in rows} == {"6_128_64", "6_64_64", "6_192_64", "6_64_96", "1_128_64"}
    for row in rows:
        assert set(row) == {"step", "mnk", "outblas", "outblas_fused", "outblas_pdl", "outblas_weights"}
        assert f"for {row['mnk']}_TN_fp16_fp32" in row["outblas"] and "the sum is" not in row["outblas"]
        assert row["outblas_fused"].endswith("the sum is fused") == (row["mnk"] in ("6_64_64", "6_64_96"))
        assert row["outblas_fused"].endswith("the gate is fused") == (row["mnk"] == "6_192_64")
    monkeypatch.setattr(linear, "why_not", lambda x, w, residual, gated: "it spills")
    rows = code.model_explained.explained(model, step, ["outblas_fused"])
    assert sum(row["outblas_fused"].endswith("the sum is apart: it spills") for row in rows) == 2
    assert sum(row["outblas_fused"].endswith("the gate is apart: it spills") for row in rows) == 1


def test_what_a_model_multiplies_is_tuned_before(
    code: SimpleNamespace, model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the command line, into a library that this process uses from then on; steps count alike, however long."""
    commands: list[list[str]] = []
    steps = [code.step_rounds.Step("decode", 3), code.step_rounds.Step("prefill", 5)]

    def tune(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
        commands.append(command)
        captured = CapturedProducts.load(command[command.index("--captured") + 1])
        run = RunFiles(Path(command[command.index("--run") + 1]))
        run.path.mkdir()
        rows = [LibraryRow(problem, "lt_auto", "id=1") for problem in list(captured.problems())[1:]]
        rows[0] = LibraryRow(rows[0].problem, "lt_auto", plain=LibraryChoice(ANY, 1.2, 1.1, 1.3))
        Library("h200", tuple(rows)).save(run.library)
        run.run.write_text('{"format": 1, "provenance": {"gpu": "a GPU"}}')
        assert env[LIBRARY_VARIABLE] == str(tmp_path / "libraries") and "--install" in command
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv(LIBRARY_VARIABLE, "")
    seconds = {steps[0]: 1.0, steps[1]: 4.1}
    monkeypatch.setattr(code.model_tune, "step_seconds", lambda model, step, context: seconds[step])
    told = code.model_tune.tuned(model, steps, 6, 60, tmp_path, run=tune)
    assert os.environ[LIBRARY_VARIABLE] == str(tmp_path / "libraries") and len(commands) == 1
    assert commands[0][commands[0].index("--budget") + 1] == "64,60s"
    one, whole = ({k: n for k, n in told["captured"].items() if k.startswith(m)} for m in ("3_", "5_"))
    assert one == {f"3_{nk}_TN_fp16_fp32": 4 * (n + (nk == "128_64")) for nk, n in LAYERS_OF_EACH.items()}, "and a head"
    assert whole == {f"5_{nk}_TN_fp16_fp32": n for nk, n in LAYERS_OF_EACH.items()}
    assert told["captured"]["1_128_64_TN_fp16_fp32"] == 1, "the head sees the last token"
    assert len(told["rows"]) == len(told["captured"]) - 1 and told["provenance"] == {"gpu": "a GPU"}
    assert told["rows"][0]["kernel"] and told["rows"][1]["fallback"] == "id=1"
    assert code.model_tune.line(told) == "tuned for 60 s: 8 of 9 products reached, 1 with a kernel of ours"
    failed = SimpleNamespace(returncode=2)
    with pytest.raises(DeviceError, match="tune --captured .* failed"):
        code.model_tune.tuned(model, steps, 6, 60, tmp_path, run=lambda *_, **__: failed)


def test_a_step_has_a_time(code: SimpleNamespace, model: Any) -> None:
    assert code.model_tune.step_seconds(model, code.step_rounds.Step("decode", 2), 4) > 0


def test_greedy_tokens_and_logits_are_compared(
    code: SimpleNamespace, model: Any, ours: Served, monkeypatch: Any
) -> None:
    reference = code.model_greedy.in_fp32(model)
    for name in ("outblas", "outblas_fused", "outblas_weights"):
        variant = code.model_runs.VARIANTS[name]
        found = code.model_greedy.compared(model, reference, 3, 8, variant, length=5)
        assert found["passed"], code.model_greedy.line(found)
        assert found["identical"] + len(found["differences"]) == 3
    assert ours.ran
    run = ours.run
    monkeypatch.setattr(ours, "run", lambda *args: run(*args).mul_(1.02))
    found = code.model_greedy.compared(model, reference, 3, 8, code.model_runs.VARIANTS["outblas"], length=5)
    assert not found["passed"] and not found["logits"]["within"] and "FAILED" in code.model_greedy.line(found)


def test_decoding_goes_on_with_the_tokens_that_are_forced(code: SimpleNamespace, model: Any) -> None:
    prompt, torchs = torch.randint(128, (2, 5)), code.model_runs.VARIANTS["torch"]
    tokens, logits = code.model_greedy.decoded(model, prompt, 6, torchs)
    assert torch.equal(tokens, logits.argmax(-1)) and torch.equal(tokens, code.llama.generate(model, prompt, 6))
    forced = (tokens + 1) % 128
    own, other = code.model_greedy.decoded(model, prompt, 6, torchs, forced)
    assert torch.equal(own[:, 0], tokens[:, 0]) and not torch.equal(own, tokens)
    wide = code.model_greedy.in_fp32(model)
    for row in range(2):
        for given, found in ((tokens, logits), (forced, other)):
            expected = code.model_greedy.reference_logits(wide, prompt[row], given[row])
            assert torch.allclose(found[row].float(), expected, atol=0.01)


def test_arguments(code: SimpleNamespace) -> None:
    options = code.model_steps.parsed(["--modes", "graph,eager", "--decode", "1", "--prefill", ""])
    assert (options.modes, options.decode, options.prefill) == (["graph", "eager"], [1], [])
    with pytest.raises(argparse.ArgumentTypeError, match="grpah"):
        code.model_steps.words(code.model_steps.MODES)("grpah")
    for wrong in (["--rounds", "2"], ["--decode", "1,0"], ["--variants", ""], ["--layers", "0"], ["--greedy", "x"]):
        with pytest.raises(SystemExit):
            code.model_steps.parsed(wrong)


def test_what_inductor_compiled_as_ours_is_counted(
    code: SimpleNamespace, model: Any, ours: Served, monkeypatch: Any
) -> None:
    """A back end replaces Inductor, which needs a compiler on a CPU.

    One layer is compiled for all layers, and the head, for every variant anew.
    """
    work = code.model_runs.Work(model, code.step_rounds.Step("decode", 2), context=4)

    def backend(graph: Any, _inputs: Any) -> Any:
        enable._switch._pass.replaced += 7
        return graph

    for name in ("outblas", "outblas_pdl"):
        found = code.model_runs.entry(work, "compiled", code.model_runs.VARIANTS[name], backend)
        assert found.products == {"compiled": 2 * 7}
