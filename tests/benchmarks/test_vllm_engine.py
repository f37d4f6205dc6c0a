"""benchmarks/vllm_engine.py without vLLM and without a GPU: order of processes, figures, and what a restart repeats."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outblas.core.errors import RecordError
from outblas.tune.intervals.model_ranges import engine_products
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
    assert code.summarised(pair)["cells"]["decode"]["8"]["low"] is None
    assert code.summarised(pair[:1])["cells"] == {}


def test_a_tuned_library_stands_beside_the_packaged_one(code: Any) -> None:
    figures = zip(("torch", "outblas", "tuned"), (5.0, 4.0, 2.5), strict=True)
    made = code.summarised([{"pair": 0, "variant": name, **found(ms, 100.0)} for name, ms in figures])
    assert (made["geomean"]["decode"], made["tuned"]["geomean"]["decode"]) == (1.25, 2.0)


@pytest.fixture(name="commands")
def commands_fixture(code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that run in place of vLLM and ``outblas tune``; the latter fails with a budget of 1 s."""
    ran: list[list[str]] = []

    def run(command: list[str], own: Any, log: Path, limit_s: float | None = None) -> Any:
        ran.append(command)
        if "tune" not in command:
            assert not own["OUTBLAS_LIBRARY"] or Path(own["OUTBLAS_LIBRARY"]).is_file()
            Path(command[command.index("--out") + 1]).write_text(json.dumps(found(5.0, 100.0)))
        elif "12,1s" in command:
            return SimpleNamespace(good=False, log="no space left")
        else:
            Path(own["OUTBLAS_LIBRARY"]).write_text("{}")
        return SimpleNamespace(good=True, log="")

    monkeypatch.setattr(code, "run_and_end_group", run)
    monkeypatch.setenv("OUTBLAS_LIBRARY", "")
    return ran


def test_a_model_is_tuned_once_for_each_budget(code: Any, commands: list[list[str]], tmp_path: Path) -> None:
    arguments = SimpleNamespace(repeats=1, tp=1, limit=9, caches=tmp_path, tune=60)
    took = [code.run_process("qwen2.5-3b", "tuned", arguments)["tuning_s"] for _ in range(2)]
    assert took[0] == took[1] > 0, "a later pair has the seconds of the tuning, too"
    assert [command[1:4] == ["-m", "outblas", "tune"] for command in commands] == [True, False, False]
    assert "12,60s" in commands[0] and "--no-install" not in commands[0]
    arguments.tune = 90
    code.run_process("qwen2.5-3b", "tuned", arguments)
    assert "12,90s" in commands[3] and len(commands) == 5, "the library of another budget is another one"


def test_a_tuning_that_fails_is_recorded_and_the_bench_goes_on(
    code: Any, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "collect_provenance", lambda *_: {"gpu": None, "driver": None})
    out, variants = tmp_path / "vllm.json", ["torch", "tuned", "outblas"]
    more = {
        "pairs": 1,
        "variants": variants,
        "gpus": [],
        "repeats": 1,
        "tp": 1,
        "limit": 9,
        "caches": tmp_path,
        "tune": 1,
    }
    code.run_all(SimpleNamespace(out=out, models=["qwen2.5-3b", "qwen2.5-7b"], **more))
    for entry in json.loads(out.read_text())["models"].values():
        assert [one["variant"] for one in entry["processes"] if "error" not in one] == ["torch", "outblas"]
        assert entry["processes"][1]["error"] == "outblas tune made no library\nno space left"


