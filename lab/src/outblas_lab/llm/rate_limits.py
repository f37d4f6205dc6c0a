"""Requests and tokens per minute: how long the next request has to wait for its turn.

The window slides. A leaky bucket, such as aiolimiter's, passes up to twice the rate in a minute. It also cannot replace
an estimate of tokens by their true number.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

#: Seconds over which servers count.
WINDOW_S = 60.0


@dataclass
class SentRequest:
    """A request of the last minute: its time by the limiter's clock, and its tokens.

    The tokens are an estimate until the client sets the true number.
    """

    at: float
    tokens: int


class RateLimiter:
    """Delay requests so that no minute has more requests or tokens than allowed. The order of the calls is kept.

    Args:
        requests: requests per minute; None sets no limit.
        tokens: tokens per minute; None sets no limit. A single larger request goes alone.
    """

    def __init__(
        self, requests: int | None = None, tokens: int | None = None, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self._requests, self._tokens, self._clock, self._sleep = requests, tokens, clock, sleep
        self._sent: deque[SentRequest] = deque()
        self._turn = asyncio.Lock()

    async def acquire(self, tokens: int) -> SentRequest:
        """Wait until a request with ``tokens`` tokens may be sent, and return its record. It counts for 60 seconds.

        Await it: ``sent = await limiter.acquire(500)``, for 500 tokens of prompt and answer together at most. Set
        ``sent.tokens`` when the true number is known.
        """
        async with self._turn:
            while (wait := self._wait(tokens)) > 0:
                await self._sleep(wait)
            sent = SentRequest(self._clock(), tokens)
            self._sent.append(sent)
            return sent

    def _wait(self, tokens: int) -> float:
        """Seconds until the oldest of the last minute has left, or 0 where there is room."""
        now = self._clock()
        while self._sent and self._sent[0].at + WINDOW_S <= now:
            self._sent.popleft()
        full = self._requests is not None and len(self._sent) >= self._requests
        used = sum(one.tokens for one in self._sent)
        full = full or (self._tokens is not None and bool(self._sent) and used + tokens > self._tokens)
        return max(1e-3, self._sent[0].at + WINDOW_S - now) if full else 0.0
