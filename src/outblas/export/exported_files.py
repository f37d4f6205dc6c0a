"""The files of an export, by format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.files import write_atomic
from outblas.export.cpp import checking_program, launch_header
from outblas.export.cuda_source import standalone
from outblas.export.huggingface import write_folder
from outblas.export.target import Target
from outblas.kernels.source import make_source
from outblas.runtime.nvrtc import compile_ptx, compile_tuned

#: Formats of single files; ``all`` is these, ``hf`` a folder.
FORMATS = ("cu", "ptx", "cubin", "cpp")


def export(target: Target, formats: Sequence[str], folder: Path, tell: Callable[[str], object] = str) -> list[Path]:
    """Write a target in some formats and return the files, in the order of the formats.

    Args:
        formats: some of ``cu``, ``ptx``, ``cubin``, ``cpp``, ``all`` (these four) and ``hf``; duplicates count once.
        folder: folder of the files, which are named after ``target.name``. It is made if it is missing.
        tell: gets a line for each format of ``all`` that is left out, because NVRTC is not installed.

    Raises:
        UsageError: a format is unknown, or ``formats`` is empty; nothing is written.
        CompileError: NVRTC refuses the kernel (``ptx`` and ``cubin``).
        ToolchainMissing: NVRTC is not installed (``ptx`` and ``cubin``, if they are named).
        RecordError: a file cannot be written.
    """
    wanted = list(dict.fromkeys(one for name in formats for one in (FORMATS if name == "all" else (name,))))
    odd = [name for name in wanted if name not in (*FORMATS, "hf")]
    if odd or not wanted:
        wrong = f"unknown format {', '.join(map(repr, odd)) or 'none'}"
        raise UsageError(wrong, ", ".join((*FORMATS, "all", "hf")), "pass one or more of them as --format")
    written: list[Path] = []
    for name in wanted:
        if name == "hf":
            written += write_folder([target], target.name, folder / f"{target.name}_hf")
            continue
        try:
            written += [write_atomic(folder / f"{target.name}{end}", make(target)) for end, make in _MAKERS[name]]
        except ToolchainMissing as error:
            if name in formats:
                raise
            tell(f"skipped {name}: {error}")
    return written


def _cubin(target: Target) -> bytes:
    return compile_tuned(make_source(target.problem, target.config)).image


def _ptx(target: Target) -> bytes:
    return f"{target.comment()}\n{compile_ptx(make_source(target.problem, target.config))}".encode()


_MAKERS: dict[str, tuple[tuple[str, Callable[[Target], bytes]], ...]] = {
    "cu": ((".cu", lambda target: standalone(target).encode()),),
    "ptx": ((".ptx", _ptx),),
    "cubin": ((".cubin", _cubin),),
    "cpp": (
        (".h", lambda target: launch_header(target).encode()),
        ("_test.cpp", lambda target: checking_program(target).encode()),
    ),
}
