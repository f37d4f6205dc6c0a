"""The command that installs a missing optional package: one text for errors, warnings and ``outblas doctor``."""

from __future__ import annotations

#: Extras of the distribution outblas; all others are of outblas-lab.
_OWN = ("tune", "compile", "gpu", "examples")


def install_hint(*extras: str, pip: str = "pip") -> str:
    """Return the command that installs extras, e.g. ``pip install 'outblas[gpu]'``.

    It serves a wheel and a checkout alike: pip adds the packages of an extra to an installed outblas.

    Args:
        extras: Names of extras in one ``pyproject.toml`` or both, not checked; at least one.
        pip: The program, as in ``"/opt/venv/bin/python -m pip"``.
    """
    own = ",".join(name for name in extras if name in _OWN)
    labs = ",".join(name for name in extras if name not in _OWN)
    targets = [f"'{package}[{names}]'" for package, names in (("outblas", own), ("outblas-lab", labs)) if names]
    return f"{pip} install {' '.join(targets)}"


def lab_hint() -> str:
    """Return the remedy for an error text where outblas-lab is missing."""
    return "pip install outblas-lab (./lab in a checkout of outblas)"
