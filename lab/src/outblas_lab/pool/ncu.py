"""Read hardware counters of kernels with Nsight Compute: its command line, its CSV output, and plain names.

ncu replays every kernel between ``cudaProfilerStart`` and ``cudaProfilerStop`` of the target program in several passes.
The clocks are left as they are (ncu's default would lock them at the base clock). Its times are of a kernel alone, so
they explain and are never published as speed. Published times come only from :mod:`outblas.judge.gpu_clock`.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from outblas.core.errors import DeviceError, OutblasError, RecordError, ToolchainMissing
from outblas.core.files import write_atomic
from outblas.core.process_group import run_group

#: Content of the caches before each replay: empty, or as the replay before left them.
CacheControl = Literal["flushed", "warm"]
_CACHE_CONTROL: Mapping[CacheControl, str] = {"flushed": "all", "warm": "none"}

#: Plain name -> ncu's names; the first one that ncu reports counts. Times in nanoseconds, shares in percent.
FIGURE_METRICS: Mapping[str, tuple[str, ...]] = {
    "time_ns": ("gpu__time_duration.sum",),
    # Cycles, not instructions: a wgmma occupies the pipe in proportion to its N.
    "tensor_pct": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "dram_pct": (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
    "l2_bytes": ("lts__t_bytes.sum",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "instructions": ("sm__inst_executed.sum",),
    "cycles": ("sm__cycles_elapsed.max",),
}
#: Prefixes of columns that describe the device or the launch; some hold words ("No-CC", "PolicySpread").
_DESCRIBED = ("device__", "launch__")
STALL_METRIC = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: Reasons why a warp does not issue; ``selected`` and ``not_selected`` are no stalls.
STALL_REASONS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "short_scoreboard", "sleeping"),
    *("tex_throttle", "wait"),
)
#: All metrics that are requested; a GPU may lack some (see :func:`known_metrics`).
METRICS = tuple(name for names in FIGURE_METRICS.values() for name in names) + tuple(
    map(STALL_METRIC.format, STALL_REASONS)
)
#: Number of stall reasons kept per kernel.
MAIN_STALLS = 3
#: Kernel of ``torch.cuda._sleep``: it marks the start of the next entry in a profile.
MARK_KERNEL = "spin_kernel"

#: Places of ncu if it is not on the PATH.
_NCU_GLOBS = ("/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_UNITS = {"nsecond": 1.0, "ns": 1.0, "usecond": 1e3, "us": 1e3, "msecond": 1e6, "ms": 1e6, "second": 1e9, "s": 1e9}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_COUNTED = re.compile(r"(?P<prefix>[KMGT]?)(byte|inst|cycle|sector|warp|block|thread)\b")


@dataclass(frozen=True)
class ProfiledLaunch:
    """A profiled launch of a kernel.

    Attributes:
        block: extents of a block as text, e.g. ``(128, 1, 1)``.
        metrics: ncu's name -> value in nanoseconds, bytes, percent, or a plain count, e.g.
            ``{"gpu__time_duration.sum": 1234500.0}``. Metrics without a value are absent.
    """

    kernel: str
    block: str = ""
    grid: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


def find_ncu(named: str | None = None) -> str:
    """Return the path of ncu: ``named``, else on the PATH, else the newest in the usual folders.

    Raises:
        ToolchainMissing: ncu was not found; also if ``named`` is no program, for then no other is sought.
    """
    there = shutil.which(named or "ncu")
    if there is None and named is None:
        found = [str(path) for place in _NCU_GLOBS for path in sorted(Path("/").glob(place.lstrip("/")))]
        there = next(filter(shutil.which, reversed(found)), None)
    if there is None:
        raise ToolchainMissing(
            f"{named or 'ncu'} is not installed",
            "NVIDIA Nsight Compute",
            "install it with the CUDA toolkit, or pass --ncu PATH",
        )
    return there


def version(ncu: str) -> str:
    """Return ncu's version, e.g. ``2025.3.1.0``; "unknown" if its output does not have one.

    Raises:
        ToolchainMissing: there is no such program, or it cannot be run.
    """
    try:
        said = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    except OSError as error:
        raise ToolchainMissing(f"{ncu} cannot be run", "NVIDIA Nsight Compute", "pass --ncu PATH") from error
    found = re.search(r"Version (\S+)", said)
    return found[1] if found else "unknown"


def command(ncu: str, target: Sequence[str], metrics: Sequence[str], cache: CacheControl, log: Path) -> list[str]:
    """Return the command line that profiles a program and writes CSV, as a list of words. The first is ``ncu``.

    It ends with ``--log-file``, the log and the words of ``target``. Nothing is run.

    Args:
        cache: content of the caches before each replay: ``flushed`` or ``warm``; KeyError for another.
    """
    options = ["--profile-from-start", "off", "--clock-control", "none", "--cache-control", _CACHE_CONTROL[cache]]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    return [ncu, *options, "--log-file", str(log), *target]


def profile(
    ncu: str, target: Sequence[str], metrics: Sequence[str], cache: CacheControl = "flushed", timeout_s: float = 600.0,
    log: Path | None = None,
) -> list[ProfiledLaunch]:  # fmt: skip
    """Run a program under ncu and return its profiled kernels in order.

    The program must call ``cudaProfilerStart`` before the kernels (``torch.cuda.profiler.start()``). Kernels outside of
    start and stop are not profiled.

    Args:
        cache: content of the caches before each replay: ``flushed``, or ``warm``, as the replay before left them.
        timeout_s: time limit, seconds.
        log: file for ncu's own output, written also after a failure or a timeout; None: none.

    Raises:
        DeviceError: ncu lacks permission, or does not know a metric, the GPU or the driver. Also if the target fails,
            exceeds the time limit, or profiles no kernel.
        RecordError: ncu's output cannot be read.
        OSError: there is no program ``ncu``, or it cannot be run.
    """
    text = _run(ncu, target, metrics, cache, timeout_s, log)
    unknown = unknown_metrics(text)
    if unknown:
        raise DeviceError(
            f"ncu does not know {', '.join(unknown)}",
            "metrics of this GPU",
            "omit them (outblas_lab.pool.ncu.known_metrics lists the known ones)",
        )
    return parse(text)


def known_metrics(
    ncu: str, target: Sequence[str], metrics: Sequence[str] = METRICS, timeout_s: float = 600.0, log: Path | None = None
) -> tuple[str, ...]:
    """Return the metrics that ncu has on this GPU, in the order given.

    ncu does not list them; it refuses a profile with an unknown one. So the target runs again without the unknown ones.

    Args:
        target: a short program that profiles any kernel.
        timeout_s: time limit of each run, seconds.

    Raises:
        DeviceError: as :func:`profile`, or ncu knows none of the metrics.
        RecordError: as :func:`profile`.
    """
    kept = tuple(metrics)
    while True:
        text = _run(ncu, target, kept, "flushed", timeout_s, log)
        unknown = set(unknown_metrics(text))
        if not unknown:
            parse(text)
            return kept
        rest = tuple(m for m in kept if m.partition(".")[0] not in unknown)
        if not rest or rest == kept:
            raise DeviceError(
                f"ncu does not know {', '.join(sorted(unknown))}", "metrics of this GPU", "use a newer ncu"
            )
        kept = rest


def unknown_metrics(output: str) -> list[str]:
    """Return the sorted names, without suffix, of metrics that ncu's output calls unknown.

    Example: ``"==ERROR== Failed to find metric dram__nope.sum"`` names ``["dram__nope"]``.
    """
    lines = re.findall(r"Failed to find metrics?:? (.*)", output)
    return sorted({name for line in lines for name in re.findall(r"[a-z0-9]+__[a-z0-9_]+", line)})


def parse(output: str) -> list[ProfiledLaunch]:
    """Return the kernels in ncu's output (``--csv --page raw``); other lines are ignored.

    Times become nanoseconds: ``1,234.5`` in a column of unit ``us`` becomes 1234500.0.

    Raises:
        DeviceError: ncu said why it measured nothing, or the table has no kernel.
        RecordError: there is no table, also for an empty text, or it is incomplete.
    """
    reason = refusal(output)
    if reason is not None:
        raise reason
    lines = output.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if begin is None:
        raise RecordError("ncu wrote no table", 'a line that begins with "ID"', "run ncu by hand and check its output")
    table = [line for line in lines[begin:] if line and not line.startswith("==")]
    head, *rows = csv.reader(io.StringIO("\n".join(table)))
    if "Kernel Name" not in head or "Metric Name" in head:
        raise RecordError("ncu's table is not from the raw page", "a column per metric", "pass --csv --page raw")
    for number, row in enumerate(rows, begin + 2):
        if len(row) != len(head):
            raise RecordError(
                f"row {number} of ncu's table has {len(row)} fields", f"{len(head)}, as in its header", "profile again"
            )
    if not rows or rows[0][0]:
        raise RecordError("ncu's table has no row of units", "this row below the header", "profile again")
    units = dict(zip(head, rows[0], strict=True))
    if len(rows) == 1:
        raise _no_kernels()
    return [_launch(dict(zip(head, row, strict=True)), units) for row in rows[1:]]


def refusal(output: str) -> OutblasError | None:
    """Return the error for the reason that ncu's output gives for profiling nothing; None if it gives no reason.

    The error is a DeviceError that is returned and not raised. ``refusal("")`` returns None.
    """
    if "ERR_NVGPUCTRPERM" in output:
        return DeviceError(
            "ncu is not allowed to read the performance counters of this GPU (ERR_NVGPUCTRPERM)",
            "administrator permissions",
            "run as root (in a container: with --cap-add=SYS_ADMIN), or load the nvidia module with"
            " NVreg_RestrictProfilingToAdminUsers=0",
        )
    if "not compatible with Nsight Compute" in output:
        return DeviceError("ncu does not support this driver", "a compatible ncu", "install a newer Nsight Compute")
    errors = re.findall(r"^==ERROR== (.*)$", output, flags=re.MULTILINE)
    if errors:
        return DeviceError(f"ncu failed: {errors[0].strip()}", "a profile", "run the ncu command by hand")
    return _no_kernels() if "No kernels were profiled" in output else None


def between_marks(launches: Iterable[ProfiledLaunch]) -> list[list[ProfiledLaunch]]:
    """Return the kernels after each marking kernel, one list per mark.

    Example: the kernels spin_kernel, gemm, spin_kernel give ``[[gemm], []]``. No kernel at all gives ``[]``.

    Raises:
        RecordError: a kernel precedes the first mark.
    """
    groups: list[list[ProfiledLaunch]] = []
    for launch in launches:
        if MARK_KERNEL in launch.kernel:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
        else:
            raise RecordError(f"{launch.kernel} ran before any mark", f"{MARK_KERNEL} first", "profile again")
    return groups


def figures(launch: ProfiledLaunch) -> dict[str, Any]:
    """Return a kernel's counters by plain name, as JSON values.

    Returns:
        ``kernel``, ``grid`` and ``block`` as text. Each key of :data:`FIGURE_METRICS`: a number, or None if not
            reported. ``stalls``: [reason, stalled warps per issued instruction] of the main reasons (at most 3), worst
            first.
    """
    found: dict[str, Any] = {"kernel": launch.kernel, "grid": launch.grid, "block": launch.block}
    for plain, names in FIGURE_METRICS.items():
        found[plain] = next((launch.metrics[name] for name in names if name in launch.metrics), None)
    stalls = {reason: launch.metrics.get(STALL_METRIC.format(reason), 0.0) for reason in STALL_REASONS}
    worst = sorted((reason for reason in stalls if stalls[reason] > 0), key=lambda reason: (-stalls[reason], reason))
    found["stalls"] = [[reason, stalls[reason]] for reason in worst[:MAIN_STALLS]]
    return found


def _launch(row: Mapping[str, str], units: Mapping[str, str]) -> ProfiledLaunch:
    metrics = {}
    for name, text in row.items():
        value = _number(name, text) if "__" in name else None  # a column without "__" describes the launch
        if value is not None:
            metrics[name] = value * _scale(units[name])
    return ProfiledLaunch(row["Kernel Name"], row.get("Block Size", ""), row.get("Grid Size", ""), metrics)


def _number(name: str, text: str) -> float | None:
    """Return a value that may have thousands separators; None if ncu reported none. Raises RecordError for words."""
    plain = text.replace(",", "").strip()
    if plain.lower() in ("", "n/a"):
        return None
    try:
        value = float(plain)
    except ValueError:
        if name.startswith(_DESCRIBED):
            return None
        raise RecordError(f"ncu reports {text!r} for {name}", "a number", "profile again") from None
    return value if math.isfinite(value) else None


def _scale(unit: str) -> float:
    """Return the factor from ncu's unit to nanoseconds (times) or to the unit without prefix (others)."""
    if unit in _UNITS:
        return _UNITS[unit]
    counted = _COUNTED.match(unit)
    return _PREFIXES[counted["prefix"]] if counted else 1.0


