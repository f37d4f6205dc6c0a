"""A pack: many cubins in one file, each readable on its own. Packages ship their compiled kernels in this form.

Layout, little-endian, without gaps::

    head        magic, size of the file, size of `about`, counts of rows, images and blocks,
                SHA-256 of the table that follows
    table       `about` (JSON), keys (16 bytes each, sorted), image index of each key, images, blocks
    blocks      each some whole images, compressed by LZMA2

A row is a kernel; kernels with equal machine code share an image. An image is the compiler's facts on a cubin (one JSON
line) and its ELF file. Images of one kernel function and of about one length are similar. So a dozen of them are
compressed together, which takes a fifth of what they take one by one. A reader unpacks one block, about a millisecond.
The architecture is part of the key and of the image, so a file may hold several architectures.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.kernels.source import Source, sha_without_headers
from outblas.runtime.cubin import Cubin, SassFacts

#: Images of a block, at most. More make a smaller file, and a kernel that takes longer to unpack.
IMAGES_OF_A_BLOCK = 12
#: Command that makes a pack (outblas_lab.build.cubin_build, a package above this one).
BUILD_COMMAND = "python -m outblas_lab.build.cubin_build"
#: A new number makes files of the old format unreadable.
MAGIC = b"outblas-cubins-2"
#: Bytes back to which LZMA looks; a block is shorter.
_WINDOW_BYTES = 1 << 20
#: Unpacked bytes of a block, at most. A longer image has a block of its own.
MOST_BLOCK_BYTES = 1 << 20
#: Unpacked blocks that a pack keeps: the kernels of a program are often neighbours.
_KEPT_BLOCKS = 8
_HEAD = struct.Struct("<16sQIIII32s")
_KEY, _IMAGE_OF_KEY = 16, struct.Struct("<I")
#: Block, offset in the unpacked block, bytes, digest of the image.
_IMAGE = struct.Struct("<III8s")
#: Offset in the file, compressed bytes, unpacked bytes.
_BLOCK = struct.Struct("<QII")
#: Fields of a cubin that the JSON line omits: they describe one compilation, or are the image itself.
_LEFT_OUT = ("image", "compile_seconds", "from_cache", "log")


def pack_key(source: Source, arch: str) -> bytes:
    """Return the key (16 bytes) of a kernel in a pack. ``arch`` is a text such as ``"sm_90a"``; it is not checked.

    It covers the architecture and all of the source except the kernel files, which are the same for the whole pack.
    """
    return hashlib.blake2b(f"{arch}\0{sha_without_headers(source)}".encode(), digest_size=_KEY).digest()


class CubinPack:
    """A pack, opened for reading. Opening reads the table only; ``len()`` is the number of kernels.

    :meth:`get` looks a kernel up, by a key and not by ``[]``. The file is not kept open, so there is nothing to close.

    Attributes:
        about: origin of the cubins, a dict of JSON values such as ``"nvrtc": "13.0 (wheel 13.0.88)"``. Other keys:
            ``outblas``, ``kernels``, ``libraries``, ``any_shape``, ``architectures``.
        images: number of different cubins.

    Raises:
        RecordError: the file is missing, cannot be read, is truncated, damaged, or of another format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self.bytes = os.fstat(file.fileno()).st_size
                self._read_table(file.read(_HEAD.size), file)
        except (OSError, struct.error, ValueError, RecursionError) as error:
            raise self._unusable(str(error)) from error
        self._unpacked: dict[int, bytes] = {}  # the latest last
        self._lock = threading.RLock()  # reentrant: a signal handler may multiply meanwhile

    def __len__(self) -> int:
        return len(self._keys) // _KEY

    def get(self, key: bytes) -> Cubin | None:
        """Return the cubin of a :func:`pack_key`; None if the pack lacks it.

        Its ``from_cache`` is True, its ``compile_seconds`` 0.0 and its ``log`` empty.

        Raises:
            RecordError: the file is damaged or has changed.
        """
        row = bisect_left(range(len(self)), key, key=self._key)
        if row == len(self) or self._key(row) != key:
            return None
        (index,) = _IMAGE_OF_KEY.unpack_from(self._image_of_key, row * _IMAGE_OF_KEY.size)
        try:
            data = self._image(index)
            text, _, image = data.partition(b"\n")
            record = json.loads(text)
            facts = record.pop("facts")
            facts["accumulators"] = tuple(facts["accumulators"])
            return Cubin(image=image, facts=SassFacts(**facts), compile_seconds=0.0, from_cache=True, log="", **record)
        except (OSError, EOFError, ImportError, struct.error, ValueError, LookupError, TypeError, AttributeError,
                RecursionError) as error:  # fmt: skip
            raise self._unusable(str(error)) from error

    def _read_table(self, head: bytes, file: Any) -> None:
        magic, size, about, rows, images, blocks, digest = _HEAD.unpack(head)
        if magic != MAGIC:
            raise ValueError(f"it starts with {magic!r}")
        if size != self.bytes:
            raise ValueError(f"it has {self.bytes} of {size} bytes")
        parts = [about, rows * _KEY, rows * _IMAGE_OF_KEY.size, images * _IMAGE.size, blocks * _BLOCK.size]
        table = file.read(sum(parts)) if sum(parts) <= size else b""
        if hashlib.sha256(table).digest() != digest:
            raise ValueError("its table is damaged")
        pieces = [table[sum(parts[:i]) : sum(parts[: i + 1])] for i in range(len(parts))]
        self.about: Mapping[str, Any] = json.loads(pieces[0])
        if not isinstance(self.about, dict):
            raise ValueError("it has no provenance")
        self._keys, self._image_of_key, self._images, self._blocks = pieces[1:]
        self.images = images

    def _key(self, row: int) -> bytes:
        return self._keys[row * _KEY : (row + 1) * _KEY]

    def _image(self, index: int) -> bytes:
        block, offset, size, digest = _IMAGE.unpack_from(self._images, index * _IMAGE.size)
        image = self._block(block)[offset : offset + size]
        if _digest(image) != digest:
            with self._lock:
                self._unpacked.pop(block, None)
            raise ValueError("a cubin is damaged")
        return image

    def _block(self, index: int) -> bytes:
        with self._lock:
            found = self._unpacked.pop(index, None)
            if found is None:
                offset, size, unpacked = _BLOCK.unpack_from(self._blocks, index * _BLOCK.size)
                found = _unpacked(self._read(offset, size), unpacked)
            self._unpacked[index] = found
            while len(self._unpacked) > _KEPT_BLOCKS:
                del self._unpacked[next(iter(self._unpacked))]
            return found

    def _read(self, offset: int, size: int) -> bytes:
        with open(self.path, "rb") as file:  # several threads may read at once
            file.seek(offset)
            return file.read(size)

    def _unusable(self, reason: str) -> RecordError:
        return RecordError(
            f"cubins {self.path} cannot be used ({reason})",
            f"a complete file of format {MAGIC.decode()}",
            f"reinstall the package, or run {BUILD_COMMAND}",
        )


