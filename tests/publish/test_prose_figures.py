"""Figures in sentences of README and docs are those of the result files."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from pages.headline import headline_rows

from outblas.core.stats import flop_weighted, geomean
from outblas.predict.answer_choice import AnswerModel
from outblas.predict.any_shape import AnyShapeModel
from outblas.records.results import read_result
from outblas_lab.compare.compare_result import paired_gains, read_comparison
from outblas_lab.train import fit_answers, fit_any_shape

ROOT = Path(__file__).parents[2]
H200, H100 = ROOT / "results" / "h200", ROOT / "results" / "h100"


@cache
def read(path: Path) -> Any:
    return json.loads(path.read_text())


def vllm(model: str) -> Any:
    return read(H200 / "vllm.json")["models"][model]


def ready(model: str, variant: str) -> str:
    return f"{median(one['ready_s'] for one in vllm(model)['processes'] if one['variant'] == variant):.1f} s"


@cache
def whole_models(use: str) -> list[str]:
    """Means of models on the H200: over torch.compile, over torch and, of optimize(), over merged weights."""
    return [f"{row.geomean:.3f}×" for row in headline_rows(H200, []) if row.use.startswith(use)]


def over_max_autotune(model: str, variant: str) -> list[float]:
    """Speed-ups of the decode steps of a model of eight layers, in the order of batch sizes."""
    rows = (row for row in read(H200 / "compiled_models.json")["rows"] if row["model"] == model)
    measured = (row for row in rows if variant in row["variants"])
    steps = sorted(measured, key=lambda row: int(row["step"].removeprefix("decode_")))
    return [step["variants"][variant]["speedup_over_compile"][0] for step in steps]


def optimized_over_max_autotune() -> str:
    llama, qwen = (geomean(over_max_autotune(model, "compile_optimize")) for model in ("llama_8b", "qwen_7b"))
    return f"{llama:.3f} and {qwen:.3f}"


def llama_step(file: Path, step: str) -> Any:
    """The variants of a step of Llama 3 8B with a context of 64 tokens."""
    (row,) = (
        row for row in read(file)["rows"] if (row["model"], row["step"], row["context"]) == ("llama_8b", step, 64)
    )
    return row["variants"]


def figures(variants: Any, figure: str, *names: str) -> list[str]:
    return [f"{variants[name][figure][0]:.3f}×" for name in names]


def starts(variant: str, folders: list[Path], part: str) -> list[float]:
    found = (read(folder / "whole_models.json")["models"] for folder in folders)
    return [model["startup_s"][variant][part] for models in found for model in models.values()]


def invariant(file: Path, who: str) -> tuple[int, int]:
    means = read(file)["means"]
    return means["invariant"][who], means["weights"]


def over_torch(folder: Path) -> str:
    """The FLOP-weighted speedup of grid1000 TN over torch.matmul."""
    rows = [row for row in read_result(folder / "grid1000_tn_fp16_fp32_offline.parquet").rows if not row["pdl"]]
    ratios = [row["torch_us"] / row["ours_us"] for row in rows]
    return f"{flop_weighted(ratios, [row['m'] * row['n'] * row['k'] for row in rows]):.3f}"


def memory(model: str) -> float:
    """GB that a worker of vLLM used more with OutBLAS, in the median."""
    used = {
        variant: median(one["state"]["gpu_bytes"] for one in vllm(model)["processes"] if one["variant"] == variant)
        for variant in ("torch", "outblas")
    }
    return (used["outblas"] - used["torch"]) / 1e9


def experts_in_vllm() -> list[tuple[str, str]]:
    """Means, and kernel time of a decode step over that with OutBLAS; steps are counted by the calls of attention."""
    means = vllm("qwen3-30b-a3b")["geomean"]
    profiles = {one["variant"]: one["profiles"] for one in vllm("qwen3-30b-a3b")["processes"]}
    assert len(profiles) == len(vllm("qwen3-30b-a3b")["processes"]) == 2, "not one pair: write the sentences anew"
    kernel_us = {
        variant: [
            each["kernel_us"] / next(calls for name, calls, _ in each["kernels"] if "Flash" in name)
            for batch, each in of_batches.items()
            if "x" not in batch
        ]
        for variant, of_batches in profiles.items()
    }
    less = [100 * (1 - ours / theirs) for theirs, ours in zip(kernel_us["torch"], kernel_us["outblas"], strict=True)]
    page = "docs/use/engines.md"
    return [
        (page, f"{means['decode']:.3f}× as fast in the mean, and prefill throughput is {means['prefill']:.3f}×"),
        (page, f"the kernels of a decode step take {min(less):.0f}% to {max(less):.0f}% less time"),
    ]


def untuned_in_vllm() -> list[tuple[str, str]]:
    """Of a model for which nothing was tuned; each cell is a median over pairs."""
    model = vllm("llama-3.2-3b")
    shipped, tuned = model["cells"], model["tuned"]["cells"]
    (seconds,) = {round(one["tuning_s"]) for one in model["processes"] if one["variant"] == "tuned"}
    every = [*shipped.items(), *tuned.items()]
    assert {len(row["pairs"]) for _, cells in every for row in cells.values()} == {3}
    for mode, cells in every:
        if mode in ("decode", "end_to_end"):
            assert min(row["ratio"] for row in cells.values()) > 1
        else:
            assert all(row["low"] <= 1 <= row["high"] for row in cells.values())
    prefills = [run for one in model["processes"] for run in one["runs"]["prefill 1x2048"]]
    pace = [run["pace_ms"] for one in model["processes"] for runs in one["runs"].values() for run in runs]
    kernels = [one["profiles"]["1x2048"]["kernel_us"] / 1e3 for one in model["processes"]]
    took = [1e3 * run["seconds"] for run in prefills]
    means = f"{model['geomean']['decode']:.3f}× as fast with the packaged library, and "
    means += f"{model['tuned']['geomean']['decode']:.3f}× after {seconds} s"
    host = f"changed by a factor of {max(pace) / min(pace):.0f} during these runs"
    waits = (
        f"took {min(took):.0f} to {max(took):.0f} ms, but its kernels take {min(kernels):.1f} to {max(kernels):.1f} ms"
    )
    surely = [sum(row["low"] > 1 for row in cells["decode"].values()) for cells in (shipped, tuned)]
    above = f"wholly above 1 in {surely[0]} of 7 batch sizes as shipped, and in {surely[1]} of 7 after tuning"
    return [("docs/use/engines.md", text) for text in (means, host, waits, above)]


def log_probabilities() -> list[tuple[str, str]]:
    """Distances of a variant from vLLM's default on the same prompts."""
    most: dict[str, list[str]] = {"outblas": [], "uncompiled": []}
    means: dict[str, list[str]] = {"outblas": [], "uncompiled": []}
    for model in ("llama-3-8b", "qwen2.5-7b"):
        for variant in most:
            found = [one for one in vllm(model)["differences"] if one["variant"] == variant]
            most[variant].append(f"{max(one['max'] for one in found):.3f}")
            means[variant].append(f"{max(one['mean'] for one in found):.3f}")
    llama, qwen = most["outblas"]
    texts = (
        f"by at most {llama} for Llama 3 8B and {qwen} for Qwen2.5 7B",
        f"The means are {' and '.join(means['outblas'])} at most",
        f"by up to {' and '.join(most['uncompiled'])}, with means of {' and '.join(means['uncompiled'])}",
    )
    return [("docs/use/engines.md", text) for text in texts]


