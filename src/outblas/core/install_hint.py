"""The command that installs a missing optional package: one text for errors, warnings and ``outblas doctor``."""

from __future__ import annotations


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the command that installs OutBLAS with some extras, to be run in a checkout of the repository.

    The package is in no registry, so a command with the name ``outblas`` would find nothing.

    Args:
        extras: Names of extras in ``pyproject.toml``, as in ``"gpu"``. None at all: the base install.
        pip: The program, as in ``"/opt/venv/bin/python -m pip"``.
    """
    target = f"'.[{','.join(extras)}]'" if extras else "."
    return f"{pip} install {target} in a checkout of outblas"