def pack_bytes(cubins: Mapping[bytes, Cubin], about: Mapping[str, Any]) -> bytes:
    """Return the content of a pack file. Equal arguments give equal bytes. Nothing is written.

    Args:
        cubins: :func:`pack_key` -> cubin.
    """
    rows = sorted(cubins.items())
    images: dict[bytes, int] = {}
    groups: dict[str, list[bytes]] = {}
    for _, cubin in rows:
        image = _encoded(cubin)
        if image not in images:
            images[image] = len(images)
            groups.setdefault(cubin.entry, []).append(image)
    alike = [part for group in groups.values() for part in _in_blocks(group)]
    blobs = [_packed(b"".join(part)) for part in alike]
    places = {image: place for i, part in enumerate(alike) for image, place in _places(i, part)}

    text = json.dumps(about, sort_keys=True).encode()
    counts = len(text), len(rows), len(images), len(blobs)
    start = _HEAD.size + len(text) + len(rows) * (_KEY + _IMAGE_OF_KEY.size)
    start += len(images) * _IMAGE.size + len(blobs) * _BLOCK.size
    offsets = [start]
    for blob in blobs:
        offsets.append(offsets[-1] + len(blob))
    extents = zip(offsets, map(len, blobs), (sum(map(len, part)) for part in alike), strict=False)  # last: the end
    table = b"".join(
        [
            text,
            *(key for key, _ in rows),
            *(_IMAGE_OF_KEY.pack(images[_encoded(cubin)]) for _, cubin in rows),
            *(_IMAGE.pack(*places[image], len(image), _digest(image)) for image in images),
            *(_BLOCK.pack(*extent) for extent in extents),
        ]
    )
    head = _HEAD.pack(MAGIC, offsets[-1], *counts, hashlib.sha256(table).digest())
    return b"".join([head, table, *blobs])


def _in_blocks(images: Sequence[bytes]) -> list[list[bytes]]:
    """Return the images in blocks of neighbours by length, the shortest first."""
    blocks: list[list[bytes]] = []
    for image in sorted(images, key=lambda image: (len(image), image)):
        last = blocks[-1] if blocks else None
        if last is None or len(last) == IMAGES_OF_A_BLOCK or sum(map(len, last)) + len(image) > MOST_BLOCK_BYTES:
            blocks.append(last := [])
        last.append(image)
    return blocks


def _places(block: int, images: Sequence[bytes]) -> list[tuple[bytes, tuple[int, int]]]:
    """Return each image of a block with (the block, its offset there)."""
    ends = list(accumulate(map(len, images)))
    return [(image, (block, end - len(image))) for image, end in zip(images, ends, strict=True)]


def _packed(block: bytes) -> bytes:
    import lzma

    return lzma.compress(block, lzma.FORMAT_RAW, filters=_filters())


def _unpacked(data: bytes, size: int) -> bytes:
    """Return a block of that many bytes; ValueError if it has fewer, or is damaged."""
    import lzma  # here: a Python may be built without it, and then every kernel is compiled

    if not 0 <= size <= 1 << 30:
        raise ValueError(f"a block of {size} bytes")
    try:
        found = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_filters()).decompress(data, size)
    except lzma.LZMAError as error:
        raise ValueError(f"a block is damaged: {error}") from error
    if len(found) != size:
        raise ValueError(f"a block has {len(found)} bytes of {size}")
    return found


def _filters() -> list[dict[str, int]]:
    import lzma

    return [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": _WINDOW_BYTES}]


def _encoded(cubin: Cubin) -> bytes:
    record = {name: value for name, value in asdict(cubin).items() if name not in _LEFT_OUT}
    return json.dumps(record).encode() + b"\n" + cubin.image


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
