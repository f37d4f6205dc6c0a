"""Client of any server with OpenAI's chat interface: one question in, one answer or one error out.

Retries are not those of the ``openai`` package. Every attempt is within the budget and the rate, and recorded before
it is sent, since the cost of a lost request is unknown.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outblas.core.errors import OutblasError, UsageError
from outblas.core.install_hint import needed
from outblas_lab.llm.bounded_http import BodyRefused, bounded_http_client
from outblas_lab.llm.budget import Cost, Message, SpendingAccount, at_most
from outblas_lab.llm.models import Model
from outblas_lab.llm.rate_limits import RateLimiter
from outblas_lab.llm.reply import Reply, api_key, failed_reply, read_completion
from outblas_lab.llm.server_errors import NEVER, WAITED_IN_VAIN, wait_after_error, wait_before_next, words_of_error

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from tenacity import RetryCallState

#: Factor of the wait after a server refused for the rate without a hint: such limits count by the minute.
_PATIENCE = 4


class ServerError(OutblasError, RuntimeError):
    """An error: a language model's server cannot be reached, or it refuses every request."""


class Unanswered(OutblasError, RuntimeError):
    """An error: no attempt at a question was answered; a later one may be."""


class RequestRejected(OutblasError, RuntimeError):
    """An error: the server refuses one question, for example for its length; it may answer others."""


class RequestLog(Protocol):
    """A record of the attempts of a client. :class:`outblas_lab.llm.evolve_journal.EvolveJournal` is one."""

    def sent(self, question: int, most: Cost) -> int:
        """Record an attempt before it is sent and return its number."""

    def replied(self, send: int, reply: Reply) -> None:
        """Record the reply to an attempt."""


@dataclass(frozen=True)
class RetryPolicy:
    """Time limits and number of attempts.

    Attributes:
        silence_s: seconds without a byte from the server after which a request is given up (120).
        stall_s: seconds after which a request is cut, even if bytes still arrive (300).
        attempts: most attempts per question, the first included.
        first_s: base of the wait, seconds. Before attempt n + 1 (n from 1) the client waits min(longest_s, first_s *
            2**(n - 1)) times a random factor from 0.5 to 1. A longer ``Retry-After`` of the server counts instead, but
            at most 300 s. After a 429 without one, the base is four times as long.
        longest_s: limit of that base wait, seconds.
    """

    silence_s: float = 120.0
    stall_s: float = 300.0
    attempts: int = 6
    first_s: float = 1.0
    longest_s: float = 60.0


@dataclass(frozen=True)
class AnswerOptions:
    """Options of every request.

    Attributes:
        temperature: temperature of sampling; None: the server's default.
        extra: more fields of the request, by name. One that a server refuses by its name is left out from then on.
    """

    max_tokens: int = 16384
    temperature: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


