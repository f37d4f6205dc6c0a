"""Log lines and their levels, and the few lines by which a program shows, silences or files them."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.problem import Problem
from outblas.dispatch import device_registry, exclusion
from outblas.dispatch.decide import LeftToTorch
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.source import make_source
from outblas.records.library import Library
from outblas.runtime import kernel_loader, nvrtc
from outblas.runtime.packaged_cubins import PACKAGED
from support.dispatch_fixture import LIBRARY, PLAIN, TUNED, WEIGHT, A, rows
from support.gpus.known import H200
from support.helpers import ROOT, SOURCE_PATH

_PAGE = (ROOT / "docs/use/environment-variables.md").read_text(encoding="utf-8")
#: The three snippets of the page's section, in its order.
SEE_DECISIONS, SILENCE, TO_A_FILE = re.findall(r"```python\n(.*?)```", _PAGE.partition("## Logging\n")[2], re.S)
#: A program that decides one product twice, of a device whose list of exclusions is malformed, and fails one choice.
PROGRAM = """
import logging, sys
from outblas.dispatch.device_state import DeviceState
from support.dispatch_fixture import A, LIBRARY, WEIGHT
from support.gpus.known import H200

device = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
for _ in range(2):
    device.decide(A, WEIGHT, None, "plain")
logging.getLogger("outblas.dispatch").warning("outblas leaves a product to torch")
assert not logging.getLogger("outblas.dispatch.device_state").handlers
"""
DECISION = "(64, 256) by (256, 128) in fp16: sm90_wgmma_gemm:"


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, logger="outblas"):
        yield


def run(snippet: str, folder: Path) -> str:
    """Run a snippet and the program; return its stderr."""
    path = os.pathsep.join((SOURCE_PATH, str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "OUTBLAS_EXCLUDE": "no-shape"}
    command = [sys.executable, "-c", snippet + PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=folder)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    return done.stderr


def test_by_default_only_warnings_are_shown(tmp_path: Path) -> None:
    shown = run("", tmp_path)
    assert "OUTBLAS_EXCLUDE has no effect for 'no-shape'" in shown and DECISION not in shown
    assert "outblas leaves a product to torch" in shown, "by Python's handler of last resort: OutBLAS adds no handler"


def test_a_program_sees_every_decision_once(tmp_path: Path) -> None:
    shown = run(SEE_DECISIONS, tmp_path)
    assert shown.count(DECISION) == 1 and "INFO:outblas.dispatch.device_state:(64, 256)" in shown


def test_a_program_silences_it(tmp_path: Path) -> None:
    assert run(SILENCE, tmp_path) == ""


def test_a_program_writes_it_to_a_file(tmp_path: Path) -> None:
    shown = run(TO_A_FILE, tmp_path)
    written = (tmp_path / "decisions.log").read_text()
    assert DECISION not in shown and written.count(DECISION) == 1 and " INFO " in written


def test_every_warning_can_be_silenced_by_one_filter() -> None:
    """Each text begins with the name, in upper or lower case, as the filter is matched at the beginning."""
    found = 0
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "warnings.warn":
                text = call.args[0]
                text = named[text.id] if isinstance(text, ast.Name) else text
                begin = ast.unparse(text).lstrip("f\"'")
                assert begin.startswith(("outblas", "{VARIABLE}", "{EXCLUDE_VARIABLE}", "{name}")), f"{path}: {begin}"
                found += 1
    assert found > 10
    assert exclusion.EXCLUDE_VARIABLE.startswith("OUTBLAS_")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "outblas")
        warnings.warn("OUTBLAS_EXCLUDE has no effect", RuntimeWarning, stacklevel=1)


def test_a_decision_for_one_call_alone_is_a_detail(caplog: pytest.LogCaptureFixture) -> None:
    def later(*_: Any) -> Any:
        raise LeftToTorch("its choice is being made", provisional=True)

    device = DeviceState(H200, Library("h200", LIBRARY.rows), lambda *_: (None, 0.0), any_shape=later)
    device.decide(rows(8, 256), WEIGHT, None, "plain")
    device.decide(A, WEIGHT, None, "plain")
    levels = [(record.levelno, record.name, "being made" in record.getMessage()) for record in caplog.records]
    assert levels == [
        (logging.DEBUG, "outblas.dispatch.device_state", True),
        (logging.INFO, "outblas.dispatch.device_state", False),
    ]
    device.gate(A, WEIGHT)
    assert caplog.messages[-1].startswith("(64, 256) by (256, 128) in fp16, with its gate: torch for 64_128_256_TN")


def test_a_compilation_is_a_detail(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PACKAGED, "get", lambda source, arch: None)
    monkeypatch.setattr(nvrtc, "compile_tuned", lambda *_: SimpleNamespace(from_cache=False))
    kernel_loader.kernel_code(make_source(TUNED, PLAIN), config_name(PLAIN))
    ((name, level, text),) = caplog.record_tuples
    assert (name, level) == ("outblas.runtime.kernel_loader", logging.DEBUG)
    assert text.startswith(f"{config_name(PLAIN)} compiled in ") and Problem(64, 128, 256) == TUNED


@pytest.mark.filterwarnings("ignore:outblas uses torch.matmul")
def test_a_device_says_once_which_library_it_uses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(device_registry, "devices", {})
    monkeypatch.setattr(device_registry, "libraries", {})
    monkeypatch.setenv("OUTBLAS_LIBRARY", "")
    for _ in range(2):
        device_registry.device_state(0)
    (text,) = (text for name, _, text in caplog.record_tuples if name == "outblas.dispatch.device_registry")
    assert text.startswith("cuda:0 is h200; libraries: ") and "rows" in text
