"""Messages between a sandbox and its worker: pickles, or JSON of a worker that is not trusted."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any

from outblas.core.clean_text import clean_text

#: Bytes of one message, and letters of its words, with a codec.
_MESSAGE_BYTES, _WORDS = 16 << 20, 400


class UnreadableMessage(Exception):
    """An error: a worker with a codec sent something that is no message of that form. It is no OutblasError."""


def receive(connection: Connection, codec: str | None, left: Collection[int]) -> Sequence[Any]:
    """Return a worker's next message as a tuple: its kind, then what belongs to it, e.g. ``("done", 0, value)``.

    Kinds: ``ready``, ``begin`` (index or None), ``done`` (index, value), ``fault`` (text), ``error`` (text), ``end``.

    Args:
        connection: pipe to the worker; the call waits for one. Without a codec ``ready`` and ``end`` have PhaseTotals.
        codec: module whose ``decode`` reads a value of ``done``; None: the message is unpickled and not checked.
        left: with a codec, indices that ``begin`` (or None) and ``done`` may name.

    Raises:
        UnreadableMessage: with a codec, the message has another form or names another index.
        EOFError: the pipe is closed.
        OSError: the pipe broke; with a codec, also a message above 16 MiB.
    """
    if codec is None:
        return connection.recv()  # type: ignore[no-any-return]
    data = connection.recv_bytes(_MESSAGE_BYTES)  # one that is longer closes the pipe: OSError
    try:
        kind, *rest = json.loads(data)
        if kind in ("ready", "end") and not rest:
            return (kind,)
        if kind in ("fault", "error") and len(rest) == 1 and isinstance(rest[0], str):
            return kind, clean_text(rest[0], _WORDS)
        if kind == "begin" and (rest == [None] or (_is_index(rest[0], left) and len(rest) == 1)):
            return kind, rest[0]
        if kind == "done" and _is_index(rest[0], left) and len(rest) == 2:
            return kind, rest[0], importlib.import_module(codec).decode(rest[1])
    except Exception as error:  # whatever a stranger's message does to a reader is the message's fault
        raise UnreadableMessage(f"{type(error).__name__}: {clean_text(str(error), _WORDS)}") from error
    raise UnreadableMessage("no message")


def _is_index(found: object, left: Collection[int]) -> bool:
    """Return True if ``found`` is an int that names an item.

    ``true`` and ``1.0`` do not, though they equal an index.
    """
    return type(found) is int and found in left


class PlainConnection:
    """A connection whose messages are JSON; accounts stay behind."""

    def __init__(self, connection: Connection, codec: str) -> None:
        self._connection, self._codec = connection, importlib.import_module(codec)

    def send(self, message: tuple[Any, ...]) -> None:
        if message[0] == "done":
            message = (*message[:2], self._codec.encode(message[2]))
        elif message[0] in ("ready", "end"):
            message = message[:1]
        self._connection.send_bytes(json.dumps(message).encode())
