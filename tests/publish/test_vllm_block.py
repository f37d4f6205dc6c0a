"""The tables of vLLM and the rows of the summary, from a file as the benchmark writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages.engine_rows import VLLM, engine_rows
from pages.headline import headline_rows, headline_table
from pages.whole_models_table import vllm_block

from outblas.core.errors import RecordError
from support.helpers import ROOT, module_of_file

MADE = {"gpu": "NVIDIA H200", "driver": "580", "toolchain": {}, "date": "2026-11-30T01:02:03", "commit": "0123456789"}


def process(pair: int, variant: str, ms: float) -> dict[str, Any]:
    return {
        "pair": pair, "variant": variant, "decode": {"1": [ms], "8": [2 * ms]}, "end_to_end": {"1": 1000 / ms},
        "first_token": {"64": [20.0]}, "prefill": {"1x2048": [40000.0]}, "logprobs": [[-1.0]], "ready_s": 40.0 + pair,
        "state": {"gpu_bytes": 90e9, "host_kib": 4096 * 1024},
    }  # fmt: skip


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    code = module_of_file(ROOT / "benchmarks" / "vllm_engine.py", monkeypatch)
    processes = [
        process(pair, variant, ms) for pair in (0, 1) for variant, ms in (("torch", 5.0), ("outblas", 4.0 + pair / 2))
    ]
    processes.append(process(0, "tuned", 2.5))
    processes.append({"pair": 2, "variant": "outblas", "error": "no memory"})
    models = {"llama-3-8b": {"processes": processes, **code.summarised(processes)}}
    (tmp_path / VLLM).write_text(json.dumps({"models": models, "provenance": MADE}))
    return tmp_path


def test_a_line_has_both_times_the_ratio_and_the_range_of_pairs(folder: Path) -> None:
    page = vllm_block(folder)
    assert "| Llama 3 8B: batch | vLLM, ms per step | with OutBLAS | ratio | pairs | 95% interval |" in page
    assert "| 1 | 5.000 | 4.250 | 1.181 | 1.111 to 1.250 | 0.558 to 2.491 |" in page
    assert page.count("| geometric mean | | | **1.181** | | |") == 1, "a mean of one cell is a cell"
    assert "| Llama 3 8B, tuned: batch | vLLM, ms per step |" in page and "| 1 | 5.000 | 2.500 | 2.000 |" in page
    assert "| 1x2048 | 40,000 | 40,000 | 1.000 |" in page
    assert "vLLM 40.5 s, 90.0 GB of GPU memory, 4,096 MiB" in page and "2026-11-30, commit 01234567" in page


@pytest.mark.parametrize(("tables", "words"), [((True, True), "its tuned"), ((True, False), "default")])
def test_a_mixture_of_experts_is_named_with_its_layers_and_vllms_tiles(
    tables: tuple[bool, bool], words: str, folder: Path
) -> None:
    data = json.loads((folder / VLLM).read_text())
    assert "Triton tiles" not in vllm_block(folder), "a dense model has none"
    entry = data["models"].pop("llama-3-8b")
    good = [one for one in entry["processes"] if "error" not in one]
    for one, table in zip(good, tables, strict=False):
        one["triton_tables"] = {"128 experts, width 768": table}
    data["models"]["qwen3-30b-a3b"] = entry
    (folder / VLLM).write_text(json.dumps(data))
    page = vllm_block(folder)
    assert "| Qwen3 30B-A3B: batch | vLLM, ms per step |" in page
    assert f"vLLM's experts ran with {words} Triton tiles." in page


def test_the_headline_begins_with_steps_and_whole_requests_by_the_packaged_library(folder: Path) -> None:
    step, requests = headline_rows(folder, [])
    assert step.use == "decode steps of Llama 3 8B in vLLM, bf16" and step.rival == "vLLM alone"
    assert (step.problems, step.below_098, requests.problems) == (2, 0, 1)
    assert step.geomean == pytest.approx(1.1806, abs=1e-4) and step.worst == pytest.approx(1.1806, abs=1e-4)
    assert "over vLLM alone" in headline_table([step, requests], linked=False)


def test_the_summary_has_a_row_for_each_mode(folder: Path) -> None:
    tuned = [row for row in engine_rows(folder) if row["model"] == "llama-3-8b, tuned"]
    assert [row["geomean"] for row in tuned if row["mode"] == "decode"] == [2.0]
    rows = {row["mode"]: row for row in engine_rows(folder) if row not in tuned}
    assert rows.keys() == {"decode", "end_to_end", "first_token", "prefill"}
    decode = rows["decode"]
    assert (decode["suite"], decode["model"], decode["cells"], decode["pairs"]) == ("vllm", "llama-3-8b", 2, 2)
    assert decode["geomean"] == pytest.approx(1.1806, abs=1e-4) and decode["min"] == pytest.approx(1.1806, abs=1e-4)
    assert decode["commit"] == MADE["commit"] and decode["file"] == VLLM


def test_without_the_file_there_is_a_line_and_no_row(tmp_path: Path) -> None:
    assert vllm_block(tmp_path) == "Not measured on this GPU." and engine_rows(tmp_path) == []


@pytest.mark.parametrize("lost", ["provenance", "models"])
def test_a_file_without_a_field_is_one_line(folder: Path, lost: str) -> None:
    data = json.loads((folder / VLLM).read_text())
    del data[lost]
    (folder / VLLM).write_text(json.dumps(data))
    with pytest.raises(RecordError, match=r"vllm\.json cannot be read"):
        engine_rows(folder)


def test_cuda_l2_counts_where_its_kernels_sum_as_they_claim() -> None:
    folder = ROOT / "results" / "h100"
    (row,) = [row for row in headline_rows(folder, []) if "CUDA-L2" in row.use]
    data = json.loads((folder / "cuda_l2.json").read_text(encoding="utf-8"))
    assert row.problems == 74 < len(data["rows"]) and row.worst > 1
