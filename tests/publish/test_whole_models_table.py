"""The published tables of whole models: figures of the file, missing ones, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages.headline import headline_rows
from pages.whole_models_table import WHOLE_MODELS, whole_models_block
from transformer.whole_model_file import FORMAT

from outblas.core.errors import RecordError

MADE = {"date": "2026-12-01T10:00:00+00:00", "commit": "0123456789abcdef"}


def figures(speedup: float | None, tokens_per_s: float, mean: float = 0.01, places: int = 10, **more: Any) -> Any:
    logits = {"largest": 0.5, "mean": mean, "agree": 0.9, "places": places, "rms": 1.0}
    found = {"us": [1.0, 1.0, 1.0], "tokens_per_s": tokens_per_s, "logits": logits, "startup_s": {"capture": 1.5}}
    found |= {"weight_bytes": 6_000_000_000, "peak_bytes": 7_250_000_000, **more}
    return found if speedup is None else {**found, "speedup": [speedup, speedup, speedup]}


def content(**settings: Any) -> dict[str, Any]:
    """Two steps of a model of eight layers; ``compile`` failed in one."""
    about = {"hidden": "full", "rounds": 30, "tune": 0, "gpu": "a GPU", "driver": "1", "torch": "2"}
    optimized = figures(1.2, 120.0, speedup_over_merged=[1.1, 1.0, 1.2])
    first = {"torch": figures(None, 1234.4), "compile": figures(1.1, 110.0), "optimize": optimized}
    second = {"torch": figures(None, 5000.0, 0.04, 20), "optimize": {**optimized, "speedup": [0.98, 0.9, 1.0]}}
    step = {"model": "llama_8b", "left_out": {}, "provenance": [MADE]}
    rows = [
        {**step, "step": "decode_8", "context": 512, "variants": first},
        {**step, "step": "prefill_500", "context": 0, "variants": second, "left_out": {"compile": "out of memory"}},
    ]
    startup_s = {"torch": {"arrange": 0.0}, "compile": {}, "optimize": {"arrange": 1.0, "enable": 2.0, "tune": 0.0}}
    models = {"llama_8b": {"layers": 8, "startup_s": startup_s}, "qwen_7b": {"layers": 8, "startup_s": {}}}
    return {
        "format": FORMAT,
        "settings": {**about, "transformers": "5", **settings},
        "models": models,
        "rows": rows,
        "tuned": {},
        "bars": [],
    }


def block(folder: Path, data: Any) -> str:
    (folder / WHOLE_MODELS).write_text(json.dumps(data))
    return whole_models_block(folder)


def cells(text: str, name: str) -> list[list[str]]:
    """The cells of a row, in each table that has it."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row[1:] for row in lines if row[0] == name]


def test_nothing_is_said_of_what_is_not_measured(tmp_path: Path) -> None:
    assert whole_models_block(tmp_path) == "Not measured on this GPU."


def test_the_tables_have_the_figures_of_the_file(tmp_path: Path) -> None:
    text = block(tmp_path, content())
    assert "**Llama 3 8B**, 8 layers, context 512" in text and "Qwen" not in text
    speed, price = cells(text, "torch")
    assert speed == ["1,234", "5,000", "–", "–"]
    assert price == ["6.0", "7.2", "3.0", "0.500", "0.0300", "90.0%"], "the mean error counts every place once"
    speed, price = cells(text, "`optimize(model)`, `enable()`")
    assert speed == ["120 (1.200×)", "120 (0.980×)", "1.084×", "1.100×"] and price[2] == "6.0"
    speed, price = cells(text, "torch.compile, max-autotune")
    assert speed == ["110 (1.100×)", "–", "1.100× (only decode, batch 8)", "–"]
    assert price[2] == "1.5 (1 of 2 steps)"
    assert "over torch.compile" not in text
    assert "- Left out: torch.compile, max-autotune, llama_8b, prefill, 500 tokens, context 0: out of memory" in text
    assert "a GPU, driver 1, torch 2, transformers 5, 2026-12-01, commit 0123456." in text and "tuned" not in text
    assert "were tuned for 60 s" in block(tmp_path, content(tune=60))


def test_a_compiled_model_is_compared_with_torch_compile(tmp_path: Path) -> None:
    data = content()
    ours = figures(1.2, 115.0, speedup_over_compile=[1.05, 1.0, 1.1], shares_cache=True)
    data["rows"][0]["variants"]["compile_enable"] = ours
    data["models"]["llama_8b"]["startup_s"]["compile_enable"] = {}
    text = block(tmp_path, data)
    assert "| mean | over merged | over torch.compile |" in text
    means = ["1.200× (only decode, batch 8)", "–", "1.050× (only decode, batch 8)"]
    speed, price = cells(text, "torch.compile, `enable()`")
    assert speed == ["115 (1.200×)", "–", *means]
    assert price[2] == "–", "the variant before it has filled the cache"
    assert cells(text, "torch")[0] == ["1,234", "5,000", "–", "–", "–"]


