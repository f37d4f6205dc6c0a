"""One question to a scripted server, with no wait between attempts, and what came of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from outblas.llm.budget import Budget, Cost, Price, SpendingAccount
from outblas.llm.client import AnswerOptions, Client, RetryPolicy, Timers
from outblas.llm.models import Model
from outblas.llm.reply import Reply
from support.llm_server import Say, ScriptedServer

MESSAGES = [{"role": "user", "content": "a kernel, please"}]
MODEL = Model("scripted", price=Price(1.0, 2.0))


class ListedRequests:
    """Attempts in memory: what was sent, and what came of it."""

    def __init__(self) -> None:
        self.most: list[Cost] = []
        self.replies: dict[int, Reply] = {}

    def sent(self, question: int, most: Cost) -> int:
        self.most.append(most)
        return len(self.most) - 1

    def replied(self, send: int, reply: Reply) -> None:
        assert send not in self.replies
        self.replies[send] = reply

    @property
    def outcomes(self) -> list[str]:
        return [self.replies[i].outcome if i in self.replies else "lost" for i in range(len(self.most))]


Asked = tuple[Reply | Exception, ListedRequests, list[float], SpendingAccount]


def ask(
    server: ScriptedServer, budget: Budget | None = None, retry_policy: RetryPolicy | None = None, **options: Any
) -> Asked:
    """One question; its reply or error, the book, the waits between attempts, the account."""
    request_log, waits, account = ListedRequests(), list[float](), SpendingAccount(budget or Budget())

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> Reply:
        client = Client(
            server.url, account, request_log, options=AnswerOptions(1000, **options),
            retry_policy=retry_policy or RetryPolicy(attempts=4), timers=Timers(sleep=sleep, jitter=lambda: 1.0),
        )  # fmt: skip
        try:
            return await client.ask(1, MESSAGES, MODEL)
        finally:
            await client.close()

    try:
        return asyncio.run(run()), request_log, waits, account
    except Exception as error:
        return error, request_log, waits, account


def scripted(*says: Say) -> Callable[[dict[str, Any], int], Say]:
    return lambda request, number: says[min(number, len(says) - 1)]
