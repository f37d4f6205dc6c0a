"""Build the pack of cubins that a wheel ships: every kernel of a packaged library or offered for any shape.

Each kernel is compiled and checked. A wheel's build does it if NVRTC is installed (``hatch_build.py``). In a source
tree, run ``python -m outblas_lab.build.cubin_build``. It takes minutes; an interrupted build continues from the compile
cache.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import chain, product
from pathlib import Path
from typing import Any, get_args

from outblas.core.config import KernelConfig
from outblas.core.errors import CompileError, OutblasError, RecordError, ToolchainMissing
from outblas.core.files import write_atomic
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Dtype, Layout, Problem
from outblas.core.version import __version__
from outblas.kernels.epilogue import STACKED_GATE
from outblas.kernels.fixed_order import kernels_for_few_rows
from outblas.kernels.grouped import grouped_kernel, rows_source
from outblas.kernels.grouped.grouped_kernel import why_illegal as grouped_illegal
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import Source, make_source
from outblas.predict.grouped_choice import measured_groups
from outblas.records.library import Library
from outblas.runtime.cubin import Cubin
from outblas.runtime.cubin_pack import BUILD_COMMAND, CubinPack, pack_bytes, pack_key
from outblas.runtime.nvrtc import compile_many, nvrtc_version
from outblas.runtime.packaged_cubins import PACK
from outblas.runtime.sass import check_static

ARCHITECTURE = "sm_90a"
#: Problems of which a kernel for any shape is legal for one; they enter its source by layout and dtype alone.
_ASKED = ((16, 4096, 4096), (4096, 4096, 4096), (2, 4096, 16384), (128, 128, 128), (8, 512, 8192), (8, 512, 4096))
#: Words of progress in a whole build.
_TOLD = 40


@dataclass(frozen=True)
class BuiltPack:
    """A pack that was built.

    Attributes:
        left_out: one line for each kernel that does not compile or fails the static check. Such a kernel is compiled,
            or refused, where it is used.
    """

    path: Path
    kernels: int
    images: int
    bytes: int
    left_out: tuple[str, ...]


def packaged_libraries() -> dict[str, bytes]:
    """Return GPU -> content of the library file that comes with the package, as bytes."""
    folder = resources.files("outblas") / "data" / "libraries"
    found = {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(".json")}
    return {name.removesuffix(".json"): found[name].read_bytes() for name in sorted(found)}


def sources_of(libraries: Sequence[Library]) -> list[Source]:
    """Return the distinct sources of the kernels of some libraries, those with gates included."""
    made = (make_source(p, c) for library in libraries for p, configs in library.kernels().items() for c in configs)
    gates = (make_source(p, c, STACKED_GATE) for library in libraries for p, c in library.gate_kernels())
    return list(dict.fromkeys(chain(made, gates)))


def any_shape_files() -> dict[str, bytes]:
    """Return GPU -> content of the packaged file with the kernels for problems of no library, as bytes."""
    folder = resources.files("outblas") / "data" / "any_shape"
    entries = list(folder.iterdir()) if folder.is_dir() else []
    found = {entry.name: entry for entry in entries if entry.name.endswith(".npz")}
    return {name.removesuffix(".npz"): found[name].read_bytes() for name in sorted(found)}


def pairs_for_any_shape(files: Mapping[str, bytes]) -> list[tuple[Problem, KernelConfig]]:
    """Return (problem, config) of the kernels in files of :func:`any_shape_files`.

    Each kernel occurs once for each layout and dtype for which it is legal.

    Raises:
        ToolchainMissing: numpy is not installed.
        RecordError: a file cannot be read.
    """
    try:
        from outblas.predict.any_shape import AnyShapeModel
    except ImportError as error:
        raise ToolchainMissing("numpy is not installed", "numpy", "install it or build without isolation") from error
    found = []
    for gpu, data in files.items():
        for config, (layout, dtype) in product(
            AnyShapeModel.kernels_of(data), product(get_args(Layout), get_args(Dtype))
        ):
            problems = (Problem(*mnk, layout, dtype) for mnk in _ASKED)
            found += [(p, config) for p in problems if not why_illegal(p, config, packaged_gpu(gpu))][:1]
    return found


def grouped_sources() -> list[Source]:
    """Return the sources of the grouped kernels that the package chooses, in both layouts and dtypes."""
    measured = measured_groups(ARCHITECTURE)
    kinds = product(get_args(Layout), get_args(Dtype), {one.problem.gated for one in measured}, (False, True))
    pairs = [
        (replace(one.problem, layout=layout, dtype=dtype, bias=bias), one.config)
        for (layout, dtype, gated, bias), one in product(kinds, measured)
        if one.problem.gated == gated
    ]
    return list(dict.fromkeys(grouped_kernel.make_source(p, c) for p, c in pairs if not grouped_illegal(p, c)))


def build(
    path: Path = PACK,
    jobs: int | None = None,
    libraries: Sequence[Library] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> BuiltPack:
    """Compile, check and pack the kernels; the file appears whole or not at all.

    Args:
        jobs: number of processes; None: one per core.
        libraries: libraries whose kernels are packed; None: the packaged ones, the kernels for any shape, and those for
            few rows in one order of summation.

    Raises:
        ToolchainMissing: NVRTC or pydantic is not installed.
        RecordError: a packaged library cannot be read, or the file cannot be written.
    """
    nvrtc_version()
    others = list[tuple[Problem, KernelConfig]]()
    if libraries is None:
        libraries = [Library.packaged(gpu) for gpu in packaged_libraries()]
        others = [*pairs_for_any_shape(any_shape_files()), *kernels_for_few_rows()]
    sources = list(dict.fromkeys([*sources_of(libraries), *(make_source(p, c) for p, c in others)]))
    sources += [*grouped_sources(), *rows_source.all_sources()] if others else []
    cubins: dict[bytes, Cubin] = {}
    left_out: list[str] = []
    progress = _Progress(len(sources), report)
    for index, result in compile_many(sources, ARCHITECTURE, jobs):
        source = sources[index]
        rejected = str(result) if isinstance(result, CompileError) else ""
        if isinstance(result, Cubin) and source.family != rows_source.FAMILY:  # those multiply nothing
            rejected = check_static(result.facts, source, result) or ""
        if rejected:
            left_out.append(f"{source.entry}: {rejected}")
        elif isinstance(result, Cubin):
            cubins[pack_key(source, ARCHITECTURE)] = result
        progress.step(compiled=isinstance(result, CompileError) or not result.from_cache)
    data = pack_bytes(cubins, {**_identity(), "nvrtc": nvrtc_version(), "architectures": [ARCHITECTURE]})
    write_atomic(path, data)
    return BuiltPack(path, len(cubins), CubinPack(path).images, len(data), tuple(sorted(left_out)))


def build_for_wheel(path: Path = PACK, report: Callable[[str], None] = lambda line: None) -> Path:
    """Return the pack for a wheel: newly built, or without NVRTC (an isolated build) an earlier one that is current.

    Raises:
        ToolchainMissing: NVRTC is not installed and no current pack exists.
        RecordError: as :func:`build`.
    """
    try:
        built = build(path, report=report)
    except ToolchainMissing:
        if not is_current(path):
            raise
        return path
    for line in built.left_out:
        report(f"skipped: {line}")
    return built.path


def is_current(path: Path) -> bool:
    """Return True if a pack has this package's version, kernel files and libraries.

    False if it is missing or damaged; nothing is raised.
    """
    try:
        about = CubinPack(path).about
    except RecordError:
        return False
    return all(about.get(name) == value for name, value in _identity().items())


def _identity() -> dict[str, Any]:
    libraries = {gpu: hashlib.sha256(data).hexdigest() for gpu, data in packaged_libraries().items()}
    general = {gpu: hashlib.sha256(data).hexdigest() for gpu, data in any_shape_files().items()}
    grouped = hashlib.sha256(repr([source.sha() for source in grouped_sources()]).encode()).hexdigest()
    of_products = {"libraries": libraries, "any_shape": general, "grouped": grouped}
    return {"outblas": __version__, "kernels": kernels_sha(), **of_products}


class _Progress:
    """Report the share that is done, and the time left at the rate of kernels that were not in the cache."""

    def __init__(self, total: int, report: Callable[[str], None]) -> None:
        self._total, self._tell = total, report
        self._done, self._compiled = 0, 0
        self._start = time.perf_counter()

    def step(self, compiled: bool) -> None:
        self._done += 1
        if compiled and not self._compiled:
            self._start = time.perf_counter()  # its own time is not counted, nor that of cached ones before it
        self._compiled += compiled
        if self._done == self._total or self._done % max(1, self._total // _TOLD) == 0:
            self._tell(f"{self._done} of {self._total} kernels{self._left()}")

    def _left(self) -> str:
        if self._compiled < 2 or self._done == self._total:
            return ""
        seconds = (time.perf_counter() - self._start) / (self._compiled - 1) * (self._total - self._done)
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the pack at its place in the package: ``python -m outblas_lab.build.cubin_build``.

    Args:
        arguments: command line without the program, e.g. ``["--jobs", "4", "--out", "kernels.pack"]``; None: the
            process's. A wrong option ends the process with status 2.

    Returns:
        0, or 2 with one line on standard error if it fails.
    """
    parser = argparse.ArgumentParser(prog=BUILD_COMMAND, description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    parser.add_argument("--out", type=Path, default=PACK, help="output file (default: next to the package's data)")
    options = parser.parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser.error("--jobs must be at least 1")
    try:
        built = build(options.out, options.jobs, report=lambda line: print(line, file=sys.stderr, flush=True))
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in built.left_out:
        print(f"skipped: {line}", file=sys.stderr)
    print(f"built {built.path}: {built.kernels} kernels, {built.images} distinct cubins, {built.bytes / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
