"""Checks of ``outblas doctor`` for what outblas-lab uses: compilers and the jail of free kernels, and its extras."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from outblas.cli.checks.health import Check
from outblas.core.errors import OutblasError, ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas_lab.cli.lab_commands import MODULES
from outblas_lab.jail import canary, landlock, seccomp, toolchain
from outblas_lab.jail.confinement import report
from outblas_lab.recordings.recording import Recording, packaged

_EXTRAS = ("rl", "llm", "mcp", "train-llm")


def _recording() -> Check:
    name = "recording"
    recordings = packaged()
    if not recordings:
        return Check(name, None, "none in this installation", "install the package afresh")
    sizes = []
    for each in recordings:
        try:
            recording = Recording.load(each)
        except ToolchainMissing as error:  # tuning on a recording needs it; a call on a GPU does not
            return Check(name, None, error.wrong, error.do)
        except OutblasError as error:
            return Check(name, False, str(error), "install the package afresh", True)
        sizes.append(f"{each}: {len(recording.problems)} problems x {len(recording.catalogue)} candidates")
    return Check(name, True, "; ".join(sizes), "", True)


def _nvcc() -> Check:
    try:
        toolchain.include_folders()
        found = toolchain.find_nvcc()
    except OutblasError as error:
        return Check("nvcc", None, error.wrong, f"{error.do} (needed by free kernels)")
    return Check("nvcc", True, f"{found.path}, {found.version}")


def _cutlass() -> Check:
    try:
        include, version = toolchain.locate_cutlass()
    except OutblasError as error:
        return Check("cutlass", None, error.wrong, f"{error.do} (needed by free kernels that use CUTLASS)")
    return Check("cutlass", True, f"{version} in {include}")


def _jail() -> Check:
    """Check the limits that would hold a free kernel's worker here. ``outblas eval --file`` says what each one does."""
    lines = report()
    missing = [line.words for line in lines if not line.on and line.words.startswith(("no ", "needs"))]
    holds, open_parts = (", ".join(line.part for line in lines if line.on is on) for on in (True, False))
    do = f"run free kernels in a container: {'; '.join(missing)}" if missing else ""
    return Check("jail", None if missing else True, f"limits {holds}; not covered: {open_parts}", do)


def _canary() -> Check:
    """Check the outcome of the attacks that a worker tries from inside that jail."""
    outcomes = canary.run_canary()
    found = []
    for title, held in (("held", True), ("got through", False), ("could not be tried", None)):
        if attacks := [each for each in outcomes if each.held is held]:
            words = (f"{each.attack} ({each.words})" if held is None else each.attack for each in attacks)
            found.append(f"{title}: {', '.join(words)}")
    if not any(each.held is False for each in outcomes):
        return Check("jail canary", True, "; ".join(found))
    do = "run free kernels in a container"
    if not (landlock.abi() and seccomp.available()):
        return Check("jail canary", None, "; ".join(found), do)
    return Check("jail canary", False, "; ".join(found), f"{do}, and report this line")


def _extra(extra: str) -> Check:
    absent = [module for module in MODULES[extra] if importlib.util.find_spec(module) is None]
    name = f"extra [{extra}]"
    if absent:
        return Check(name, None, f"without {', '.join(absent)}", install_hint(extra))
    return Check(name, True, ", ".join(MODULES[extra]))


#: The checks in their order.
CHECKS: tuple[Callable[[], Check], ...] = (
    _recording,
    _nvcc,
    _cutlass,
    _jail,
    _canary,
    *(functools.partial(_extra, extra) for extra in _EXTRAS),
)