def engines() -> list[tuple[str, str]]:
    means = {model: vllm(model)["geomean"] for model in ("llama-3-8b", "qwen2.5-7b")}
    llama, qwen = means.values()
    page, faq, cells = "docs/use/engines.md", "docs/use/faq.md", vllm("llama-3-8b")["cells"]
    step, requests = cells["decode"]["16"], cells["end_to_end"]["16"]
    processes = [one for model in means for one in vllm(model)["processes"] if one["variant"] != "uncompiled"]
    spread, imports = ([one[field] for one in processes] for field in ("ready_s", "import_s"))
    gains = (
        f"{100 * (llama['decode'] - 1):.0f}% faster for Llama 3 8B and {100 * (qwen['decode'] - 1):.0f}% for Qwen2.5 7B"
    )
    assert f"{memory('llama-3-8b'):.1f}" == f"{memory('qwen2.5-7b'):.1f}"
    return [
        ("README.md", gains),
        ("docs/index.md", gains),
        (page, f"decode steps: {llama['decode']:.3f}× for Llama 3 8B, {qwen['decode']:.3f}× for Qwen2.5 7B"),
        (page, f"prefill throughput: {llama['prefill']:.3f}× and {qwen['prefill']:.3f}×"),
        (page, f"individual starts, which took {min(spread):.0f} to {max(spread):.0f} s"),
        (page, f"another {min(imports):.0f} to {max(imports):.0f} s"),
        (faq, f"Llama 3 8B decode steps in vLLM, batch 1 to 256 | {llama['decode']:.3f}× |"),
        (faq, f"Qwen2.5 7B decode steps in vLLM, batch 1 to 256 | {qwen['decode']:.3f}× |"),
        (faq, f"is {over_torch(H200)} on the H200 and {over_torch(H100)} on the H100"),
        (faq, f"was {memory('llama-3-8b'):.1f} GB higher with OutBLAS"),
        (faq, f"they ran {optimized_over_max_autotune()} times as fast as with torch.compile"),
        (faq, f"takes {step['outblas']:.3f} ms with OutBLAS and {step['torch']:.3f} ms without"),
        (faq, f"{step['ratio']:.3f}, with a 95% interval of {step['low']:.3f} to {step['high']:.3f}"),
        (
            faq,
            f"{requests['ratio']:.3f} times as high: {requests['outblas']:,.0f} instead of {requests['torch']:,.0f} ",
        ),
        *(
            (faq, f"| {name} | {ready(model, 'torch')} | {ready(model, 'outblas')} |")
            for name, model in (("Llama 3 8B", "llama-3-8b"), ("Qwen2.5 7B", "qwen2.5-7b"))
        ),
    ]


