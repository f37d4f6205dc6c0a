"""Answers to requests that cannot be read, so that their client does not wait for its time limit."""

from __future__ import annotations

import json
from typing import Any

from outblas.core.clean_text import clean_text

#: Most characters of the words on a line that cannot be read.
_WORDS_CHARS = 200


class AnsweringStream:
    """A stream of the SDK's messages. It answers a line with an error if that is no message but has a request's id.

    The SDK leaves such a line out: its client waits for an answer that never comes. Half a surrogate pair makes a line
    unreadable, for example. Iterate over it, or await ``receive()``; both skip these lines. Other attributes are those
    of the SDK's stream.

    Args:
        read: the SDK's stream of messages and errors.
        write: the SDK's stream to the client.
    """

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read, name)

    async def receive(self) -> Any:
        """Return the next message. Raise what the SDK's stream raises at its end."""
        while isinstance(item := await self._read.receive(), Exception):
            if (number := request_id(item)) is not None:
                await self._write.send(_refusal(number, item))
        return item

    def __aiter__(self) -> AnsweringStream:
        return self

    async def __anext__(self) -> Any:
        import anyio

        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> AnsweringStream:
        await self._read.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._read.__aexit__(*error)


def request_id(error: Exception) -> str | int | None:
    """Return the id of the request that the SDK's reader could not read; None if the line has none.

    Args:
        error: a ``pydantic.ValidationError`` whose input is the line, or any other error.
    """
    try:
        found = json.loads(error.errors()[0]["input"])  # type: ignore[attr-defined]  # no ValidationError: None
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None
    number = found.get("id") if isinstance(found, dict) and "method" in found else None
    return clean_text(number, _WORDS_CHARS) if isinstance(number, str) else number if type(number) is int else None


def _refusal(number: str | int, error: Exception) -> Any:
    import mcp_types as types
    from mcp.shared.message import SessionMessage

    fault = error.errors()[0]["msg"]  # type: ignore[attr-defined]
    words = clean_text(f"the request cannot be read: {fault}", _WORDS_CHARS)
    data = types.ErrorData(code=types.PARSE_ERROR, message=words)
    return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=number, error=data))