class Client:
    """Ask questions of one server. Nothing is sent before :meth:`ask`. Await ``close()`` at the end.

    Args:
        base_url: address of the server, with its ``/v1``; None: what the ``openai`` package takes (``OPENAI_BASE_URL``,
            else OpenAI's own). The key is ``OPENAI_API_KEY``.
        account: the budget and what is spent of it. The client keeps it as its attribute ``account``.
        limiter: requests and tokens per minute; None: no limit.
        sleep: waits for seconds between two attempts; tests replace it.

    Raises:
        ToolchainMissing: a package of the extra ``llm`` is not installed.
        UsageError: no key for OpenAI's own server, or an invalid address or key.
    """

    def __init__(
        self,
        base_url: str | None,
        account: SpendingAccount,
        request_log: RequestLog,
        *,
        options: AnswerOptions | None = None,
        retry_policy: RetryPolicy | None = None,
        limiter: RateLimiter | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.account, self._request_log = account, request_log
        self._options, self._sleep = options or AnswerOptions(), sleep
        self._retry_policy, self._limiter = retry_policy or RetryPolicy(), limiter or RateLimiter()
        self._started = time.monotonic()
        #: The name of the limit of tokens that a model wants, if it is not ``max_tokens``.
        self._limit_names: dict[str, str] = {}
        #: Fields of the options that a model refuses, by its name.
        self._refused_fields: dict[str, set[str]] = {}
        self._open = _connect(base_url, self._retry_policy.silence_s)

    @property
    def seconds(self) -> float:
        """Seconds since this client was made."""
        return time.monotonic() - self._started

    async def ask(self, question: int, messages: Sequence[Message], model: Model) -> Reply:
        """Send a conversation and return the reply whose outcome is ``answered``, after up to ``attempts`` attempts.

        Await it: ``reply = await client.ask(1, [{"role": "user", "content": "hi"}], Model("gpt"))``. Then
        ``reply.text`` is the answer. Another attempt follows a timeout, a lost connection, an unreadable answer, and
        the statuses 408, 409, 425, 429 and 5xx except 501. An error in a body counts as its status.

        Args:
            messages: dictionaries with ``role`` and ``content``; the last one is the user's.

        Raises:
            BudgetSpent: the next attempt could pass the budget; it was not sent.
            Unanswered: no answer after all attempts.
            RequestRejected: the server refuses this question with another status, such as 400. It is not sent again.
            ServerError: the server refuses everybody (key, address, name of the model): a redirect, 401 to 405, or a
                spent quota. The question is not sent again.
        """
        from tenacity import AsyncRetrying, retry_if_result, stop_after_attempt

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._retry_policy.attempts),
            wait=self._wait,
            sleep=self._sleep,
            retry=retry_if_result(lambda attempt: attempt[1] not in (None, NEVER)),
            retry_error_callback=lambda state: state.outcome.result(),
        )
        reply, after = await retrying(self._attempt, question, messages, model)
        if reply.answered:
            return reply
        if after == NEVER:
            raise ServerError(f"the server rejected model {model.name!r} ({reply.outcome}: {reply.text})",
                              "a valid key with credit, a valid address and an available model",
                              "set OPENAI_API_KEY, --base-url and --model")  # fmt: skip
        if after is None:
            raise RequestRejected(f"the server rejected a request ({reply.outcome}: {reply.text})",
                                  "a request that the server accepts", "see the transcript")  # fmt: skip
        do = "check that the server is running, then repeat the command"
        if reply.outcome == "timeout":
            do = "allow more time (--timeout, --stall) or fewer tokens (--max-tokens), then repeat the command"
        raise Unanswered(f"no response after {self._retry_policy.attempts} attempts (last: {reply.outcome})",
                         "a server that responds", do)  # fmt: skip

    async def close(self) -> None:
        await self._open.close()

    def _wait(self, state: RetryCallState) -> float:
        from tenacity import wait_exponential

        reply, after = state.outcome.result()
        first_s = self._retry_policy.first_s * (_PATIENCE if reply.outcome == "http 429" and not after else 1)
        backoff = wait_exponential(first_s, self._retry_policy.longest_s)(state)
        return max(after, backoff * random.uniform(0.5, 1.0))

    async def _attempt(self, question: int, messages: Sequence[Message], model: Model) -> tuple[Reply, float | None]:
        """Send one request; return its reply and the least seconds before the next attempt (None: no next attempt).

        After an answer that is None, too.
        """
        most = at_most(messages, self._options.max_tokens, model.price)
        self.account.reserve(most, self.seconds)
        try:
            place = await self._limiter.acquire(most.tokens)
            send = self._request_log.sent(question, most)
        except BaseException:
            self.account.settle(most, Cost())  # it was never sent
            raise
        begin, took = time.monotonic(), most
        try:
            reply, after = await self._send(messages, model, most, begin)
            took = reply.took
            self._request_log.replied(send, reply)
        finally:  # one that was cut from outside is charged in full: it may have been answered
            self.account.settle(most, took)
            place.tokens = took.tokens
        return reply, after

    async def _send(
        self, messages: Sequence[Message], model: Model, most: Cost, begin: float
    ) -> tuple[Reply, float | None]:
        import openai

        def elapsed() -> float:
            return time.monotonic() - begin

        def failed(outcome: str, words: object, took: Cost) -> Reply:
            return failed_reply(outcome, words, took, elapsed())

        limit = self._limit_names.get(model.name, "max_tokens")
        refused = self._refused_fields.setdefault(model.name, set())
        extra = {name: value for name, value in self._options.extra.items() if name not in refused}
        fields: dict[str, object] = {limit: self._options.max_tokens, **extra}
        if self._options.temperature is not None:
            fields["temperature"] = self._options.temperature
        completions = self._open.chat.completions.with_raw_response  # read_completion trusts nothing of it
        request = completions.create(model=model.name, messages=list(messages), **fields)
        try:
            found = await asyncio.wait_for(request, self._retry_policy.stall_s)
            reply = read_completion(found.http_response.content, most, model.price, elapsed())
            if reply.answered:
                return reply, None
            return reply, wait_before_next(int(reply.outcome[5:])) if reply.outcome.startswith("http ") else 0.0
        except openai.APIStatusError as error:
            took = most if error.status_code in WAITED_IN_VAIN else Cost(1)
            reply = failed(f"http {error.status_code}", words_of_error(error), took)
            if error.status_code == 400 and limit == "max_tokens" and "max_completion_tokens" in reply.text:
                self._limit_names[model.name] = "max_completion_tokens"  # of newer models; others ignore that name
                return reply, 0.0
            named = {name for name in extra if re.search(rf"\b{re.escape(name)}\b", reply.text)}
            if error.status_code in (400, 422) and named:
                refused |= named
                return reply, 0.0
            return reply, wait_after_error(error)
        except (TimeoutError, openai.APITimeoutError) as error:
            took = Cost(1) if _never_connected(error) else most
            return failed("timeout", f"no response within {elapsed():.0f} s", took), 0.0
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, BodyRefused):  # older releases of openai wrap it
                return failed("unreadable", error.__cause__, most), 0.0
            took = Cost(1) if _never_connected(error) else most
            return failed("dropped", error.__cause__ or error, took), 0.0
        except BodyRefused as error:
            return failed("unreadable", error, most), 0.0
        except Exception as error:  # whatever an answer does to its readers is the answer's fault
            return failed("unreadable", f"{type(error).__name__}: {error}", most), 0.0


