"""A compiled kernel, and the directory that keeps compiled kernels between runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from outblas.core.plain_files import NotOursError, check_own_folder, open_lock, read_own_file

#: Leads every file and every key; a new number leaves files of the old format unread.
FORMAT = "outblas-cubin-3"
_MAGIC = FORMAT.encode() + b"\n"
_DIGEST = 32


@dataclass(frozen=True)
class SassFacts:
    """Instruction counts of one cubin, all its functions together.

    Attributes:
        hgmma, hmma: warpgroup and warp matrix instructions on 16-bit (or tf32) operands.
        qgmma: warpgroup matrix instructions on 8-bit operands.
        utmaldg, utmastg: TMA loads and stores; ldgsts: cp.async.
        ldl, stl: loads and stores of local memory (spills, or arrays indexed at run time).
        accumulators: widths in which the matrix instructions accumulate, sorted: of fp16, fp32.
    """

    hgmma: int
    hmma: int
    qgmma: int
    utmaldg: int
    utmastg: int
    ldl: int
    stl: int
    ldgsts: int
    accumulators: tuple[str, ...]


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel and what the compiler said of it.

    Attributes:
        image: the ELF cubin. entry: its kernel. arch: e.g. ``sm_90a``.
        registers: per thread. spill_bytes: spill stores + loads. stack_bytes: local stack.
        static_smem: static shared memory, bytes.
        facts: instruction counts of the SASS.
        compile_seconds: what the compilation took when it was done. from_cache: not done now.
        log: NVRTC's and ptxas' words.
    """

    image: bytes
    entry: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem: int
    facts: SassFacts
    compile_seconds: float
    from_cache: bool
    log: str


class CubinCache:
    """Cubins on disk, one checksummed file per key.

    It is an accelerator only: a damaged file counts as absent, and a directory that cannot be
    written or a full disk costs one warning, never a failure. So does what others may have written: a file that is
    a link or another user's, a directory that is another user's or that everybody may write to.

    Args:
        directory: where the files are; None: ``$OUTBLAS_CACHE_DIR``, else ``~/.cache/outblas``.
        quiet: give no warning, only set :attr:`trouble`.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, quiet: bool = False) -> None:
        self._directory = None if directory is None else Path(directory)
        self._quiet = quiet
        self._checked: Path | None = None
        #: What keeps the cache from being written (empty: nothing so far).
        self.trouble = ""

    @property
    def directory(self) -> Path:
        return default_directory() if self._directory is None else self._directory

    def path(self, key: str) -> Path:
        return self.directory / "cubin" / key[:2] / key

    def get(self, key: str) -> Cubin | None:
        """The cubin kept under ``key``; None where there is none or its file is damaged."""
        try:
            data = read_own_file(self.path(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._stop("read", error)
            return None
        return decode(data, key)

    def put(self, key: str, cubin: Cubin) -> None:
        """Keep ``cubin``; other processes see the whole file or none."""
        if self.trouble:
            return
        try:
            self._make_directory()
            _publish(self.path(key), encode(cubin, key))
        except OSError as error:
            self._stop("written", error)

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """A process' turn at ``key``: others that claim it wait, until this one is done or dead. Keys share 256 locks,
        so that none has to be removed; where the cache cannot be written there is no turn to wait for."""
        with contextlib.ExitStack() as held:
            if not self.trouble:
                try:
                    self._make_directory()
                    path = self.directory / "lock" / key[:2]
                    path.parent.mkdir(exist_ok=True)
                    fcntl.flock(held.enter_context(open_lock(path)), fcntl.LOCK_EX)
                except OSError as error:
                    self._stop("written", error)
            yield

    def _make_directory(self) -> None:
        """Make the directory, and look once at who may write to it. Raises OSError."""
        directory = self.directory
        if directory != self._checked:
            directory.mkdir(parents=True, exist_ok=True)
            check_own_folder(directory)
            self._checked = directory

    def _stop(self, what: str, error: OSError) -> None:
        if isinstance(error, NotOursError):
            self.stop_writing(f"is not used: {error.filename} {error.strerror}")
        else:
            self.stop_writing(f"cannot be {what}: {error}")

    def stop_writing(self, trouble: str) -> None:
        """Go on without writing; the first time with a warning."""
        if self.trouble:
            return
        self.trouble = trouble
        if not self._quiet:
            warnings.warn(
                f"compile cache {self.directory} {trouble}; expected a writable directory of your own with space; "
                "set OUTBLAS_CACHE_DIR (kernels are compiled afresh meanwhile)",
                RuntimeWarning,
                stacklevel=2,
            )


def default_directory() -> Path:
    """``$OUTBLAS_CACHE_DIR``, else ``$XDG_CACHE_HOME/outblas``, else ``~/.cache/outblas``."""
    if named := os.environ.get("OUTBLAS_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "outblas")


def encode(cubin: Cubin, key: str) -> bytes:
    """A cubin as a file: magic, SHA-256 of the rest, JSON line, image."""
    record = asdict(cubin)
    image = record.pop("image")
    record["key"] = key
    body = json.dumps(record).encode() + b"\n" + image
    return _MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes, key: str) -> Cubin | None:
    """Inverse of :func:`encode`. Return None if it is damaged, another key's, or holds what no cubin has."""
    start = len(_MAGIC) + _DIGEST
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != hashlib.sha256(body).digest():
        return None
    text, _, image = body.partition(b"\n")
    try:
        record = json.loads(text)
        if record.pop("key") != key:  # a file moved to another's name
            return None
        facts = record.pop("facts")
        facts["accumulators"] = tuple(facts["accumulators"])
        cubin = Cubin(image=image, facts=SassFacts(**facts), **{**record, "from_cache": True})
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None  # only who makes checksums for it writes such a file
    return cubin if _has_its_types(cubin) and _has_its_types(cubin.facts) else None


#: Types of fields, by their annotations.
_TYPES: dict[str, tuple[type, ...]] = {
    "bytes": (bytes,), "str": (str,), "int": (int,), "bool": (bool,), "float": (float, int), "SassFacts": (SassFacts,),
}  # fmt: skip


def _has_its_types(record: Any) -> bool:
    """Whether every field of a record holds what it is annotated with."""
    for field in fields(record):
        value, wanted = getattr(record, field.name), str(field.type)
        if wanted == "tuple[str, ...]":
            if not all(type(each) is str for each in value):
                return False
        elif type(value) not in _TYPES[wanted]:
            return False
    return True


def _publish(path: Path, data: bytes) -> None:
    """Write beside, flush to the disk, rename: a crash or a full disk leaves no half file under ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
