"""The checks of ``outblas doctor``: installed parts, missing parts, and the remedy for each."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from outblas.core.derived_gpu import never_ran_on
from outblas.core.errors import OutblasError
from outblas.core.files import try_folder
from outblas.core.gpu_records import GpuRecord, has_data, nearest_with_data
from outblas.core.install_hint import CPU_TORCH, install_hint, lab_hint
from outblas.core.lab_parts import find_part
from outblas.core.roofline import Gpu, architecture
from outblas.judge.faults import first_line
from outblas.kernels.source import Source
from outblas.records.library import Library
from outblas.records.user_library import user_library_path
from outblas.runtime.device import record_of_device
from outblas.runtime.native import extension, why_not
from outblas.runtime.nvrtc import ARCHITECTURES, DEFAULT_CACHE, compile_source, nvrtc_version
from outblas.runtime.packaged_cubins import PACK, PackagedCubins
from outblas.runtime.sass import find_nvdisasm

MIN_PYTHON = (3, 11)
#: A recording, a result file and a cache of a few thousand cubins need less.
MIN_FREE_BYTES = 1 << 30
_GPU_EXTRA = install_hint("gpu")
#: In place of a remedy where there is no GPU.
_FOR_GPU = "calls on a GPU need it"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Check:
    """A check of one part of the installation or machine.

    Attributes:
        ok: True if it works; False if it is broken, or missing and needed here; None if it is absent and optional here.
        required: True if nothing works without it. A False is then the machine's failure, not a limitation.
    """

    name: str
    ok: bool | None
    found: str
    do: str = ""
    required: bool = False


@dataclass(frozen=True)
class _Gpu:
    name: str
    capability: tuple[int, int]


def diagnose() -> list[Check]:
    """Check everything that OutBLAS uses, in a fixed order.

    It never raises: a check that itself fails is a finding with ``ok=False``. It leaves no file behind. Without a GPU,
    the tool chain for GPUs is optional: recordings can still be replayed.
    """
    gpus, cuda = _driver()
    need = bool(gpus)
    of_gpu: dict[str, Callable[[int], GpuPart]] = {"gpu record": gpu_record_part, "gpu library": gpu_library_part}
    looks: list[Callable[[], Check]] = [
        _python,
        _cache_directory,
        lambda: _free_disk("free disk (cache)", DEFAULT_CACHE.directory),
        lambda: _free_disk("free disk (here)", Path.cwd()),
        lambda: _driver_check(cuda),
        lambda: _gpu_check(gpus),
        *(partial(_gpu_part, name, look) for name, look in of_gpu.items() if need),
        lambda: _torch(need),
        lambda: _wheel("cuda.bindings", "cuda-bindings", need),
        lambda: _nvrtc(need),
        lambda: _packaged_cubins(cuda),
        _native_path,
        lambda: _tool("nvdisasm", lambda: str(find_nvdisasm()), "only cross-checks need"),
        lambda: _wheel("nvidia-matmul-heuristics", "nvidia-matmul-heuristics", need),
        *(find_part("checks") or (_no_lab,)),
    ]
    return [_safely(look) for look in looks]


def _safely(look: Callable[[], Check]) -> Check:
    """A check that itself fails is a finding, never the end of the diagnosis."""
    try:
        return look()
    except Exception as error:
        name = getattr(look, "__name__", "check").strip("_<>")
        return Check(name, False, f"the check failed: {first_line(error)}", "report it with this line")


def _python() -> Check:
    ok = sys.version_info[:2] >= MIN_PYTHON
    wanted = ".".join(map(str, MIN_PYTHON))
    return Check("python", ok, platform.python_version(), "" if ok else f"install Python {wanted} or newer", True)


def _no_lab() -> Check:
    return Check(
        "outblas-lab", None, "not installed: no recordings, further agents, comparisons and reports", lab_hint()
    )


def _cache_directory() -> Check:
    folder = DEFAULT_CACHE.directory
    try:
        try_folder(folder)
    except OSError as error:
        return Check("cache directory", False, first_line(error), "set OUTBLAS_CACHE_DIR to a writable directory")
    return Check("cache directory", True, f"{folder} (writable)")


def _free_disk(name: str, folder: Path) -> Check:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    ok = free >= MIN_FREE_BYTES
    do = "" if ok else f"free some space: {MIN_FREE_BYTES / 2**30:.0f} GiB is enough"
    return Check(name, ok, f"{free / 2**30:.1f} GiB at {folder}", do)


def _driver_check(cuda: tuple[int, int] | None) -> Check:
    if cuda is None:
        return Check("driver", None, "none (no libcuda)", _FOR_GPU)
    found = f"CUDA {cuda[0]}.{cuda[1]}"
    try:
        compiler = int(nvrtc_version().split(".")[0])
    except OutblasError:
        return Check("driver", True, found)
    # Minor-version compatibility: a cubin loads on any driver of the compiler's major version or later.
    ok = cuda[0] >= compiler
    return Check("driver", ok, found, "" if ok else f"install a driver for CUDA {compiler}.0 or later")


def _gpu_check(gpus: list[_Gpu]) -> Check:
    if not gpus:
        return Check("gpu", None, "none", "recordings stand in for it: --device replay:NAME")
    found = "; ".join(f"{i}: {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for i, gpu in enumerate(gpus))
    known = {arch.rstrip("a") for arch in ARCHITECTURES}
    foreign = [gpu for gpu in gpus if "sm_{}{}".format(*gpu.capability) not in known]
    do = f"supported: {', '.join(ARCHITECTURES)}" if foreign else ""
    return Check("gpu", len(foreign) < len(gpus), found, do)


def _gpu_part(name: str, look: Callable[[int], GpuPart]) -> Check:
    """Check a part of the data for GPU 0."""
    try:
        part = look(0)
    except OutblasError as error:
        return Check(name, False, error.wrong, error.do)
    return Check(name, None if part.missing else True, part.found, part.missing)


def _torch(need: bool) -> Check:
    version = _version("torch")
    missing = False if need else None
    if version is None:
        return Check("torch", missing, "not installed", _GPU_EXTRA if need else _FOR_GPU)
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation raises anything, OSError for a library above all
        return Check("torch", False, f"{version}, cannot be imported: {first_line(error)}", "install torch afresh")
    if torch.version.cuda is None:
        do = "install a CUDA build of torch" if need else _FOR_GPU
        return Check("torch", missing, f"{version} without CUDA", do)
    if need and not torch.cuda.is_available():
        return Check("torch", False, f"{version}, cannot use the GPU", "match torch's CUDA version to the driver")
    found = f"{version}, CUDA {torch.version.cuda}"
    if not need:
        do = f"to free them: a new environment, in it first {CPU_TORCH}"
        return Check("torch", None, f"{found}: {_torch_bytes() / 1e9:.1f} GB that serve no GPU here", do)
    return Check("torch", True, found)


def _torch_bytes() -> int:
    """Return the installed size of torch with the wheels of CUDA that it brought, from their lists of files."""
    names, found = ["torch"], dict[str, int]()
    while names:
        name = names.pop()
        if name not in found and _version(name) is not None:
            found[name] = sum(file.size or 0 for file in metadata.files(name) or ())
            needed = (re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in metadata.requires(name) or ())
            names += [one for one in needed if one.startswith(("nvidia-", "cuda-", "triton"))]
    return sum(found.values())


def _nvrtc(need: bool) -> Check:
    """Compiles a kernel, which a loaded library alone does not prove."""
    kernel = Source('extern "C" __global__ void probe(float* x) { *x = 1.0f; }', "probe", (), (), "fp32", "doctor")
    try:
        compile_source(kernel, cache=None)
    except OutblasError as error:
        return Check("nvrtc", False if need else None, error.wrong, error.do)
    return Check("nvrtc", True, f"{nvrtc_version()}, compiles")


def _packaged_cubins(cuda: tuple[int, int] | None) -> Check:
    """``cuda``: the driver's CUDA version, None: no driver."""
    name = "shipped cubins"
    cubins = PackagedCubins(PACK, quiet=True)
    pack = cubins.pack()
    if pack is None:
        found, _, do = cubins.why_not().rpartition("; ")
        return Check(name, False if cubins.damaged else None, found, do)
    needed = cubins.driver_needed()
    found = (
        f"{len(pack)} kernels for {', '.join(pack.about['architectures'])} ({pack.bytes / 1e6:.1f} MB) by NVRTC "
        f"{pack.about['nvrtc']}; drivers for {needed} load them"
    )
    if cuda is None:
        return Check(name, True, found)
    this = f"this one is for CUDA {cuda[0]}.{cuda[1]}"
    if cuda[0] >= cubins.cuda_major:
        return Check(name, True, f"{found}, {this}")
    do = f"install a driver for {needed}; what this one refuses is compiled here, or left to torch"
    return Check(name, False, f"{found}, {this}", do)