def transformers() -> list[tuple[str, str]]:
    (graph, enabled), (joined, optimized, merged) = whole_models("`enable()`"), whole_models("`optimize()`")
    worst = min(row.worst for row in headline_rows(H200, []) if row.rival == "torch.compile (default)")
    h200, h100 = (llama_step(folder / "whole_models.json", "decode_13") for folder in (H200, H100))
    compiled_16 = llama_step(H200 / "compiled_models.json", "decode_16")
    at_13 = (figures(each, "speedup", "enable", "optimize") for each in (h200, h100))
    at_16 = figures(compiled_16, "speedup_over_default", "default_enable", "default_optimize")
    (at_64,) = figures(llama_step(H100 / "whole_models.json", "decode_64"), "speedup", "enable")
    at_1_max, at_16_max, at_64_max = over_max_autotune("llama_8b", "compile_enable")
    qwen_1, qwen_64 = over_max_autotune("qwen_7b", "compile_enable")
    enabling = starts("enable", [H200, H100], "enable") + starts("optimize", [H200, H100], "enable")
    return [
        ("docs/use/faq.md", f"context 512, after tuning, over PyTorch in a CUDA graph | {enabled} |"),
        ("docs/use/faq.md", f"`optimize()` with the same models, over PyTorch in a CUDA graph | {optimized} |"),
        ("docs/use/faq.md", f"takes {min(enabling):.1f} to {max(enabling):.1f} s on an H200 or H100"),
        ("docs/use/tune.md", f"took {min(enabling):.1f} to {max(enabling):.1f} s on an H200 and an H100"),
        ("docs/use/matmul.md", f"Qwen2.5 7B by a geometric mean of {enabled}"),
        ("docs/use/whole-models.md", f"Qwen2.5 7B by a geometric mean of {optimized}"),
        ("docs/use/whole-models.md", f"fused norms, the speedup is {merged}"),
        ("docs/use/whole-models.md", f"they ran {optimized_over_max_autotune()} times as fast"),
        (
            "docs/use/whole-models.md",
            f"`enable()` gains {at_16_max - 1:.1%} and {at_64_max - 1:.1%} at batch 16 and 64",
        ),
        ("docs/use/whole-models.md", f"`enable()` gains {qwen_1 - 1:.1%} and {qwen_64 - 1:.1%} at batch 1 and 64"),
        ("docs/results/whole-models.md", f"the ratio {at_1_max:.3f} there is not a gain"),
        ("docs/results/whole-models.md", f"a part of the ratio {qwen_1:.3f} may"),
        ("docs/use/faq.md", f"ran {graph[:-1]} times as fast with `enable()` as with torch.compile alone"),
        ("docs/use/faq.md", f"and {joined[:-1]} times as fast with `optimize` and `enable()`."),
        ("docs/use/faq.md", f"The lowest of these ratios is {worst:.3f}."),
        ("docs/use/faq.md", f"8 of 32 layers | `torch.compile`, default mode | {' | '.join(at_16)} |"),
        *(
            ("docs/use/faq.md", f"{gpu}, batch 13 | PyTorch in a CUDA graph | {' | '.join(each)} |")
            for gpu, each in zip(("H200", "H100"), at_13, strict=True)
        ),
        ("docs/use/faq.md", f"is 64, where `enable()` gives {at_64}."),
        ("docs/use/whole-models.md", f"They ran {joined[:-1]} times as fast as with `torch.compile` alone"),
        ("docs/use/whole-models.md", f"without `optimize`, they ran {graph[:-1]} times as fast as with"),
        ("docs/use/engines.md", f"cut to eight layers: {graph} over `torch.compile` in its default mode"),
    ]


