"""The entry points for vLLM and SGLang: found and called as the engines do, off by default, harmless if they fail."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outblas.adapt import engine_log, engine_plugins, run_enabled
from support.helpers import ROOT, SOURCE_PATH

torch: Any = pytest.importorskip("torch")

#: Group of entry points -> the variable that switches OutBLAS on there.
GROUPS = {"vllm.general_plugins": "OUTBLAS_VLLM", "sglang.srt.plugins": "OUTBLAS_SGLANG"}
#: The variables by which the engines' processes know of their own batch-invariant modes.
MODES = ("VLLM_BATCH_INVARIANT", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE")

#: What both engines do in a process: find the entry points of the group, load each, then call each.
ENGINE = """
import json, os, sys
from importlib.metadata import entry_points
functions = {}
for group in sys.argv[1:]:
    for entry in entry_points(group=group):
        try:
            functions[group, entry.name] = entry.load()
        except Exception as error:
            sys.exit(f"{entry.name}: {error}")
for _ in range(2):  # a process may load its plugins more than once
    for function in functions.values():
        function()
loaded = {"torch": "torch" in sys.modules, "dispatch": "outblas.dispatch.enable" in sys.modules}
found = {"names": list(functions), **loaded}
"""
#: Torch's own start of CUDA on a fake driver, and the switch of the CPU in place of the GPU's.
FIRST_CUDA = """
import torch
from outblas.dispatch import enable
enable._switch, enable.why_not = enable.Switch("CPU", lambda guarantee: ""), lambda: ""
queued = [call for call, _ in torch.cuda._queued_calls if call.__module__.startswith("outblas")]
found["queued"], found["before"] = len(queued), enable.enabled()
torch.cuda._queued_calls[:] = [one for one in torch.cuda._queued_calls if one[0] in queued]
torch.cuda._is_compiled, torch.cuda._cudart = lambda: True, object()
torch._C._cuda_getDeviceCount, torch._C._cuda_init = lambda: 1, lambda: None
torch._C._cuda_isInBadFork, torch._C._cuda_getCurrentRawStream = lambda: False, lambda index: 0
child = os.fork()
torch.cuda._lazy_init()
torch.mm(torch.ones(2, 3), torch.ones(3, 2))
found["on"], found["products"] = enable.enabled(), enable.status()["torch"]["torchs"]
if child == 0:
    os._exit(0 if found["on"] and found["products"] == 1 else 1)
