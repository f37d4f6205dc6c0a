"""The command that installs a missing optional package: one text for errors, warnings and ``outblas doctor``."""

from __future__ import annotations

#: Extras of the distribution outblas; all others are of outblas-lab.
_OWN = ("tune", "compile", "gpu", "examples")


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the remedy for an error text: a command and where to run it, for people and not for a shell.

    ``install_hint("gpu")`` is "pip install '.[gpu]' in a checkout of outblas". The packages are in no registry, so a
    command with the name ``outblas`` would find nothing. An extra of outblas-lab is in ``lab/``: ``'./lab[rl]'``.

    Args:
        extras: Names of extras in one ``pyproject.toml`` or both, not checked. No extras:
            ``install_hint()`` is "pip install . in a checkout of outblas".
        pip: The program, as in ``"/opt/venv/bin/python -m pip"``.
    """
    own = ",".join(name for name in extras if name in _OWN)
    labs = ",".join(name for name in extras if name not in _OWN)
    targets = [f"'.[{own}]'"] if own else [] if labs else ["."]
    targets += [f"'./lab[{labs}]'"] if labs else []
    return f"{pip} install {' '.join(targets)} in a checkout of outblas"


def lab_hint() -> str:
    """Return the remedy for an error text where outblas-lab is missing."""
    return "pip install outblas-lab (./lab in a checkout of outblas)"