def language_model() -> list[tuple[str, str]]:
    """Counts of what the language model of ``benchmarks/llm_answers.py`` wrote."""
    rows = read(H200 / "llm_answers.json")["rows"]

    def of(mode: str, stage: str) -> int:
        return sum(row["stages"][stage][0] for row in rows if row["mode"] == mode)

    def best(mode: str) -> str:
        return f"{max(row['best'] for row in rows if row['mode'] == mode and row['best']):.3f}"

    asked = {mode: sum(row["answers"] for row in rows if row["mode"] == mode) for mode in ("knobs", "holes", "free")}
    changed = sorted(n for row in rows for n in row["knobs_changed"])
    assert changed == [1] * (of("knobs", "proven") - 1) + [2] and of("holes", "proven") == of("free", "faster") == 0
    assert not any(row["stages"]["compiles"][0] for row in rows if (row["mode"], row["aids"]) == ("knobs", "bare"))
    whole = {row["aids"]: row["stages"] for row in rows if row["mode"] == "free"}
    assert whole["aided"]["compiles"][1] > whole["bare"]["compiles"][2]
    assert whole["aided"]["proven"][1] < whole["bare"]["proven"][2]
    more, right = (f"{whole['aided'][stage][0]} against {whole['bare'][stage][0]}." for stage in ("compiles", "proven"))
    front = f"wrote [{of('free', 'proven')} right kernels in {asked['free']} answers]"
    page, index = "docs/llm/evolve.md", f"[wrote {of('free', 'proven')} right kernels in {asked['free']} answers]"
    return [
        ("README.md", front),
        ("README.md", f"the fastest at {best('free')} of cuBLASLt's speed"),
        ("docs/index.md", index),
        ("docs/index.md", f"the fastest at {best('free')} of cuBLASLt's speed"),
        (page, f"Of {asked['free']} whole kernels {of('free', 'proven')} are right; the fastest has {best('free')} of"),
        (page, f"more whole kernels compile, {more} Whether more are right is open: {right}"),
        (page, f"Of {asked['knobs']} choices of knobs {of('knobs', 'proven')} are right, and "
               f"{of('knobs', 'faster')} of these beat cuBLASLt, by up to {best('knobs')}×"),
    ]  # fmt: skip


