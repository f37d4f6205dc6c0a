"""Tune given products within a time, and merge the winners into a library file."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from outblas.core.config import LAUNCHES
from outblas.core.problem import Problem
from outblas.dispatch.call_option import option_without_promise
from outblas.kernels.cost.cost_model import predicted_us
from outblas.records.captured_products import CapturedProducts
from outblas.records.library import Library
from outblas.records.user_library import check_installable, install, user_library_path
from outblas.runtime.device import Device, gpu_of_device
from outblas.tune.time_shares import (
    TimeShare,
    balanced_over_rows,
    budgets,
    captured_time_shares,
    time_shares,
)
from outblas.tune.tune import Progress
from outblas.tune.tune_run import TuneRequest, default_agent, folder_name, provenance_of, run_tune

#: Measurements per problem on average, as of ``outblas tune``.
_BUDGET = 16


def tune_captured(
    file: Path, device: Device, seconds: float, command: str, progress: Progress | None = None
) -> tuple[Path | None, str]:
    """Tune the products of a captured file into a library of its own, beside the run.

    The file holds the user's rows, too. The user's library stays as it is.

    Args:
        file: record of ``outblas capture``; it may be missing, if no product was seen.

    Returns:
        (the library file, one line on the products that are left out, or an empty text). The file is None if the
        program ran no product that a library can hold.

    Raises:
        RecordError: a file cannot be read or written.
        DeviceError: the GPU cannot be used.
        ToolchainMissing: a package for the GPU is not installed.
    """
    if not file.is_file() or not CapturedProducts.load(file).problems():
        return None, "not tuned: the program ran no matmul that a library can contain"
    ranked, left_out = captured_time_shares(file, device)
    library, run = _tune(ranked, device, seconds, command, progress)
    return _library_beside(library, run), left_out


def tune_counts(
    counts: Mapping[Problem, int], device: Device, seconds: float, command: str, progress: Progress | None = None
) -> tuple[Path, int]:
    """Tune problems by their predicted share of time, and merge the winners into the user's library.

    Every number of rows M has the same share, so that a short time does not go to the longest step alone.

    Args:
        counts: problem -> number of products; at least one.

    Returns:
        The user's library file, and the number of problems that were reached within the time.

    Raises:
        UsageError: ``OUTBLAS_LIBRARY`` is empty.
        RecordError: a file cannot be read or written.
        DeviceError: the GPU cannot be used.
        ToolchainMissing: a package for the GPU is not installed.
    """
    gpu = gpu_of_device(device.gpu_index or 0)
    check_installable(gpu.name)
    ranked = balanced_over_rows(time_shares(counts, lambda problem: predicted_us(problem, gpu)))
    library, run = _tune(ranked, device, seconds, command, progress)
    return install(library, provenance_of(run)).path, len(library.rows)


def _tune(
    ranked: list[TimeShare], device: Device, seconds: float, command: str, progress: Progress | None
) -> tuple[Library, Path]:
    problems, agent = [one.problem for one in ranked], default_agent(device)
    launch = option_without_promise().launch  # no call runs other kernels
    count = _BUDGET * (LAUNCHES.index(launch) + 1)
    path = Path("runs") / folder_name("captured", problems, agent, 0, f"{count},{seconds:g}s", str(device))
    request = TuneRequest(
        problems, "captured", agent, count, 0, device, path, command, None, budgets(ranked, count), seconds,
        launch=launch, beside=True,
    )  # fmt: skip
    outcome = run_tune(request, progress)
    return outcome.library, outcome.files.path


def _library_beside(library: Library, run: Path) -> Path:
    """Merge the run's rows with a copy of the user's library, in the directory of the run."""
    path = run / f"trial-{library.gpu}.json"
    users = user_library_path(library.gpu)
    if users is not None and users.is_file():
        shutil.copyfile(users, path)
    return install(library, provenance_of(run), path).path
