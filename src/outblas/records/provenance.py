"""Where a figure comes from: GPU, driver, toolchain, date, commit, command."""

from __future__ import annotations

import atexit
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from outblas.core.version import __version__
from outblas.runtime.device import pci_bus_id

_T = TypeVar("_T")
#: Longest wait for nvidia-smi or git, seconds; a stuck driver must not hang a run.
_PATIENCE_S = 20
#: pynvml once it was started.
_started: list[Any] = []


def collect_provenance(command: str, gpu_index: int | None = 0) -> dict[str, Any]:
    """Provenance of a run, ready for JSON.

    Args:
        gpu_index: CUDA's; None asks for no GPU, and so leaves CUDA alone: to ask initialises it.

    Returns:
        ``gpu`` (name) and ``driver`` (version), both None without a GPU; ``toolchain``: see
        :func:`toolchain`; ``date``: UTC, ISO 8601, whole seconds; ``commit``: see :func:`source_commit`;
        ``command``: as given.
    """
    gpu, driver = (None, None) if gpu_index is None else gpu_and_driver(gpu_index)
    return {
        "gpu": gpu,
        "driver": driver,
        "toolchain": toolchain(),
        "date": utc_now(),
        "commit": source_commit(),
        "command": command,
    }


def provenance_field(provenance: Mapping[str, Any], field: str) -> Any:
    """A field of a recording's provenance; of one with parts that differ, every value as text."""
    values = [part.get(field, "unknown") for part in provenance.get("parts", [provenance])]
    if all(value == values[0] for value in values):
        return values[0]
    return "; ".join(dict.fromkeys(map(str, values)))


def utc_now(precision: str = "seconds") -> str:
    """UTC, ISO 8601; ``precision`` as datetime.isoformat has it."""
    return datetime.now(timezone.utc).isoformat(timespec=precision)


def toolchain() -> dict[str, str | None]:
    """Versions of outblas, python, nvrtc, torch, cublas, cuda_bindings; None: not installed or unknown."""
    return {
        "outblas": __version__,
        "python": platform.python_version(),
        "nvrtc": _nvrtc(),
        "torch": _wheel("torch"),  # its suffix tells of CUDA: 2.11.0+cu130
        "cublas": _wheel("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
        "cuda_bindings": _wheel("cuda-bindings"),
    }


def gpu_and_driver(index: int = 0) -> tuple[str | None, str | None]:
    """Name of GPU ``index`` and the driver's version, from pynvml or nvidia-smi; (None, None) without.

    The index is CUDA's, which counts what ``CUDA_VISIBLE_DEVICES`` leaves; where CUDA is not there, nvidia-smi's own.
    """

    def ask(nvml: Any, handle: Any) -> tuple[str | None, str | None]:
        return _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlSystemGetDriverVersion())

    found = _from_nvml(index, ask)
    if found is not None:
        return found
    fields = _from_smi(index, "name,driver_version")
    return (fields[0], fields[1]) if fields is not None else (None, None)


def gpu_state(index: int = 0) -> dict[str, int | None]:
    """``sm_clock_mhz`` (MHz) and ``temperature_c`` (degrees Celsius) now; None where unknown."""

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
    """``$OUTBLAS_COMMIT``, else the checkout's commit (with ``-dirty`` for changed files), else ``unknown``."""
    if named := os.environ.get("OUTBLAS_COMMIT"):
        return named
    here = Path(__file__).resolve().parent
    # Installed inside someone else's checkout, git would tell of theirs: this file must be tracked.
    if _run(["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name]) is None:
        return "unknown"
    head = _run(["git", "-C", str(here), "rev-parse", "HEAD"])
    changed = _run(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"])
    return f"{head}{'-dirty' if changed else ''}" if head else "unknown"


def _from_nvml(index: int, ask: Callable[[Any, Any], _T]) -> _T | None:
    """What ``ask(nvml, handle)`` says; None where NVML, its driver or the GPU is not there."""
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
    """Start NVML once for the process: a bench asks for every problem, and to start it costs more than to ask."""
    if nvml not in _started:
        nvml.nvmlInit()
        atexit.register(nvml.nvmlShutdown)
        _started.append(nvml)


def _from_smi(index: int, query: str) -> list[str] | None:
    out = _run(
        ["nvidia-smi", f"--id={pci_bus_id(index) or index}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    )
    fields = [field.strip() for field in out.splitlines()[0].split(",")] if out else []
    return fields if len(fields) == query.count(",") + 1 else None


def _run(command: list[str]) -> str | None:
    """Output of a command; None where it is not there, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _nvrtc() -> str | None:
    from outblas.core.errors import ToolchainMissing
    from outblas.runtime.nvrtc import nvrtc_version

    try:
        return nvrtc_version()
    except ToolchainMissing:
        return None


def _wheel(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d+", text) else None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
