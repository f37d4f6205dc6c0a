"""benchmarks/profile_regimes.py and the table that is made of its file, without a GPU and without ncu."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pages.publish_results import check_published, publish
from pages.study_blocks import counters_table, counters_text, short_name

from outblas.core.config import config_name
from outblas.core.errors import DeviceError, RecordError
from outblas.core.problem import Problem
from outblas.core.roofline import regime
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas_lab.pool import ncu
from outblas_lab.pool.counter_file import read_counters
from support.fake_gpu import PROVENANCE
from support.gpus.known import H200
from support.helpers import ROOT, module_of_file

GOLDEN = ROOT / "tests" / "support" / "golden"
ALGO = "index=3/8 id=66 tile=64x32"


def item(mnk: tuple[int, int, int], config: Any, chosen_by: str, l2: str) -> dict[str, Any]:
    problem = Problem(*mnk)
    head = {"group": "memory | HBM", "problem": problem.key, "regime": regime(problem, H200), "l2": l2}
    return {**head, "config": config_name(config), "chosen_by": chosen_by, "algo": "00" * 64, "detail": ALGO}


#: The profiled entries of ``ncu_raw.csv``.
ITEMS = [
    item((64, 4096, 4096), Sm90WgmmaConfig(64, 64, 128, 6, split_k=2, store="direct"), "library", "flushed"),
    item((64, 4096, 64), Sm80DirectConfig(32, 64, 2, 2), "model", "flushed"),
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = module_of_file(ROOT / "benchmarks" / "profile_regimes.py", monkeypatch)
    monkeypatch.setattr(module, "collect_provenance", lambda command: {**PROVENANCE, "command": command})
    monkeypatch.setattr(module, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(module, "plan", lambda gpu: ITEMS)
    monkeypatch.setattr(module.ncu, "find_ncu", lambda named: named or "ncu")
    monkeypatch.setattr(module.ncu, "version", lambda tool: "2025.3.0.0")
    monkeypatch.setattr(module.ncu, "known_metrics", lambda *_, **__: ncu.METRICS[:-1])
    return module


@pytest.fixture
def data(script: Any) -> dict[str, Any]:
    first, second, third, fourth = ncu.between_marks(ncu.parse((GOLDEN / "ncu_raw.csv").read_text()))
    rows = script.rows_of(ITEMS, [[first, second], [third, fourth]])
    return {"format": 1, "provenance": {**PROVENANCE, "ncu": "2025.3.0.0"}, "metrics_absent": [], "rows": rows}


def run(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["profile_regimes.py", "--out", str(out), *more])
    return int(script.main())


def test_the_problems_are_of_their_regimes(script: Any) -> None:
    of_group = {
        "launch": lambda p: regime(p, H200) == "launch",
        "memory, 10⁹ FLOP": lambda p: regime(p, H200) == "memory_1e9",
        "compute, 10⁹–10¹⁰ FLOP": lambda p: regime(p, H200) in ("compute_1e9", "compute_1e10"),
        "≥ 10¹¹ FLOP": lambda p: p.flops >= 1e11 and regime(p, H200).startswith("compute"),
    }
    assert list(script.REGIMES) == list(of_group)
    for group, shapes in script.REGIMES.items():
        assert len(set(shapes)) == 2
        for problem in (Problem(*shape) for shape in shapes):
            assert of_group[group](problem), problem.key
            assert Library.packaged("h200").lookup(problem) is not None


def test_ours_is_the_librarys_kernel_without_pdl_or_else_the_models_first(script: Any) -> None:
    problem, plain, pdl = Problem(64, 4096, 64), Sm80DirectConfig(32, 64), Sm80DirectConfig(16, 64, pdl=True)
    won = LibraryRow(problem, plain=LibraryChoice(plain, 1.1, 1.1, 1.1), pdl=LibraryChoice(pdl, 1.2, 1.2, 1.2))
    assert script.choose(problem, Library("h200", (won,)), H200) == (plain, "library")
    fell = LibraryRow(problem, "torch", pdl=LibraryChoice(pdl, 1.2, 1.2, 1.2))
    for library in (Library("h200", (fell,)), Library("h200", ())):
        config, chosen_by = script.choose(problem, library, H200)
        assert chosen_by == "model" and not config.pdl and why_illegal(problem, config, H200) is None


def test_every_side_has_all_its_kernels(data: dict[str, Any]) -> None:
    sides = [(row["problem"], row["side"], row["chosen_by"], len(row["kernels"])) for row in data["rows"]]
    first, second = (entry["problem"] for entry in ITEMS)
    assert sides == [
        (first, "ours", "library", 1),
        (first, "lt_auto", "autotuned", 2),
        (second, "ours", "model", 1),
        (second, "lt_auto", "autotuned", 1),
    ]
    assert data["rows"][0]["name"] == ITEMS[0]["config"] and data["rows"][1]["name"] == ALGO


def test_the_file_has_the_rows_in_order_and_says_what_was_not_asked(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches = ncu.parse((GOLDEN / "ncu_raw.csv").read_text())
    asked = []
    # The first problem warm, the second flushed, which is profiled first.
    monkeypatch.setattr(script, "plan", lambda gpu: [{**ITEMS[0], "l2": "warm"}, ITEMS[1]])

    def profile(tool: str, target: list[str], metrics: Any, cache: str, *_: Any) -> list[ncu.ProfiledLaunch]:
        asked.append((cache, json.loads(Path(target[-1]).read_text())["works"][0]["problem"]))
        assert target[:3] == [sys.executable, "-m", "outblas_lab.pool.ncu_target"]
        assert metrics == ncu.METRICS[:-1]
        return launches[5:] if cache == "flushed" else launches[:5]

    monkeypatch.setattr(script.ncu, "profile", profile)
    out = tmp_path / "results" / "ncu.json"
    assert run(script, monkeypatch, out, "--keep", str(tmp_path / "kept")) == 0
    assert asked == [("flushed", ITEMS[1]["problem"]), ("warm", ITEMS[0]["problem"])]
    found = read_counters(out)
    assert [row["problem"] for row in found["rows"]] == [entry["problem"] for entry in ITEMS for _ in range(2)]
    assert found["metrics_absent"] == [ncu.METRICS[-1]] and found["provenance"]["ncu"] == "2025.3.0.0"
    assert (tmp_path / "kept" / "warm.json").exists()


def test_a_refusal_writes_nothing(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise DeviceError("ncu may not read", "the right to", "run as root")

    monkeypatch.setattr(script.ncu, "known_metrics", refuses)
    assert run(script, monkeypatch, tmp_path / "ncu.json") == 1
    assert capsys.readouterr().err == "error: ncu may not read; expected the right to; run as root\n"
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_golden(data: dict[str, Any]) -> None:
    path, text = GOLDEN / "ncu_table.md", counters_table(data) + "\n"
    if os.environ.get("OUTBLAS_REGENERATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_line_of_the_table_has_every_cell(data: dict[str, Any]) -> None:
    lines = [line for line in counters_table(data).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 5 and {line.replace("\\|", "").count("|") for line in lines} == {16}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("nvjet_hsh_64x32_64x16_2x1_v_bz_TNT", "nvjet_hsh_64x32_64x16_2x1_v_bz_TNT"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(const float *)", "cublasLt::splitKreduce_kernel"),
        ("void cutlass::Kernel2<cutlass_80_gemm_tn>(T1::Params)", "cutlass_80_gemm_tn"),
    ],
)
def test_names_are_short(name: str, short: str) -> None:
    assert short_name(name) == short


def test_without_the_file_the_notes_say_that_it_is_to_be_measured(tmp_path: Path) -> None:
    text = counters_text(tmp_path / "ncu.json")
    assert text.startswith("To be measured") and "benchmarks/profile_regimes.py" in text


def _lose(data: dict[str, Any], change: str) -> Any:
    kernel = data["rows"][1]["kernels"][0]
    changes: dict[str, Any] = {
        "format": lambda: data.update(format=2),
        "rows": lambda: data.pop("rows"),
        "provenance": lambda: data["provenance"].update(gpu=None),
        "problem": lambda: data["rows"][0].update(problem="64"),
        "side": lambda: data["rows"][0].pop("side"),
        "kernels": lambda: data["rows"][0].update(kernels=[]),
        "cycles": lambda: kernel.pop("cycles"),
        "word": lambda: kernel.update(cycles="many"),
        "stalls": lambda: kernel.update(stalls=["wait"]),
        "ratio": lambda: kernel.update(stalls=[["wait", None]]),
        "name": lambda: data["rows"][0].update(name=None),
    }
    changes[change]()
    return data


@pytest.mark.parametrize(
    "change",
    ["format", "rows", "provenance", "problem", "side", "kernels", "cycles", "word", "stalls", "ratio", "name"],
)
def test_a_damaged_file_is_one_clear_line(data: dict[str, Any], tmp_path: Path, change: str) -> None:
    path = tmp_path / "ncu.json"
    path.write_text(json.dumps(_lose(data, change)))
    with pytest.raises(RecordError, match="its format is" if change == "format" else "is damaged") as error:
        read_counters(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1', "\x00"])
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ncu.json"
    path.write_text(text)
    with pytest.raises(RecordError):
        counters_text(path)


def test_notes_that_do_not_show_the_file_are_stale(data: dict[str, Any], tmp_path: Path) -> None:
    from support.bench_fixture import write_bench

    folder, notes = tmp_path / "results" / "h200", tmp_path / "docs" / "kernels" / "cost-model.md"
    write_bench(folder / "grid.parquet")
    begin, end = "<!-- ncu:begin -->", "<!-- ncu:end -->"
    notes.parent.mkdir(parents=True)
    notes.write_text(f"before\n{begin}\n{end}\nafter\n")
    place = (folder, tmp_path)
    publish(*place)
    assert check_published(*place) == [] and "To be measured" in notes.read_text()
    (folder / "ncu.json").write_text(json.dumps(data))
    assert any(str(notes) in line and "stale" in line for line in check_published(*place))
    publish(*place)
    assert check_published(*place) == []
    assert notes.read_text() == f"before\n{begin}\n{counters_table(data)}\n{end}\nafter\n"