def _no_kernels() -> DeviceError:
    return DeviceError("ncu profiled no kernels", "launches while the profiler is on", "check the profiled program")


def _run(
    ncu: str, target: Sequence[str], metrics: Sequence[str], cache: CacheControl, timeout_s: float, log: Path | None
) -> str:
    """Return all of ncu's output. Raises DeviceError if the target did not end normally."""
    with tempfile.TemporaryDirectory(prefix="outblas-ncu-") as scratch:
        file = Path(scratch) / "ncu.csv"
        environment = {**os.environ, "LC_ALL": "C"}  # the number format is independent of the locale
        try:
            done = run_group(command(ncu, target, metrics, cache, file), environment, timeout_s, subprocess.STDOUT)
        except subprocess.TimeoutExpired:
            if log is not None:  # it says how far ncu came
                write_atomic(log, file.read_bytes() if file.exists() else b"")
            raise DeviceError(f"ncu did not finish in {timeout_s:g} s", "a profile", "profile fewer kernels") from None
        status, said = done.returncode, done.stdout.decode(errors="replace")
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    # The target's own output is no part of the table.
    text = "\n".join([text, *(line for line in said.splitlines() if line.startswith("=="))])
    if log is not None:
        write_atomic(log, text.encode())
    if status == 0 or unknown_metrics(text):
        return text
    reason = refusal(text)
    if reason is None or "application returned an error" in str(reason):
        own = [line for line in said.splitlines() if line.strip() and not line.startswith("==")]
        last = own[-1] if own else "no output"
        raise DeviceError(f"the program under ncu ended with {status}: {last}", "exit status 0", "run it without ncu")
    raise reason