def equal_budgets() -> list[tuple[str, str]]:
    """The language model of ``benchmarks/equal_budgets.py`` against what fills its answers."""
    made = read(H200 / "equal_budgets.json")
    gains = {(gain["learner"], gain["over"]): list(gain["figures"].values()) for gain in made["gains"]}
    table = {row["learner"]: list(row["figures"].values()) for row in made["table"]}
    assert all(each["high"] < 1 for each in gains["llm", "fill"][:2]) and gains["llm", "fill"][2]["high"] <= 1
    assert all(each["low"] > 1 for each in gains["llm", "random-legal"])
    assert all(a["high"] < b["low"] for a, b in zip(table["llm as written"], table["random-legal"], strict=True))
    most = max(abs(100 * each["mean"] - 100) for each in gains["llm+list", "regressor"])
    apart = f"differs from `regressor` by at most {most:.1f}%"
    counts = made["answers"]["llm"]
    named, listed = counts["written"] + counts["copied"], made["answers"]["llm+list"]
    assert listed["copied"] > listed["written"] + counts["copied"]
    words = f"Of its {4 * counts['answers']} choices {named} are offered kernels by name"
    lines = map(json.loads, (H200 / "equal_budgets.jsonl").read_text().splitlines())
    answers = [line["finish"] for line in lines if line.get("kind") == "answer"]
    cut = f"{answers.count('length')} of the {len(answers)} answers were cut"
    return [("docs/search/agents.md", text) for text in (words, cut, apart)]


def same_bits() -> list[tuple[str, str]]:
    page, files = "docs/use/reproducible-results.md", [folder / "batch_invariance.json" for folder in (H200, H100)]
    means = [read(file)["means"]["speedup_over"] for file in files]
    with_vllm = H200 / "batch_invariance_vllm.json"
    rows = read(with_vllm)["rows"]
    kinds = [rows[::2], rows[1::2]]  # weights of models and random ones come in turns
    ratios = [geomean([t["us"]["vllm"] / t["us"]["outblas"] for row in kind for t in row["times"]]) for kind in kinds]
    found = [
        (who, [sum(row["verdicts"][name]["invariant"] for row in kind) for kind in kinds])
        for who, name in (("OutBLAS", "outblas"), ("vLLM's settings", "vllm"))
    ]
    ours, torch = ([invariant(file, who) for file in files] for who in ("outblas", "torch"))
    line = "weights that give the same bits in every batch"
    return [
        (page, f"| {line}, OutBLAS | " + " | ".join(f"{count} of {of}" for count, of in ours) + " |"),
        (page, f"| {line}, torch.matmul | " + " | ".join(str(count) for count, _ in torch) + " |"),
        *(
            (page, f"speedup over {name} | " + " | ".join(f"{mean['llm'][who]['all']:.{digits}f}" for mean in means))
            for name, who, digits in (("torch.matmul", "torch", 3), ("the Triton kernel", "triton", 2))
        ),
        (page, "random extents: speedup over torch.matmul | " + " | ".join(
            f"{mean['all weights']['torch']['all']:.3f}" for mean in means
        )),
        *((page, f"| {line}, {who} | {counts[0]} of 10 | {counts[1]} of 10 |") for who, counts in found),
        (page, f"| speedup of OutBLAS | {ratios[0]:.3f} | {ratios[1]:.3f} |"),
    ]  # fmt: skip


