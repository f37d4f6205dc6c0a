"""Choose kernels for problems that the packaged library does not have."""

from __future__ import annotations

import functools
import hashlib
import warnings
from importlib import resources
from typing import Any

from outblas.core.errors import OutblasError
from outblas.core.gpu_records import packaged_records
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.switches import is_off
from outblas.dispatch.decide import Choose
from outblas.records.library_row import LibraryChoice

#: Set to ``0``, it leaves such problems to torch.
ANY_SHAPE_VARIABLE = "OUTBLAS_ANY_SHAPE"
#: Number of cached choices: the same problem returns with other addresses, outputs and launch options.
MAX_CACHED_CHOICES = 4096


def any_shape_chooser(gpu_name: str) -> Choose | None:
    """Return the chooser of :mod:`outblas.learn.any_shape` for a GPU, which reads its data at its first call.

    Return None if the package has no data for this GPU, or if ``OUTBLAS_ANY_SHAPE`` is 0, false, no or off. If the data
    cannot be read or numpy cannot be imported, the chooser warns once and returns None from then on.

    Args:
        gpu_name: name in this package (:attr:`outblas.core.roofline.Gpu.name`), e.g. ``"h200"``; not torch's device
            name.
    """
    if is_off(ANY_SHAPE_VARIABLE) or not _data(gpu_name).is_file():
        return None
    broken = False

    @functools.lru_cache(MAX_CACHED_CHOICES)
    def choose(problem: Problem, gpu: Gpu) -> LibraryChoice | None:
        nonlocal broken
        if broken:
            return None
        try:
            from outblas.learn.any_shape import AnyShapeModel  # with numpy

            found = AnyShapeModel.load(gpu_name)
        except (OutblasError, ImportError, OSError) as error:
            broken = True
            warnings.warn(f"outblas leaves shapes of no library to torch: {error}", RuntimeWarning, stacklevel=2)
            return None
        # The bounds were fitted with the packaged record; a calibration would move them.
        fitted = packaged_records().get(gpu_name)
        return found.choose(problem, gpu if fitted is None else fitted.gpu)

    return choose


@functools.cache
def choices_id(gpu_name: str) -> str:
    """Return a SHA-256 digest, 64 hexadecimal digits, of all data on which the choices for a GPU depend.

    Args:
        gpu_name: short name of the GPU, e.g. ``h200``. Missing files count as empty ones, without an error.
    """
    files = (_data(gpu_name), resources.files("outblas") / "data" / "policies" / f"{gpu_name}.npz")
    return hashlib.sha256(b"".join(hashlib.sha256(_bytes(file)).digest() for file in files)).hexdigest()


def _data(gpu_name: str) -> Any:
    return resources.files("outblas") / "data" / "any_shape" / f"{gpu_name}.npz"


def _bytes(file: Any) -> bytes:
    try:
        return bytes(file.read_bytes())
    except OSError:  # the chooser reports it
        return b""
