"""A compiled kernel (cubin) and the on-disk cache of compiled kernels."""

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

#: Start of every file and of every key. A new number makes files of the old format unreadable.
FORMAT = "outblas-cubin-3"
_MAGIC = FORMAT.encode() + b"\n"
_DIGEST = 32


@dataclass(frozen=True)
class SassFacts:
    """Instruction counts of one cubin, summed over all its functions.

    Attributes:
        hgmma: warpgroup matrix instructions on 16-bit or tf32 operands.
        hmma: warp matrix instructions on 16-bit or tf32 operands.
        qgmma: warpgroup matrix instructions on 8-bit operands.
        utmaldg: TMA loads.
        utmastg: TMA stores.
        ldl: loads from local memory (spills, or arrays with run-time indices).
        stl: stores to local memory.
        ldgsts: cp.async instructions.
        accumulators: accumulator types of the matrix instructions, sorted: ``fp16``, ``fp32``.
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
    """Machine code of one kernel, with facts that the compiler reported.

    Attributes:
        registers: registers per thread.
        spill_bytes: bytes of spill stores plus spill loads.
        stack_bytes: local stack, bytes.
        static_smem: static shared memory, bytes.
        compile_seconds: duration of the compilation, also if the cubin now comes from the cache.
        from_cache: True if it was not compiled now.
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
    """Cache of cubins on disk, one checksummed file per key. :meth:`put` stores a cubin, :meth:`get` reads it.

    A key is the text of :func:`outblas.runtime.nvrtc.cache_key`. The folder is made at the first write.
    The cache never causes a failure. A damaged file counts as absent. An unwritable directory or a full disk costs one
    warning (RuntimeWarning). So does a file that another user may have written: a link, or a file or directory that
    another user owns or may change.

    Args:
        directory: folder of the cache; None: :func:`default_directory`, read at each use.
        quiet: give no warning, only set :attr:`trouble`.

    Attributes:
        trouble: why the cache is not written; empty if it works so far.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, quiet: bool = False) -> None:
        self._directory = None if directory is None else Path(directory)
        self._quiet = quiet
        self._checked: Path | None = None
        #: Why the cache is not written; empty if it works so far.
        self.trouble = ""

    @property
    def directory(self) -> Path:
        return default_directory() if self._directory is None else self._directory

    def path(self, key: str) -> Path:
        """Return the path of the file for a key, which need not exist.

        Example: ``CubinCache("/tmp/c").path("abcd")`` is ``/tmp/c/cubin/ab/abcd``.
        """
        return self.directory / "cubin" / key[:2] / key

    def get(self, key: str) -> Cubin | None:
        """Return the cubin of a key; None if the cache lacks it or its file is damaged. Its ``from_cache`` is True."""
        try:
            data = read_own_file(self.path(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._stop("read", error)
            return None
        return decode(data, key)

    def put(self, key: str, cubin: Cubin) -> None:
        """Store a cubin atomically: other processes see the whole file or none.

        A cubin of the same key is replaced. After the first failure the method does nothing.
        """
        if self.trouble:
            return
        try:
            self._make_directory()
            _publish(self.path(key), encode(cubin, key))
        except OSError as error:
            self._stop("written", error)

    @contextlib.contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key for a ``with`` block; wait while another process has it.

        Keys share 256 lock files, so no lock file needs to be removed. If the cache cannot be written, there is no lock
        and no wait. Example: ``with cache.locked(key): ...``.
        """
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
        """Make the directory and check once that no other user may write to it. Raises OSError."""
        directory = self.directory
        if directory != self._checked:
            directory.mkdir(parents=True, exist_ok=True)
            check_own_folder(directory)
            self._checked = directory

    def _stop(self, what: str, error: OSError) -> None:
        """Stop writing because of an error; ``what`` is "read" or "written"."""
        if isinstance(error, NotOursError):
            self.stop_writing(f"is not used: {error.filename} {error.strerror}")
        else:
            self.stop_writing(f"cannot be {what}: {error}")

    def stop_writing(self, trouble: str) -> None:
        """Stop writing to the cache. The first call sets :attr:`trouble` and warns unless ``quiet``; later ones do
        nothing.
        """
        if self.trouble:
            return
        self.trouble = trouble
        if not self._quiet:
            warnings.warn(
                f"outblas recompiles kernels: compile cache {self.directory} {trouble}; expected your own writable "
                "directory with free space; set OUTBLAS_CACHE_DIR",
                RuntimeWarning,
                stacklevel=2,
            )


def default_directory() -> Path:
    """Return ``$OUTBLAS_CACHE_DIR``, else ``$XDG_CACHE_HOME/outblas``, else ``~/.cache/outblas``, as a Path.

    An empty variable counts as not set. The folder is not made.
    """
    if named := os.environ.get("OUTBLAS_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "outblas")


def encode(cubin: Cubin, key: str) -> bytes:
    """Return a cubin as the bytes of a cache file: magic, SHA-256 of the rest, a JSON line, the image.

    They begin with ``outblas-cubin-3`` and a newline. :func:`decode` with the same key reads them.
    """
    record = asdict(cubin)
    image = record.pop("image")
    record["key"] = key
    body = json.dumps(record).encode() + b"\n" + image
    return _MAGIC + hashlib.sha256(body).digest() + body


def decode(data: bytes, key: str) -> Cubin | None:
    """Return the cubin in the bytes of a cache file; None if they are damaged, of another key, or have wrong fields.

    Its ``from_cache`` is True. No data raise an error: ``decode(b"", key)`` returns None.
    """
    start = len(_MAGIC) + _DIGEST
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != hashlib.sha256(body).digest():
        return None
    text, _, image = body.partition(b"\n")
    try:
        record = json.loads(text)
        if record.pop("key") != key:  # a file that was renamed to another key
            return None
        facts = record.pop("facts")
        facts["accumulators"] = tuple(facts["accumulators"])
        cubin = Cubin(image=image, facts=SassFacts(**facts), **{**record, "from_cache": True})
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None  # only a deliberately forged file has a right checksum here
    return cubin if _has_its_types(cubin) and _has_its_types(cubin.facts) else None


#: Annotation of a field -> accepted types.
_TYPES: dict[str, tuple[type, ...]] = {
    "bytes": (bytes,), "str": (str,), "int": (int,), "bool": (bool,), "float": (float, int), "SassFacts": (SassFacts,),
}  # fmt: skip


def _has_its_types(record: Any) -> bool:
    """Return whether every field of a record has a value of its annotated type."""
    for field in fields(record):
        value, wanted = getattr(record, field.name), str(field.type)
        if wanted == "tuple[str, ...]":
            if not all(type(each) is str for each in value):
                return False
        elif type(value) not in _TYPES[wanted]:
            return False
    return True


def _publish(path: Path, data: bytes) -> None:
    """Write a temporary file, sync it, and rename it, so that no crash leaves a partial file at ``path``."""
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
