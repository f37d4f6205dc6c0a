"""scripts/scale_out.py: GPUs that --together does not have, or would not take, are refused before anything runs."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest

from helpers import ROOT


@pytest.fixture(name="script")
def script_fixture() -> Any:
    spec = importlib.util.spec_from_file_location("scale_out", ROOT / "scripts" / "scale_out.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("gpus", "visible", "told"),
    [("2,3", None, "takes GPU 0"), ("0,1", "4,5", "fewer than 3 GPUs"), ("0,1", "", "fewer than 3 GPUs")],
)
def test_together_takes_the_first_gpus_that_are_visible(
    gpus: str, visible: str | None, told: str, script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(script, "timed", lambda *arguments: pytest.fail("it must not run"))
    monkeypatch.setattr(sys, "argv", ["scale_out.py", "--together", "--gpus", gpus])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_together_gives_each_run_gpus_of_its_own(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Done:
        returncode = 0

        def communicate(self) -> tuple[str, None]:
            return "words\n{}\n", None

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    monkeypatch.setattr(script, "part", lambda arguments, places, command: given.append(places) or Done())
    assert script.together(None, 2, "command") == ({}, {}) and given == [["7"], ["5", "3"]]