def check_server(base_url: str | None = None) -> None:
    """Check that an address or a key of a server is set; send nothing, and return None.

    Args:
        base_url: address of the server; None or "": that of ``OPENAI_BASE_URL``. An own address needs no key.

    Raises:
        UsageError: neither an address nor ``OPENAI_API_KEY`` is set, or the address begins with neither ``http://`` nor
            ``https://``. Also if no HTTP header can carry the key.
        ToolchainMissing: a package of the extra ``llm`` is not installed.
    """
    _connect(base_url, 1.0)


def _never_connected(error: BaseException) -> bool:
    """Return whether nothing was sent, so that the request cost nothing."""
    return type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")


def _connect(base_url: str | None, silence_s: float) -> AsyncOpenAI:
    openai = needed("openai", "the client of a language model's server", "llm")
    needed("tenacity", "tenacity, which repeats requests", "llm")
    address = base_url or os.environ.get("OPENAI_BASE_URL") or None
    key = api_key()
    if not key and address is None:
        raise UsageError("no language model server is configured", "OPENAI_API_KEY, or the address of your own server",
                         "set OPENAI_API_KEY, or OPENAI_BASE_URL, e.g. http://localhost:8000/v1")  # fmt: skip
    if address is not None and not re.match(r"https?://[^/]", address):
        raise UsageError(f"--base-url {address!r} is invalid", "an address that starts with http:// or https://",
                         "pass e.g. --base-url http://localhost:8000/v1")  # fmt: skip
    if not (key.isascii() and key.isprintable()):  # no header can carry it, and the HTTP library would quote it
        raise UsageError("OPENAI_API_KEY contains a line break or a non-ASCII character",
                         "the key exactly as issued",
                         "copy it again and check for stray characters such as typographic quotes")  # fmt: skip
    # A server of one's own often wants no key; the package insists on one.
    return openai.AsyncOpenAI(
        base_url=address, api_key=key or "none", max_retries=0, timeout=silence_s, http_client=bounded_http_client()
    )
