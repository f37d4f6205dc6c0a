"""The command that installs a missing optional package: one text for errors, warnings and ``outblas doctor``."""

from __future__ import annotations

import importlib.util
import os

#: Extras of the distribution outblas; all others are of outblas-lab.
_OWN = ("tune", "compile", "gpu", "examples")
#: Extras that bring torch and serve a machine without a GPU, too.
_WITH_TORCH = {"rl", "train-llm", "examples"}
#: Installs torch without the gigabytes of CUDA, which pip takes by default.
CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the remedy for an error text: a command and where to run it, for people and not for a shell.

    ``install_hint("gpu")`` is "pip install '.[gpu]' in a checkout of outblas". The packages are in no registry, so a
    command with the name ``outblas`` would find nothing. An extra of outblas-lab is in ``lab/``: ``'./lab[rl]'``.
    If an extra would bring torch to a machine without an NVIDIA GPU, the command for torch's CPU build comes first.

    Args:
        extras: Names of extras in one ``pyproject.toml`` or both, not checked. No extras:
            ``install_hint()`` is "pip install . in a checkout of outblas".
        pip: The program, as in ``"/opt/venv/bin/python -m pip"``.
    """
    own = ",".join(name for name in extras if name in _OWN)
    labs = ",".join(name for name in extras if name not in _OWN)
    targets = [f"'.[{own}]'"] if own else [] if labs else ["."]
    targets += [f"'./lab[{labs}]'"] if labs else []
    command = f"{pip} install {' '.join(targets)} in a checkout of outblas"
    has_gpu = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))  # the second one in WSL
    if _WITH_TORCH.isdisjoint(extras) or "gpu" in extras or has_gpu or importlib.util.find_spec("torch"):
        return command
    return f"{CPU_TORCH} (otherwise pip downloads several GB of CUDA), then {command}"


def lab_hint() -> str:
    """Return the remedy for an error text where outblas-lab is missing."""
    return "pip install outblas-lab (./lab in a checkout of outblas)"
