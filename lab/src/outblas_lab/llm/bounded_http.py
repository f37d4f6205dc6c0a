"""The HTTP below a language model's client: what a server sends is cut while it comes, and leads nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any

#: Most bytes of an answer; the longest one that is kept has a quarter of that, its thoughts as much.
ANSWER_BYTES = 8 << 20
#: Bytes that are read of a page that says why there is no answer.
FAILURE_BYTES = 64 << 10
#: Extension of a response that holds the address to which a server redirects.
REDIRECT = "outblas_redirect"


class BodyRefused(Exception):
    """An error: an answer is not read, because it is longer than 8 MiB or packed (has a content encoding)."""


def bounded_http_client() -> Any:
    """Return an HTTP client for the ``openai`` package (an ``httpx.AsyncClient``) that limits every answer.

    It follows no redirect, unpacks nothing, keeps no cookie, and reads every text as UTF-8.

    A request through it raises BodyRefused if a successful answer is packed or has more than 8 MiB. The body of a
    failed request is cut after 64 KiB, and dropped if it is packed, without an error.

    Raises:
        ModuleNotFoundError: ``openai`` is not installed.
    """
    import openai

    make: Any = openai.DefaultAsyncHttpxClient
    http: Any = importlib.import_module(make.__mro__[1].__module__.partition(".")[0])  # the one that openai is made for

    class CutBody(http.AsyncByteStream):  # type: ignore[misc]
        """A body up to a limit of bytes, then silence or the error."""

        def __init__(self, body: Any, limit: int, error: BodyRefused | None) -> None:
            self._body, self._limit, self._error = body, limit, error

        async def __aiter__(self) -> AsyncIterator[bytes]:
            left = self._limit
            async for part in self._body:
                yield part[:left]
                left -= len(part)
                if left < 0 and self._error is not None:
                    raise self._error
                if left <= 0 and self._error is None:
                    return

        async def aclose(self) -> None:
            await self._body.aclose()

    async def bound(response: Any) -> None:
        client.cookies.clear()
        if "location" in response.headers:  # the client parses it even so, and fails on an address that is none
            response.extensions[REDIRECT] = response.headers.pop("location")
        response.encoding = "utf-8"
        encoding = response.headers.pop("content-encoding", "").strip().lower()
        packed = encoding not in ("", "identity")
        if response.is_success:
            if packed:
                raise BodyRefused(f"the server compressed its response ({encoding}) without being asked to")
            error = BodyRefused(f"the answer has more than {ANSWER_BYTES >> 20} MiB")
            response.stream = CutBody(response.stream, ANSWER_BYTES, error)
        else:
            response.stream = CutBody(response.stream, 0 if packed else FAILURE_BYTES, None)

    hooks, headers = {"response": [bound]}, {"Accept-Encoding": "identity"}
    client: Any = make(follow_redirects=False, headers=headers, event_hooks=hooks)
    return client