def accuracy() -> list[tuple[str, str]]:
    page, files = "docs/use/reproducible-results.md", [read(folder / "torch_accuracy.json") for folder in (H200, H100)]
    rows = {
        "torch.matmul by default": "torch",
        "torch.matmul with both reduced-precision switches off": "torch_full",
        "OutBLAS kernels": "outblas_kernel",
        "`outblas.matmul` where it falls back to PyTorch or cuBLASLt": "outblas_fallback",
        "`outblas.matmul(accurate=True)`": "outblas_accurate",
    }
    found = []
    for words, who in rows.items():
        gpus = [[kind[who] for kind in file["by_dtype"].values()] for file in files]
        counts = [f"{sum(one['outside'] for one in gpu):,} of {sum(one['n'] for one in gpu):,}" for gpu in gpus]
        worst = max(one["worst"] for gpu in gpus for one in gpu)
        found.append((page, f"| {words} | {counts[0]} | {counts[1]} | {worst:{',.0f' if worst > 10 else '.2f'}} |"))
    for gpu, file in zip(("H200", "H100"), files, strict=True):
        for who in ("torch", "outblas"):
            costs = [file["cost_of_full_precision"][kind][who] for kind in ("drawn", "grid")]
            cells = " | ".join(f"{cost['geomean']:.3f} ({cost['worst']:.3f} at most)" for cost in costs)
            found.append((page, f"| {gpu} | {cells} |"))
    return found


def from_tables() -> list[tuple[str, str]]:
    """Figures that stand in a generated table, too, which is checked against its files."""
    whole, kernels = ((ROOT / f"docs/results/{name}.md").read_text() for name in ("whole-models", "other-kernels"))
    start = r"^\| {} \| [\d.]+ \| [\d.]+ \| (\d+\.\d) \|"
    whole = whole.partition("<!-- whole_models:end -->")[0]
    enabled, alone = (
        [float(s) for s in re.findall(start.format(name), whole, re.M)] for name in ("`enable\\(\\)`", "torch")
    )
    cuda_l2 = re.search(r"\| as claimed \| OutBLAS / CUDA-L2 \| (\d+) \| ([\d.]+×)", kernels)
    steps = read(H200 / "model_steps.json")["bars"]
    plain, fused = (f"{steps[f'graph/{variant}']['geomean']:.3f}×" for variant in ("outblas", "outblas_fused"))
    cutlass = re.search(r"\| all \| 60 \| [\d.]+× \| [\d.]+× \| ([\d.]+×) \|", kernels)
    ampere = re.search(r"\| 163 KiB \(A100\) \| fp32 \| fastest CUTLASS 2.x \| 60 \| ([\d.]+×) \|", kernels)
    assert cuda_l2 and cutlass and ampere
    return [
        (
            "docs/use/faq.md",
            f"{enabled[0]:.1f} s for `enable()` with Llama 3 8B on an H200, and {alone[0]:.1f} s for torch",
        ),
        (
            "docs/use/tune.md",
            f"{min(enabled):.0f} to {max(enabled):.0f} s for `enable()`, and {min(alone):.0f} to {max(alone):.0f} s",
        ),
        ("docs/results/other-kernels.md", f"OutBLAS is {cuda_l2[2]} as fast | {cuda_l2[1]} problems"),
        ("docs/results/other-kernels.md", f"OutBLAS is {cutlass[1]} as fast | 60 problems of grid1000"),
        ("docs/results/other-kernels.md", f"kernel for Ampere is {ampere[1]} as fast | 60 problems"),
        ("docs/use/whole-models.md", f"on an H200 from {plain} to {fused}"),
    ]