def test_the_default_mode_has_rows_and_a_column_of_its_own(tmp_path: Path) -> None:
    data = content()
    ours = figures(1.3, 125.0, speedup_over_default=[1.07, 1.0, 1.1])
    data["rows"][0]["variants"] |= {"default": figures(1.1, 112.0), "default_enable": ours}
    data["models"]["llama_8b"]["startup_s"] |= {"default": {}, "default_enable": {}, "compile_enable": {}}
    text = block(tmp_path, data)
    assert "| mean | over merged | over torch.compile, default |" in text
    assert cells(text, "torch.compile, default")[0][-1] == "–"
    assert cells(text, "torch.compile, default, `enable()`")[0][-1] == "1.070× (only decode, batch 8)"
    data["rows"][0]["variants"]["compile_enable"] = figures(1.2, 115.0, speedup_over_compile=[1.05, 1.0, 1.1])
    assert "| over merged | over torch.compile | over torch.compile, default |" in block(tmp_path, data)


def test_each_context_has_a_table_with_the_prefill_steps(tmp_path: Path) -> None:
    data = content()
    decode = data["rows"][0]
    shorter = {**decode["variants"], "optimize": {**decode["variants"]["optimize"], "speedup": [1.3, 1.0, 1.5]}}
    data["rows"].append({**decode, "context": 64, "variants": shorter})
    text = block(tmp_path, data)
    assert text.index("8 layers, context 64") < text.index("8 layers, context 512")
    first, second, price = cells(text, "`optimize(model)`, `enable()`")
    assert first == ["120 (0.980×)", "120 (1.300×)", "1.129×", "1.100×"] and len(price) == 6
    assert second == ["120 (1.200×)", "120 (0.980×)", "1.084×", "1.100×"]
    shorter.pop("compile")
    assert len(cells(block(tmp_path, data), "torch.compile, max-autotune")) == 2, "no row without a figure"
    data["rows"] = data["rows"][1:2]
    assert "**Llama 3 8B**, 8 layers\n" in block(tmp_path, data), "prefill alone"


def test_the_products_share_is_of_steps_that_were_measured_without_them(tmp_path: Path) -> None:
    data = content()
    assert not cells(block(tmp_path, data), "matmul share of torch's time")
    first, second = data["rows"]
    first["variants"]["torch"]["us"] = [200.0, 199.0, 201.0]
    first["variants"]["without_products"] = {**figures(4.0, 1.0), "us": [50.0, 49.0, 51.0], "logits": None}
    second["left_out"]["without_products"] = "out of memory"
    text = block(tmp_path, data)
    assert cells(text, "matmul share of torch's time") == [["75%", "–", "–", "–"]]
    assert "- Left out: without_products, llama_8b, prefill, 500 tokens, context 0: out of memory" in text


@pytest.mark.parametrize("data", [[], {"format": "another"}, {"format": FORMAT}])
def test_other_files_are_refused(data: Any, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="expected a whole_models.py result in format"):
        block(tmp_path, data)
    with pytest.raises(RecordError, match="tiny models"):
        block(tmp_path, content(hidden="tiny"))
    (tmp_path / WHOLE_MODELS).write_text("{")
    with pytest.raises(RecordError, match="cannot be read"):
        whole_models_block(tmp_path)


def test_the_headline_has_the_means_of_all_models_with_the_longest_context(tmp_path: Path) -> None:
    data = content(layers=8, tune=30)
    data["rows"].append({**data["rows"][0], "context": 64, "variants": {}})
    (tmp_path / WHOLE_MODELS).write_text(json.dumps(data))
    over_torch, over_merged = headline_rows(tmp_path, [])
    assert over_torch.geomean == pytest.approx((1.2 * 0.98) ** 0.5) and over_torch.problems == 2
    assert over_torch.use == "`optimize()` in Llama 3 8B in transformers, bf16, context 512, 8 layers, after tuning"
    assert over_merged.geomean == pytest.approx(1.1) and "merged weights" in over_merged.rival
    assert (over_torch.gpu, over_torch.drivers, set(over_torch.days)) == ("a GPU", ("1",), {"2026-12-01"})


def test_the_headline_leaves_out_a_figure_that_a_step_lacks(tmp_path: Path) -> None:
    data = content()
    data["rows"][0]["variants"]["optimize"].pop("speedup_over_merged")
    (tmp_path / WHOLE_MODELS).write_text(json.dumps(data))
    assert [row.rival for row in headline_rows(tmp_path, [])] == ["torch"]
    (tmp_path / WHOLE_MODELS).write_text(json.dumps({**data, "rows": []}))
    assert headline_rows(tmp_path, []) == []