def _native_path() -> Check:
    reason = why_not()
    if reason:
        found, _, do = reason.partition("; ")
        return Check("native path", None, found, do or "unset OUTBLAS_NATIVE to use it")
    found = "built; outblas.matmul answers repeated calls in C"
    if hasattr(extension(), "Products"):
        return Check("native path", True, f"{found}, outblas.enable() in C++")
    do = "install a C++ compiler and run python -m outblas.runtime.native_build: "
    do += "outblas.enable() costs the host less then"
    return Check("native path", None, f"{found}, outblas.enable() in Python", do)


def _tool(name: str, find: Callable[[], str], users: str) -> Check:
    """Check a tool that only some users need; ``find`` returns it in words."""
    try:
        return Check(name, True, find())
    except OutblasError as error:
        return Check(name, None, error.wrong, f"{error.do} ({users} it)")


def _wheel(name: str, package: str, need: bool) -> Check:
    version = _version(package)
    if version is None:
        return Check(name, False if need else None, "not installed", _GPU_EXTRA if need else _FOR_GPU)
    return Check(name, True, version)


def _driver() -> tuple[list[_Gpu], tuple[int, int] | None]:
    """GPUs that CUDA sees and the CUDA version of the driver, asked of libcuda: needs no package."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return [], None
    number = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return [], None
    version = (number.value // 1000, number.value % 1000 // 10)
    cuda.cuDeviceGetCount(ctypes.byref(number))
    return [_gpu(cuda, index) for index in range(number.value)], version


def _gpu(cuda: ctypes.CDLL, index: int) -> _Gpu:
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), index)
    values = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int(0)
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        values.append(value.value)
    return _Gpu(name.value.decode(errors="replace"), (values[0], values[1]))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


CALIBRATE = "outblas calibrate"
TUNE = "outblas tune --suite llm --sample 40 --budget 8 --install"
#: Data of the package by kind: (name for people, folder, end of the file's name).
_KINDS = (
    ("ranking model", "models", ".json"),
    ("policy", "policies", ".npz"),
    ("catalogue", "catalogues", ".json"),
    ("recording", "recordings", ""),
)


@dataclass(frozen=True)
class GpuPart:
    """A part of the data for a GPU.

    Attributes:
        missing: the command that adds the missing part; empty if nothing is missing.
    """

    found: str
    missing: str


def gpu_record_part(index: int) -> GpuPart:
    """Return the record of a GPU in words; without a calibrated or packaged record the command is a calibration.

    Raises:
        DeviceError: no such GPU, or one older than sm_80.
        RecordError: a record in the user's folder cannot be read.
    """
    record = record_of_device(index)
    words = f"{record.gpu.name}: {_record_words(record)}"
    if never_ran_on(record.gpu.arch):
        words += f"; kernels compile for {architecture(record.gpu)}, and this release never ran them on such a GPU"
    return GpuPart(words, CALIBRATE if record.origin == "derived" else "")


def gpu_library_part(index: int) -> GpuPart:
    """Return the libraries and the learned data of a GPU in words; without a library the command is a tuning run.

    Raises:
        DeviceError: no such GPU, or one older than sm_80.
        RecordError: a record or a library cannot be read.
    """
    gpu = record_of_device(index).gpu
    packaged, path = Library.packaged(gpu.name, missing_ok=True), user_library_path(gpu.name)
    tuned = Library.load(path) if path is not None and path.is_file() else Library(gpu.name, ())
    parts = [_library_words("packaged library", packaged), _library_words("own library", tuned)]
    parts += [_kind_words(gpu, *kind) for kind in _KINDS]
    return GpuPart("; ".join(parts), TUNE if packaged.is_empty and tuned.is_empty else "")


def _record_words(record: GpuRecord) -> str:
    if record.origin == "user":
        return "record calibrated on this machine"
    if record.origin == "derived":
        return "record estimated from the driver's attributes"
    estimated = f", estimated: {', '.join(record.estimated)}" if record.estimated else ""
    return f"packaged record{estimated}"


def _kind_words(gpu: Gpu, name: str, folder: str, ending: str) -> str:
    if has_data(gpu.name, folder, ending):
        return f"{name} of its own"
    try:
        other = nearest_with_data(gpu, folder, ending)
    except OutblasError:
        return f"no {name}"
    return f"{name} scaled from {other}" if folder == "models" else f"{name} of {other}"


def _library_words(name: str, library: Library) -> str:
    """Return a library with its size in words, e.g. ``own library of 3 problems and 2 intervals of M``."""
    if library.is_empty:
        return f"no {name}"
    intervals = f" and {len(library.intervals)} intervals of M" if library.intervals else ""
    return f"{name} of {len(library.rows)} problems{intervals}"