def bounds() -> list[tuple[str, str]]:
    """Bounds of the predictions for shapes without a row."""
    page, kernels, answers = "docs/develop/kernel-choice.md", AnyShapeModel.load("h200"), AnswerModel.load("h200")
    slower = [f"{share:.2%}".replace("0%", "%") for share in fit_answers.MAX_SLOWER]
    return [
        (page, f"{kernels.sure:g} on an H200, {kernels.sure_unaligned:g} for unaligned rows"),
        (page, f"is used if that bound reaches {kernels.margin:g}"),
        (page, f"is {answers.sure:g} deviations below the prediction on an H200, {answers.sure_unaligned:g} for"),
        (page, f"highest bound must reach {answers.margin:g}"),
        (page, f"problems at most {fit_any_shape.MAX_SLOWER:.1%} may be below {fit_any_shape.SLOW:g} of torch"),
        (page, f"By a cuBLASLt algorithm at most {slower[0]} may, or {slower[1]} with"),
    ]


@pytest.mark.parametrize(
    "figures",
    [
        engines,
        experts_in_vllm,
        untuned_in_vllm,
        log_probabilities,
        language_model,
        equal_budgets,
        transformers,
        same_bits,
        accuracy,
        from_tables,
        bounds,
    ],
)
def test_a_sentence_has_the_figures_of_its_file(figures: Any) -> None:
    found = figures()
    texts = {page: re.sub(r"\s+", " ", (ROOT / page).read_text()) for page, _ in found}
    missing = [f"{page}: {words}" for page, words in found if words not in texts[page]]
    assert not missing, "write these words, or measure again:\n" + "\n".join(missing)


def test_sentences_on_vllm_say_which_intervals_include_one() -> None:
    above = {
        (model, mode, cell): row["low"] > 1
        for model in ("llama-3-8b", "qwen2.5-7b")
        for mode, cells in vllm(model)["cells"].items()
        for cell, row in cells.items()
    }
    level = [key for key, gains in above.items() if key[1] in ("decode", "end_to_end") and not gains]
    assert level == [("qwen2.5-7b", "decode", "100")]
    rest = [key for key, gains in above.items() if key[1] in ("first_token", "prefill") and gains]
    assert rest == [("llama-3-8b", "prefill", "1x2048")]
    slower = [
        (model, cell)
        for model in ("llama-3-8b", "qwen2.5-7b")
        for cell, row in vllm(model)["cells"]["prefill"].items()
        if row["high"] < 1
    ]
    assert (
        slower == [("qwen2.5-7b", "4x2048")]
        and f"{vllm('qwen2.5-7b')['cells']['prefill']['4x2048']['ratio']:.2f}" == "0.98"
    )


#: (file, agent, the agent without the method) -> at each budget: + gains, - loses, = is level.
EARNED = {
    ("", "regressor", "nearest"): "++++===",
    ("", "regressor", "heuristic"): "=======",
    ("", "ppo", "regressor"): "=======",
    ("", "surrogate", "regressor"): "=======",
    ("", "kt-bayes", "random"): "====-==",
    ("", "tpe", "random"): "=======",
    ("", "kt-genetic", "random"): "===--==",
    ("", "evolution", "random"): "==----=",
    ("", "examples/successive_halving.py", "random"): "====---",
    ("_ms", "regressor", "heuristic"): "=====",
    ("_ms", "ppo", "regressor"): "=====",
    ("_ms", "surrogate", "regressor"): "=====",
    ("_ms", "tpe", "random"): "=====",
    ("_ms", "kt-genetic", "random"): "=====",
    ("_ms", "evolution", "random"): "===--",
    ("_ms", "examples/successive_halving.py", "random"): "++++=",
}


def test_sentences_on_the_uncut_recording_say_what_each_method_earns() -> None:
    """The list of docs/search/environments.md says the same in words."""
    made = {kind: read_comparison(H200 / f"compare_uncut{kind}.parquet") for kind in ("", "_ms")}
    found = {key: paired_gains(made[key[0]], "shapes", *key[1:]) for key in EARNED}
    signs = {
        key: "".join("+" if g.low > 0 else "-" if g.high < 0 else "=" for g in each) for key, each in found.items()
    }
    assert signs == EARNED
