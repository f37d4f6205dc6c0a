"""The command that installs a missing optional package: one text for errors, warnings and ``outblas doctor``."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from outblas.core.errors import ToolchainMissing

#: Extras of the distribution outblas; all others are of outblas-lab.
_OWN = ("tune", "compile", "gpu", "examples")
#: Extras that bring torch and serve a machine without a GPU, too.
_WITH_TORCH = {"rl", "train-llm", "examples"}
#: Installs torch without the gigabytes of CUDA, which pip takes by default.
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the command that installs extras, e.g. ``pip install 'outblas[gpu]'``.

    It serves a wheel and a checkout alike: pip adds the packages of an extra to an installed outblas.
    If an extra would bring torch to a machine without an NVIDIA GPU, the command for torch's CPU build comes first.

    Args:
        extras: Names of extras in one ``pyproject.toml`` or both, not checked; at least one.
        pip: The program, as in ``"/opt/venv/bin/python -m pip"``.
    """
    own = ",".join(name for name in extras if name in _OWN)
    labs = ",".join(name for name in extras if name not in _OWN)
    targets = [f"'{package}[{names}]'" for package, names in (("outblas", own), ("outblas-lab", labs)) if names]
    command = f"{pip} install {' '.join(targets)}"
    has_gpu = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))  # the second one in WSL
    if _WITH_TORCH.isdisjoint(extras) or "gpu" in extras or has_gpu or importlib.util.find_spec("torch"):
        return command
    return f"{CPU_TORCH} (otherwise pip downloads several GB of CUDA), then {command}"


def needed(module: str, expected: str, extra: str) -> Any:
    """Import a module of an optional package and return it.

    Args:
        module: Full name, e.g. ``"pyarrow.parquet"``.
        expected: The package in words, e.g. ``"pyarrow, which reads and writes Parquet files"``.

    Raises:
        ToolchainMissing: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, missing = module.partition(".")[0], (error.name or "").partition(".")[0]
        is_absent = isinstance(error, ModuleNotFoundError) and missing == package
        state = "is not installed" if is_absent else f"cannot be imported ({error})"
        raise ToolchainMissing(f"{package} {state}", expected, install_hint(extra)) from error


def lab_hint() -> str:
    """Return the remedy for an error text where outblas-lab is missing."""
    return "pip install ./lab in an outblas checkout, or the outblas-lab wheel"
