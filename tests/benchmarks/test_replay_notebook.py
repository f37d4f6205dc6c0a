"""The notebook of the replay demo: its cells run in order, and it is kept without outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.helpers import ROOT, SOURCE_PATH

NOTEBOOK = json.loads((ROOT / "examples" / "replay_demo.ipynb").read_text(encoding="utf-8"))
SETTINGS = "SAMPLE = 40 "


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_of_a_format_that_tools_read() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    identifiers = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(identifiers)) == len(identifiers)
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and cell["metadata"] == {}


def test_the_notebook_has_no_outputs() -> None:
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert cells and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_the_cells_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib (extra report)")
    matplotlib.use("agg")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE_PATH, os.environ.get("PYTHONPATH", "")]))
    names: dict[str, Any] = {"__name__": "__main__"}
    first, *others = code_cells()
    assert SETTINGS in first
    for cell in (first.replace(SETTINGS, "SAMPLE = 4 "), *others):
        exec(compile(cell, "replay_demo.ipynb", "exec"), names)
    said = capsys.readouterr().out
    assert "2000 problems, 400 kernels" in said
    assert "grid1000 " in said and "matmuls of a step with M = 8" in said
    assert "outblas_64_4096_64_tn_fp16_fp32_plain.cu" in said and "// Compile: nvcc " in said
    assert len(names["problems"]) == 4 and set(names["curves"]) == {*names["AGENTS"], "best recorded"}
    for agent in names["AGENTS"]:
        pairs = zip(names["curves"][agent], names["curves"]["best recorded"], strict=True)
        assert all(found <= limit * 1.0001 for found, limit in pairs), agent
        assert (names["folder"] / agent / "report.html").is_file()
    assert names["folder"].parent == tmp_path


@pytest.mark.slow
def test_jupyter_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient: Any = pytest.importorskip("nbclient", reason="needs jupyter (extra examples)")
    nbformat: Any = pytest.importorskip("nbformat")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE_PATH, os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.reads(json.dumps(NOTEBOOK), as_version=4)
    nbformat.validate(notebook)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    first.source = first.source.replace(SETTINGS, "SAMPLE = 4 ")
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any(output.output_type == "display_data" for cell in notebook.cells for output in cell.get("outputs", ()))