found["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
REPORT = "print(json.dumps(found))"


def run_engine(folder: Path, groups: Sequence[str], program: str, **variables: str) -> tuple[dict[str, Any], str]:
    """Run a stand-in for an engine beside an installed OutBLAS; return what it found, and its stderr."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = folder / "outblas-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outblas\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in project["entry-points"][group].items()) for group in groups
    ]
    (about / "entry_points.txt").write_text("\n".join(lines))
    own = (*GROUPS.values(), *MODES, "OUTBLAS_DISABLE")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    environment = {**kept, "PYTHONPATH": os.pathsep.join((str(folder), SOURCE_PATH)), **variables}
    command = [sys.executable, "-c", program + REPORT, *groups]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_without_its_variable_nothing_is_imported(group: str, tmp_path: Path) -> None:
    others = {name: "1" for name in GROUPS.values() if name != GROUPS[group]}
    found, stderr = run_engine(tmp_path, [group], ENGINE, **{GROUPS[group]: "0"}, **others)
    assert found == {"names": [[group, "outblas"]], "torch": False, "dispatch": False} and stderr == ""


def test_it_is_on_from_the_first_use_of_cuda(tmp_path: Path) -> None:
    """Not before: the parent of workers must be able to fork them. A forked worker switches on by itself."""
    found, errors = run_engine(tmp_path, list(GROUPS), ENGINE + FIRST_CUDA, **dict.fromkeys(GROUPS.values(), "1"))
    assert [name for _, name in found["names"]] == ["outblas", "outblas"]
    assert (found["queued"], found["before"], found["dispatch"]) == (1, False, False)
    assert (found["on"], found["products"], found["child"]) == (True, 1, 0), errors


LOGS_OF_VLLM = """
import logging.config
logging.config.dictConfig({
    "version": 1, "disable_existing_loggers": False,
    "handlers": {"own": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}},
    "loggers": {"vllm": {"handlers": ["own"], "level": "INFO", "propagate": False}},
})
"""


def test_vllm_shows_that_it_is_on(tmp_path: Path) -> None:
    """vLLM gives its own logger a handler, and leaves the root logger without one and at its level, WARNING."""
    program = LOGS_OF_VLLM + ENGINE + FIRST_CUDA
    _, errors = run_engine(tmp_path, ["vllm.general_plugins"], program, OUTBLAS_VLLM="1")
    assert errors.count("outblas is enabled") == 2, "the parent, and the worker that it forked"


@pytest.mark.parametrize(
    ("group", "variable", "value", "on"),
    [
        ("vllm.general_plugins", MODES[0], "1", False),
        ("vllm.general_plugins", MODES[0], "0", True),
        ("sglang.srt.plugins", MODES[1], "True", False),
        ("sglang.srt.plugins", MODES[1], "0", True),
    ],
)
def test_an_engine_that_keeps_its_results_batch_invariant_keeps_its_kernels(
    group: str, variable: str, value: str, on: bool, tmp_path: Path
) -> None:
    """SGLang sets its variable after the plug-ins of the launching process, and writes 0 without the mode, too."""
    program = f"{ENGINE}os.environ[{variable!r}] = {value!r}\n{FIRST_CUDA}"
    found, errors = run_engine(tmp_path, [group], program, **{GROUPS[group]: "1"})
    assert found["on"] == on and ("batch-invariant" in errors) != on


# -- what may fail ---------------------------------------------------------------------------------------------------


@pytest.fixture(name="cuda_is_up")
def cuda_is_up_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which torch has initialised CUDA, and the plugin was not called yet."""
    for variable in (*GROUPS.values(), *MODES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(engine_plugins, "_registered", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize(
    ("start", "variable"),
    [(engine_plugins.start_in_vllm, "OUTBLAS_VLLM"), (engine_plugins.start_in_sglang, "OUTBLAS_SGLANG")],
)
def test_a_gpu_that_is_in_use_is_switched_on_at_once(
    cuda_is_up: None, start: Any, variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(run_enabled, "switch_on", lambda: calls.append(1) or "")
    monkeypatch.setattr(engine_plugins, "_enter_graphs_of_vllm", str)
    monkeypatch.setattr(engine_plugins, "_serve_experts_of_vllm", str)
    monkeypatch.setattr(engine_log, "log_once_settled", lambda log: calls.append(2))
    with caplog.at_level(logging.INFO), caplog.at_level(logging.INFO, logger="outblas"):  # a command may have set it
        start()
        assert not calls
        monkeypatch.setenv(variable, "1")
        start()
        start()
    ((level, text),) = logged(caplog)
    assert calls == [1, 2] and level == "INFO" and text.startswith("outblas is enabled")


GRAPHS, EXPERTS = "_enter_graphs_of_vllm", "_serve_experts_of_vllm"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([GRAPHS], "graphs that the engine compiles: {0}"),
        ([EXPERTS], "layers of experts: {0}"),
        ([GRAPHS, EXPERTS], "graphs that the engine compiles: {0}; and in layers of experts: {0}"),
    ],
)
def test_the_log_says_which_parts_stay_and_why(
    cuda_is_up: None, parts: list[str], words: str, fails: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def enter() -> str:
        if fails:
            raise AttributeError("no\nsuch attribute")
        return "no such attribute"

    monkeypatch.setattr(run_enabled, "switch_on", str)
    for part in (GRAPHS, EXPERTS):
        monkeypatch.setattr(engine_plugins, part, enter if part in parts else str)
    monkeypatch.setattr(engine_log, "log_once_settled", lambda log: None)
    monkeypatch.setenv("OUTBLAS_VLLM", "1")
    engine_plugins.start_in_vllm()
    reason = "AttributeError: " * fails + "no such attribute"
    assert logged(caplog) == [("WARNING", f"outblas is enabled, except in {words.format(reason)}")]


def test_a_reason_against_it_is_one_line(
    cuda_is_up: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_enabled, "switch_on", lambda: "no library covers L40")
    monkeypatch.setenv("OUTBLAS_VLLM", "1")
    engine_plugins.start_in_vllm()
    assert logged(caplog) == [("WARNING", "outblas has no effect: no library covers L40")]


def test_an_error_is_one_line_and_the_engine_goes_on(
    cuda_is_up: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> str:
        raise RuntimeError("the driver\nis gone")

    monkeypatch.setattr(run_enabled, "switch_on", fail)
    monkeypatch.setenv("OUTBLAS_VLLM", "1")
    engine_plugins.start_in_vllm()
    ((level, text),) = logged(caplog)
    assert level == "WARNING" and "RuntimeError: the driver is gone; the engine continues" in text


def test_a_torch_without_its_queue_is_one_line(
    cuda_is_up: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delattr(torch.cuda, "_lazy_call")
    monkeypatch.setenv("OUTBLAS_VLLM", "1")
    engine_plugins.start_in_vllm()
    ((level, text),) = logged(caplog)
    assert level == "WARNING" and "_lazy_call" in text and "the engine continues" in text
