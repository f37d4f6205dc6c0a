"""Collect the provenance of figures: GPU, driver, toolchain, date, commit, command."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from outblas.core.version import __version__
from outblas.runtime.device import pci_bus_id

_T = TypeVar("_T")
#: Time limit for nvidia-smi and git, seconds: a stuck driver must not hang a run.
_PATIENCE_S = 20
#: Holds pynvml once it was initialised.
_started: list[Any] = []


def script_command(script: str, arguments: Sequence[str] | None = None) -> str:
    """Return the command of a script of the checkout, shell-quoted, for :func:`collect_provenance`.

    Args:
        arguments: its arguments; None: those of this process.
    """
    return shlex.join(["python", script, *(sys.argv[1:] if arguments is None else arguments)])


def collect_provenance(command: str, gpu_index: int | None = 0) -> dict[str, Any]:
    """Return the provenance of a run as JSON values.

    Args:
        gpu_index: CUDA index; None asks for no GPU. A query initialises CUDA.

    Returns:
        ``gpu`` (name) and ``driver`` (version), both None without a GPU; ``toolchain``, see :func:`toolchain`;
            ``date``, UTC in ISO 8601, whole seconds; ``commit``, see :func:`source_commit`; ``command``.
    """
    return {**shared_conditions(gpu_index), "date": utc_now(), "commit": source_commit(), "command": command}


def shared_conditions(gpu_index: int | None = 0) -> dict[str, Any]:
    """Return the provenance that all figures of one result file share, so that a run resumes only under the same.

    Returns:
        ``gpu``, ``driver`` and ``toolchain``, as of :func:`collect_provenance`.
    """
    gpu, driver = (None, None) if gpu_index is None else gpu_and_driver(gpu_index)
    return {"gpu": gpu, "driver": driver, "toolchain": toolchain()}


def provenance_field(provenance: Mapping[str, Any], field: str) -> Any:
    """Return a field of a recording's provenance.

    If the recording has several parts with different values, return all distinct values as one text, joined by ``; ``.
    A part without the field counts as "unknown".
    """
    values = [part.get(field, "unknown") for part in provenance.get("parts", [provenance])]
    if all(value == values[0] for value in values):
        return values[0]
    return "; ".join(dict.fromkeys(map(str, values)))


def start_of_machine() -> str:
    """Return an identifier of the running system's start, which Linux draws at random; empty on other systems."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def utc_now(precision: str = "seconds") -> str:
    """Return the present time, UTC in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec=precision)


def toolchain() -> dict[str, str | None]:
    """Return the versions of outblas, python, nvrtc, torch, cublas and cuda_bindings by these names; None if not
    installed.

    Example: ``{"outblas": "0.2.0", "python": "3.12.3", "nvrtc": "13.0 (wheel 13.0.88)", "torch": "2.11.0+cu130",
    ...}``.
    """
    return {
        "outblas": __version__,
        "python": platform.python_version(),
        "nvrtc": _nvrtc(),
        "torch": _wheel("torch"),  # its suffix names the CUDA version: 2.11.0+cu130
        "cublas": _wheel("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
        "cuda_bindings": _wheel("cuda-bindings"),
    }


def gpu_and_driver(index: int = 0) -> tuple[str | None, str | None]:
    """Return (GPU name, driver version) from pynvml or nvidia-smi; (None, None) if neither answers.

    Args:
        index: CUDA's index, which counts the devices in ``CUDA_VISIBLE_DEVICES``. Without CUDA, nvidia-smi's index.
    """

    def ask(nvml: Any, handle: Any) -> tuple[str | None, str | None]:
        return _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlSystemGetDriverVersion())

    found = _from_nvml(index, ask)
    if found is not None:
        return found
    fields = _from_smi(index, "name,driver_version")
    return (fields[0], fields[1]) if fields is not None else (None, None)


def gpu_state(index: int = 0) -> dict[str, int | None]:
    """Return the present state of a GPU, e.g. ``{"sm_clock_mhz": 1980, "temperature_c": 41}``; None for what is
    unknown.
    """

    def ask(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
        return (
            int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    found = _from_nvml(index, ask)
    if found is None:
        fields = _from_smi(index, "clocks.sm,temperature.gpu")
        found = (_int(fields[0]), _int(fields[1])) if fields is not None else (None, None)
    return {"sm_clock_mhz": found[0], "temperature_c": found[1]}


def source_commit() -> str:
    """Return ``$OUTBLAS_COMMIT``, else the checkout's commit, else ``unknown``. ``-dirty`` follows if tracked files
    changed.
    """
    if named := os.environ.get("OUTBLAS_COMMIT"):
        return named
    here = Path(__file__).resolve().parent
    # If the package is installed inside another project's checkout, git would name that project's commit. So this file
    # must be tracked.
    if _run(["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name]) is None:
        return "unknown"
    head = _run(["git", "-C", str(here), "rev-parse", "HEAD"])
    changed = _run(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"])
    return f"{head}{'-dirty' if changed else ''}" if head else "unknown"


def _from_nvml(index: int, ask: Callable[[Any, Any], _T]) -> _T | None:
    """Return ``ask(nvml, handle)`` for a GPU; None if NVML, its driver or the GPU is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        _start(pynvml)
        address = pci_bus_id(index)
        by_index = pynvml.nvmlDeviceGetHandleByIndex
        return ask(pynvml, by_index(index) if address is None else pynvml.nvmlDeviceGetHandleByPciBusId(address))
    except pynvml.NVMLError:
        return None


def _start(nvml: Any) -> None:
    """Initialise NVML once per process. A bench asks at every problem, and initialising costs more than a query."""
    if nvml not in _started:
        nvml.nvmlInit()
        atexit.register(nvml.nvmlShutdown)
        _started.append(nvml)


def _from_smi(index: int, query: str) -> list[str] | None:
    """Return the fields of an nvidia-smi query (comma-separated names) for a GPU; None if it fails."""
    out = _run(
        ["nvidia-smi", f"--id={pci_bus_id(index) or index}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    )
    fields = [field.strip() for field in out.splitlines()[0].split(",")] if out else []
    return fields if len(fields) == query.count(",") + 1 else None


def _run(command: list[str]) -> str | None:
    """Return a command's output, stripped; None if it is missing, fails or exceeds the time limit."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _nvrtc() -> str | None:
    """Return NVRTC's version; None if it is not installed."""
    from outblas.core.errors import ToolchainMissing
    from outblas.runtime.nvrtc import nvrtc_version

    try:
        return nvrtc_version()
    except ToolchainMissing:
        return None


@functools.cache  # a look through all that is installed
def _wheel(*names: str) -> str | None:
    """Return the version of the first installed distribution of these names; None if none is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _int(text: str) -> int | None:
    """Return a text of digits as an integer; None for other text."""
    return int(text) if re.fullmatch(r"\d+", text) else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
