"""The command that installs a missing optional package: one text for errors, warnings and ``outblas doctor``."""

from __future__ import annotations


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the remedy for an error text: a command and where to run it, for people and not for a shell.

    ``install_hint("gpu")`` is "pip install '.[gpu]' in a checkout of outblas". The package is in no registry, so a
    command with the name ``outblas`` would find nothing.

    Args:
        extras: Names of extras in ``pyproject.toml``, joined by commas and not checked. No extras:
            ``install_hint()`` is "pip install . in a checkout of outblas".
        pip: The program, as in ``"/opt/venv/bin/python -m pip"``.
    """
    target = f"'.[{','.join(extras)}]'" if extras else "."
    return f"{pip} install {target} in a checkout of outblas"
