"""A pack: many cubins in one file, each readable on its own. Packages ship their compiled kernels in this form.

Layout, little-endian, without gaps::

    head        magic, size of the file, size of `about`, counts of rows, images and dictionaries,
                SHA-256 of the table that follows
    table       `about` (JSON), keys (16 bytes each, sorted), image index of each key, images, dictionaries
    dictionaries, images    each compressed by zlib

A row is a kernel; kernels with equal machine code share an image. An image is the compiler's facts on a cubin (one JSON
line) and its ELF file. Images of one kernel function and of about one length are similar. So they are compressed with a
preset dictionary made from some of them. This saves half, and each image still unpacks on its own. The architecture
is part of the key and of the image, so a file may hold several architectures.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.kernels.source import Source, sha_without_headers
from outblas.runtime.cubin import Cubin, SassFacts

#: Images that share a dictionary, at most. Fewer are more alike; each dictionary takes about 6 KB of the file.
IMAGES_OF_A_DICTIONARY = 48
#: Command that makes a pack (outblas.dispatch.cubin_build, a package above this one).
BUILD_COMMAND = "python -m outblas.dispatch.cubin_build"
#: A new number makes files of the old format unreadable.
MAGIC = b"outblas-cubins-1"
#: zlib's window: a longer dictionary has no effect.
ZLIB_WINDOW_BYTES = 1 << 15
_HEAD = struct.Struct("<16sQIIII32s")
_KEY, _IMAGE_OF_KEY = 16, struct.Struct("<I")
#: Offset, compressed bytes, index of the dictionary, digest of the uncompressed image.
_IMAGE = struct.Struct("<QII8s")
_DICTIONARY = struct.Struct("<QI")
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

    Example: ``CubinPack("kernels.pack").get(pack_key(source, "sm_90a"))`` returns a Cubin or None.

    Args:
        path: the file.

    Attributes:
        path: the file, as a Path.
        about: origin of the cubins, a dict of JSON values such as ``"nvrtc": "13.0 (wheel 13.0.88)"``. Other keys:
            ``outblas``, ``kernels``, ``libraries``, ``any_shape``, ``architectures``.
        bytes: size of the file.
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
        self._unpacked: dict[int, bytes] = {}
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
            return _decoded(self._image(index))
        except (OSError, struct.error, zlib.error, ValueError, LookupError, TypeError, AttributeError,
                RecursionError) as error:  # fmt: skip
            raise self._unusable(str(error)) from error

    def _read_table(self, head: bytes, file: Any) -> None:
        magic, size, about, rows, images, dictionaries, digest = _HEAD.unpack(head)
        if magic != MAGIC:
            raise ValueError(f"begins with {magic!r}")
        if size != self.bytes:
            raise ValueError(f"{self.bytes} bytes of {size}")
        parts = [about, rows * _KEY, rows * _IMAGE_OF_KEY.size, images * _IMAGE.size, dictionaries * _DICTIONARY.size]
        table = file.read(sum(parts)) if sum(parts) <= size else b""
        if hashlib.sha256(table).digest() != digest:
            raise ValueError("its table is damaged")
        pieces = [table[sum(parts[:i]) : sum(parts[: i + 1])] for i in range(len(parts))]
        self.about: Mapping[str, Any] = json.loads(pieces[0])
        if not isinstance(self.about, dict):
            raise ValueError("it says nothing of where it comes from")
        self._keys, self._image_of_key, self._images, self._dictionaries = pieces[1:]
        self.images = images

    def _key(self, row: int) -> bytes:
        return self._keys[row * _KEY : (row + 1) * _KEY]

    def _image(self, index: int) -> bytes:
        offset, size, dictionary, digest = _IMAGE.unpack_from(self._images, index * _IMAGE.size)
        inflated = zlib.decompressobj(zdict=self._dictionary(dictionary)).decompress(self._read(offset, size))
        if _digest(inflated) != digest:
            raise ValueError("a cubin is damaged")
        return inflated

    def _dictionary(self, index: int) -> bytes:
        with self._lock:
            if index not in self._unpacked:
                offset, size = _DICTIONARY.unpack_from(self._dictionaries, index * _DICTIONARY.size)
                self._unpacked[index] = zlib.decompress(self._read(offset, size))
            return self._unpacked[index]

    def _read(self, offset: int, size: int) -> bytes:
        with open(self.path, "rb") as file:  # several threads may read at once
            file.seek(offset)
            return file.read(size)

    def _unusable(self, reason: str) -> RecordError:
        return RecordError(
            f"cubins {self.path} cannot be used ({reason})",
            f"a whole file of format {MAGIC.decode()}",
            f"install the package afresh, or: {BUILD_COMMAND}",
        )


def pack_bytes(cubins: Mapping[bytes, Cubin], about: Mapping[str, Any]) -> bytes:
    """Return the content of a pack file. Equal arguments give equal bytes. Nothing is written.

    Example: ``path.write_bytes(pack_bytes({pack_key(source, "sm_90a"): cubin}, {"nvrtc": "13.0"}))``.

    Args:
        cubins: :func:`pack_key` -> cubin.
        about: origin of the cubins; JSON values.
    """
    rows = sorted(cubins.items())
    images: dict[bytes, int] = {}
    groups: dict[str, list[bytes]] = {}
    for _, cubin in rows:
        image = _encoded(cubin)
        if image not in images:
            images[image] = len(images)
            groups.setdefault(cubin.entry, []).append(image)
    alike = [part for group in groups.values() for part in _in_parts(group)]
    dictionaries = [_dictionary_of(part) for part in alike]
    blobs = [zlib.compress(each, 9) for each in dictionaries]
    number = {image: i for i, part in enumerate(alike) for image in part}
    blobs += [_deflated(image, dictionaries[number[image]]) for image in images]

    text = json.dumps(about, sort_keys=True).encode()
    counts = len(text), len(rows), len(images), len(dictionaries)
    start = _HEAD.size + len(text) + len(rows) * (_KEY + _IMAGE_OF_KEY.size)
    start += len(images) * _IMAGE.size + len(dictionaries) * _DICTIONARY.size
    offsets = [start]
    for blob in blobs:
        offsets.append(offsets[-1] + len(blob))
    extents = list(zip(offsets, map(len, blobs), strict=False))  # the last offset is the end of the file
    of_dictionaries, of_images = extents[: len(dictionaries)], extents[len(dictionaries) :]
    table = b"".join(
        [
            text,
            *(key for key, _ in rows),
            *(_IMAGE_OF_KEY.pack(images[_encoded(cubin)]) for _, cubin in rows),
            *(_IMAGE.pack(*at, number[image], _digest(image)) for at, image in zip(of_images, images, strict=True)),
            *(_DICTIONARY.pack(*at) for at in of_dictionaries),
        ]
    )
    head = _HEAD.pack(MAGIC, offsets[-1], *counts, hashlib.sha256(table).digest())
    return b"".join([head, table, *blobs])


def _in_parts(images: Sequence[bytes]) -> list[list[bytes]]:
    """Return the images in parts of neighbours by length, the shortest first."""
    ranked = sorted(images, key=lambda image: (len(image), image))
    return [ranked[i:][:IMAGES_OF_A_DICTIONARY] for i in range(0, len(ranked), IMAGES_OF_A_DICTIONARY)]


def _dictionary_of(images: Sequence[bytes]) -> bytes:
    """Return a dictionary of at most 32 KiB: as many whole images as fit, spread evenly over all of them."""
    room = max(1, ZLIB_WINDOW_BYTES * len(images) // max(1, sum(map(len, images))))
    chosen = images[:: max(1, len(images) // room)]
    return b"".join(chosen)[-ZLIB_WINDOW_BYTES:]


def _deflated(image: bytes, dictionary: bytes) -> bytes:
    deflate = zlib.compressobj(9, memLevel=9, zdict=dictionary)
    return deflate.compress(image) + deflate.flush()


def _encoded(cubin: Cubin) -> bytes:
    record = {name: value for name, value in asdict(cubin).items() if name not in _LEFT_OUT}
    return json.dumps(record).encode() + b"\n" + cubin.image


def _decoded(data: bytes) -> Cubin:
    text, _, image = data.partition(b"\n")
    record = json.loads(text)
    facts = record.pop("facts")
    facts["accumulators"] = tuple(facts["accumulators"])
    return Cubin(image=image, facts=SassFacts(**facts), compile_seconds=0.0, from_cache=True, log="", **record)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