@pytest.mark.parametrize(("limit", "good"), [(0.5, False), (None, True)])
def test_a_process_ends_with_all_that_it_has_started(
    limit: float | None, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = module_of_file(ROOT / "benchmarks" / "engine" / "ended_groups.py", monkeypatch)
    command = ["sh", "-c", "sleep 300 & echo $! begun" + ("" if good else "; wait")]
    ended = groups.run_and_end_group(command, dict(os.environ), tmp_path / "log", limit)
    child, begun = ended.log.split()[:2]
    assert ended.good == good and begun == "begun" and ("timed out after 0.5 seconds" in ended.log) != good
    assert _is_gone(int(child))


def test_an_interrupt_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = module_of_file(ROOT / "benchmarks" / "engine" / "ended_groups.py", monkeypatch)
    groups.interrupted.set()
    with pytest.raises(KeyboardInterrupt):
        groups.run_and_end_group(["sh", "-c", "echo $$; sleep 300"], dict(os.environ), tmp_path / "log")


def test_an_interrupt_of_the_bench_reaches_the_processes_of_other_models(
    code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "interrupted", threading.Event())

    def run_process(model: str, *_: Any) -> Any:
        if model == "llama-3-8b":  # stands for Ctrl-C while the main thread waits for it
            raise KeyboardInterrupt
        assert code.interrupted.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(code, "run_process", run_process)
    models = ["llama-3-8b", "qwen2.5-7b"]
    with pytest.raises(KeyboardInterrupt):
        out = tmp_path / "vllm.json"
        code.run_all(SimpleNamespace(out=out, models=models, pairs=1, variants=["torch"], gpus=["0", "1"]))
    assert code.interrupted.is_set() and not out.exists()


def _is_gone(process: int) -> bool:
    """Return whether a process ends soon; one that has ended may still wait for its parent."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    "content",
    [
        {"provenance": {}},
        {"models": []},
        {"models": {"qwen2.5-7b": {}}},
        {"models": {"qwen2.5-7b": {"processes": [{"error": "no GPU"}]}}},
        {
            "models": {
                "qwen2.5-7b": {
                    "processes": [{"pair": 0, "variant": name, "decode": {}} for name in ("torch", "outblas")]
                }
            }
        },
    ],
)
def test_a_result_file_of_another_form_is_refused_in_one_line(code: Any, tmp_path: Path, content: Any) -> None:
    out = tmp_path / "vllm.json"
    out.write_text(json.dumps(content))
    with pytest.raises(
        RecordError, match=r"vllm.json has another form \(.*; expected what .* writes; name another --out"
    ):
        code.run_all(SimpleNamespace(out=out, models=["qwen2.5-7b"], gpus=[]))
    assert json.loads(out.read_text()) == content


def test_a_process_with_other_cells_than_the_file_is_refused(
    code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = {"pair": 0, "variant": "torch", "machine": code.start_of_machine(), **found(5.0, 100.0)}
    older["decode"]["512"] = [9.0]
    out = tmp_path / "vllm.json"
    out.write_text(json.dumps({"models": {"qwen2.5-7b": {"processes": [older]}}}))
    monkeypatch.setattr(code, "run_process", lambda *_: found(5.0, 100.0))
    monkeypatch.setattr(code, "collect_provenance", lambda *_: {"gpu": None, "driver": None})
    with pytest.raises(RecordError, match="has another form"):
        code.run_all(SimpleNamespace(out=out, models=["qwen2.5-7b"], pairs=1, variants=["torch", "outblas"], gpus=[]))


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (6, 2.4469), (7, 2.3646), (30, 2.0423), (1000, 1.9623)]
)
def test_intervals_have_students_t_for_any_number_of_pairs(code: Any, freedom: int, t: float) -> None:
    from outblas_lab.compare.student_t import student_t

    assert student_t(freedom) == pytest.approx(t, abs=1e-4)


def test_many_pairs_have_an_interval(code: Any) -> None:
    processes = [
        {"pair": pair, "variant": name, **found(ms, 100.0)}
        for pair in range(9)
        for name, ms in (("torch", 5.0 + pair % 3), ("outblas", 4.0))
    ]
    one = code.summarised(processes)["cells"]["decode"]["8"]
    assert one["low"] < one["ratio"] < one["high"]


def test_lines_that_outblas_says_are_kept_and_its_name_in_others_is_not(code: Any) -> None:
    prefix = "(EngineCore_DP0 pid=7) INFO 11-29 12:00:00 "
    kept = [
        f"{prefix}[engine_plugins.py:98] outblas is enabled: matmuls run on its kernels where they are faster",
        f"{prefix}[engine_log.py:50] outblas computes the matmuls of 4 of 5 weights (N x K): 8 x 8 bf16 at all M (1)",
        "/usr/lib/outblas/dispatch/enable.py:9: RuntimeWarning: outblas has no effect: torch sees no CUDA GPU",
    ]
    left = [
        f"{prefix}[__init__.py:43] - outblas -> outblas.adapt.engine_plugins:start_in_vllm",
        f"{prefix}[backends.py:1] Using cache directory: /tmp/outblas-vllm/torch_compile_cache for outblas graphs",
    ]
    assert code.said("\n".join([*left * 9, *kept])) == kept


@pytest.mark.parametrize("seed", range(20))
def test_two_models_of_both_kinds_are_drawn(code: Any, seed: int) -> None:
    from outblas.core.suites import engine_weights

    models = code.untuned(seed)
    assert len({*models}) == 2 and code.MODELS[models[0]]["tie_word_embeddings"] and models == code.untuned(seed)
    assert engine_products(code.MODELS[models[1]])[0].bias
    for model in models:
        weights = {(product.n, product.k) for product in engine_products(code.MODELS[model])}
        assert len(weights & engine_weights().keys()) <= 1


def test_the_mixture_of_experts_is_that_of_suite_moe(code: Any) -> None:
    from shapes.moe_suite import MODELS  # type: ignore[import-not-found]

    config, model = code.MODELS["qwen3-30b-a3b"], MODELS["qwen3-30b-a3b"]
    assert (config["num_experts"], config["num_experts_per_tok"]) == (model.experts, model.top)
    assert (config["hidden_size"], config["moe_intermediate_size"]) == (model.hidden, model.width)


def test_a_mixture_of_experts_is_not_tuned(
    code: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(code, "run_all", lambda arguments: pytest.fail("it runs"))
    monkeypatch.setattr(sys, "argv", ["vllm_engine.py", "--models", "qwen3-30b-a3b", "--variants", "torch", "tuned"])
    with pytest.raises(SystemExit):
        code.main()
    assert "leave out variant tuned" in capsys.readouterr().err


def test_a_worker_says_which_experts_have_a_tuned_table(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.vllm_process import triton_tables  # type: ignore[import-not-found]

    home = "vllm.model_executor.layers.fused_moe.fused_moe"
    parts = home.split(".")
    for length in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:length]))
        module.__dict__.update(__path__=[], get_moe_configs=lambda experts, n, dtype: {1: {}} if n == 768 else None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    layers = [
        SimpleNamespace(w13_weight=SimpleNamespace(shape=(8, 2 * n, 64)), w2_weight=SimpleNamespace(shape=(8, 64, n)))
        for n in (768, 768, 512)
    ]
    worker = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: [object(), *layers]))
    assert triton_tables(worker) == {"8 experts, width 768": True, "8 experts, width 512": False}


def test_a_restart_runs_what_is_missing_and_what_failed(
    code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, str]] = []

    def run_process(model: str, variant: str, arguments: Any, gpu: str | None) -> dict[str, Any]:
        ran.append((model, variant))
        assert gpu is None
        return {"error": "no memory", "log": []} if len(ran) == 2 else found(5.0, 100.0)

    monkeypatch.setattr(code, "run_process", run_process)
    monkeypatch.setattr(code, "collect_provenance", lambda *_: {"gpu": None, "driver": None})
    out = tmp_path / "vllm.json"
    arguments = SimpleNamespace(out=out, models=["qwen2.5-7b"], pairs=1, variants=["torch", "outblas"], gpus=[])
    code.run_all(arguments)
    assert "error" in json.loads(out.read_text())["models"]["qwen2.5-7b"]["processes"][1]
    code.run_all(arguments)
    assert ran == [("qwen2.5-7b", "torch"), ("qwen2.5-7b", "outblas"), ("qwen2.5-7b", "outblas")]
    entry = json.loads(out.read_text())["models"]["qwen2.5-7b"]
    assert len(entry["processes"]) == 2 and entry["geomean"]["decode"] == 1.0


def test_a_pair_is_of_one_start_of_the_machine(code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []

    def run_process(model: str, variant: str, arguments: Any, gpu: str | None) -> dict[str, Any]:
        ran.append((code.start_of_machine(), variant))
        return {"error": "no time", "log": []} if len(ran) == 4 else found(5.0, 100.0)

    monkeypatch.setattr(code, "run_process", run_process)
    monkeypatch.setattr(code, "collect_provenance", lambda *_: {"gpu": None, "driver": None})
    out = tmp_path / "vllm.json"
    arguments = SimpleNamespace(out=out, models=["qwen2.5-7b"], pairs=2, variants=["torch", "outblas"], gpus=[])
    for machine in ("one", "other"):
        monkeypatch.setattr(code, "start_of_machine", lambda machine=machine: machine)
        code.run_all(arguments)
    one, other = ("one", "torch"), ("other", "torch")
    assert ran == [one, ("one", "outblas"), ("one", "outblas"), one, ("other", "outblas"), other]
    entry = json.loads(out.read_text())["models"]["qwen2.5-7b"]
    assert [each["machine"] for each in entry["processes"]] == ["one", "one", "other", "other"]


def test_models_run_side_by_side_on_gpus_of_their_own(
    code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, ran = threading.Barrier(2, timeout=30), list[tuple[str, str | None]]()

    def run_process(model: str, variant: str, arguments: Any, gpu: str | None) -> dict[str, Any]:
        ran.append((model, gpu))
        both.wait()
        return found(5.0, 100.0)

    monkeypatch.setattr(code, "run_process", run_process)
    monkeypatch.setattr(code, "collect_provenance", lambda *_: {"gpu": None, "driver": None})
    out, models = tmp_path / "vllm.json", ["llama-3-8b", "qwen2.5-7b"]
    code.run_all(SimpleNamespace(out=out, models=models, pairs=1, variants=["torch", "outblas"], gpus=["0", "1"]))
    gpu_of = dict(ran)
    assert set(ran) == set(gpu_of.items()) and set(gpu_of.values()) == {"0", "1"}
    made = json.loads(out.read_text())["models"]
    assert all(len(made[model]["processes"]) == 2 and made[model]["geomean"]["decode"] == 1.0 for model in models)
    assert code.environment("torch", Path("c"), "1")["CUDA_VISIBLE_DEVICES"] == "1"


def test_the_models_are_such_as_tune_knows(code: Any) -> None:
    dense = [config for config in code.MODELS.values() if "num_experts" not in config]
    assert len(dense) == len(code.MODELS) - 1
    for config in dense:
        assert len(engine_products(config)) == 5
    switches = {name: code.environment(name, Path("c"))["OUTBLAS_VLLM"] for name in code.VARIANTS}
    assert switches == {"torch": "0", "outblas": "1", "tuned": "1", "uncompiled": "0"}


def test_a_process_that_takes_too_long_is_an_error(code: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = tmp_path / "process.py"
    process.write_text("import time\ntime.sleep(300)\n")
    monkeypatch.setattr(code, "PROCESS", process)
    found = code.run_process("qwen2.5-3b", "torch", SimpleNamespace(repeats=1, tp=1, limit=0.01, caches=tmp_path))
    assert "timed out after" in found["error"] and found["log"] == []


def test_a_step_is_that_of_the_request_that_began_last(monkeypatch: pytest.MonkeyPatch) -> None:
    code = module_of_file(ROOT / "benchmarks" / "engine" / "vllm_process.py", monkeypatch)

    def result(first: float, last: float) -> SimpleNamespace:
        return SimpleNamespace(
            metrics=SimpleNamespace(first_token_ts=first, last_token_ts=last, num_generation_tokens=5)
        )

    assert code.step_ms([result(1.0, 9.0), result(3.0, 5.0), result(2.0, 7.0)]) == 500.0


def test_a_profile_has_the_middle_decode_steps_and_the_time_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    code = module_of_file(ROOT / "benchmarks" / "engine" / "vllm_process.py", monkeypatch)
    kernels = [("prefill", 0.0, 900.0), ("_gumbel_sample_kernel", 900.0, 910.0)]
    for step in range(18):
        at, size = 910.0 + 100.0 * step, "half" if step in (0, 1, 16, 17) else "whole"
        kernels += [
            (f"gemm_{size}", at + 10, at + 60), ("norm", at + 60, at + 70),
            ("_gumbel_sample_kernel", at + 80, at + 90), ("_samples_of_logits", at + 90, at + 95),
        ]  # fmt: skip
    made = code.decode_steps(list(reversed(kernels)))
    assert (made["steps"], made["step_us"], made["kernel_us"]) == (6, 100.0, 75.0)
    assert made["kernels"] == [
        ["gemm_whole", 6, 300.0], ["norm", 6, 60.0], ["_gumbel_sample_kernel", 6, 60.0], ["_samples_of_logits", 6, 30.0]
    ]  # fmt: skip
    whole = code.decode_steps([("gemm", 0.0, 4.0), ("gemm", 6.0, 10.0)])
    assert (whole["steps"], whole["step_us"], whole["kernel_us"]) == (1, 10.0, 8.0)
