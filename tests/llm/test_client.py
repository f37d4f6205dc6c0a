"""The client against a scripted server; clocks and waits are injected, so that minutes take milliseconds."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas_lab.llm.budget import Budget, BudgetSpent, Cost, SpendingAccount
from outblas_lab.llm.client import (
    AnswerOptions,
    Client,
    RequestRejected,
    RetryPolicy,
    ServerError,
    Unanswered,
    check_server,
)
from outblas_lab.llm.reply import ANSWER_CHARS, Reply
from support.llm_server import MESSAGES, MODEL, ListedRequests, Say, ask, scripted, serving

pytest.importorskip("openai")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def test_an_answer_with_what_it_took() -> None:
    with serving(scripted(Say("here", prompt_tokens=30, answer_tokens=70))) as server:
        reply, request_log, waits, account = ask(server)
        assert isinstance(reply, Reply) and (reply.text, reply.finish) == ("here", "stop")
        assert reply.took == account.spent == Cost(1, 30, 70, 170e-6)
        assert account.reserved == Cost() and request_log.outcomes == ["answered"] and waits == []
        (request,) = server.requests
        assert request["messages"] == MESSAGES and request["max_tokens"] == 1000
        assert "temperature" not in request


def test_too_many_requests_are_waited_for_as_the_server_asks() -> None:
    with serving(scripted(Say(status=429, headers={"Retry-After": "17"}), Say(status=503), Say("yes"))) as server:
        reply, request_log, waits, account = ask(server)
        assert isinstance(reply, Reply) and reply.text == "yes"
        assert waits == [17.0, 2.0]
        assert request_log.outcomes == ["http 429", "http 503", "answered"]
        assert account.spent.requests == 3 and account.spent.prompt_tokens == 100  # errors cost no tokens


def test_a_server_cannot_ask_for_more_than_a_few_minutes() -> None:
    for wait in ("1e9", "inf", "nan", "tomorrow", "-5"):
        with serving(scripted(Say(status=429, headers={"Retry-After": wait}), Say("yes"))) as server:
            reply, _, waits, _ = ask(server)
            assert isinstance(reply, Reply) and 0 < waits[0] <= 300


@pytest.mark.parametrize("say", [Say(drop=True), Say("never whole", half=True)])
def test_a_dropped_connection_is_tried_again_and_charged_in_full(say: Say) -> None:
    with serving(scripted(say, Say("yes"))) as server:
        reply, request_log, _, account = ask(server)
        assert isinstance(reply, Reply) and request_log.outcomes == ["dropped", "answered"]
        assert account.spent.answer_tokens == 1000 + 50


@pytest.mark.parametrize(
    "retry_policy", [RetryPolicy(silence_s=0.3, stall_s=60), RetryPolicy(silence_s=60, stall_s=0.3)]
)
def test_a_stall_is_cut_and_tried_again(retry_policy: RetryPolicy) -> None:
    with serving(scripted(Say("late", stall_s=30), Say("yes"))) as server:
        reply, request_log, _, _ = ask(server, retry_policy=retry_policy)
        assert isinstance(reply, Reply) and reply.text == "yes"
        assert request_log.outcomes == ["timeout", "answered"]


@pytest.mark.parametrize(
    "body",
    [
        b"<html>a page</html>", b"[" * 100_000, b"null", b'{"choices": null}', b'"\xff"', b"not json", b"{}", b"[]",
        b"", b'{"choices": []}', b'{"choices": [{"message": {"content": 7}}]}',
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_read_is_tried_again(body: bytes) -> None:
    with serving(scripted(Say(body=body), Say("yes"))) as server:
        reply, request_log, _, _ = ask(server)
        assert isinstance(reply, Reply) and request_log.outcomes == ["unreadable", "answered"]


def test_after_the_last_attempt_the_question_has_no_answer() -> None:
    with serving(scripted(Say(status=500))) as server:
        error, request_log, waits, _ = ask(server)
        assert isinstance(error, Unanswered) and "4 attempts" in str(error)
        assert waits == [1.0, 2.0, 4.0] and len(request_log.outcomes) == 4


def test_nobody_listens() -> None:
    with serving(scripted(Say())) as server:
        pass
    error, request_log, _, account = ask(server)
    assert isinstance(error, Unanswered) and set(request_log.outcomes) == {"dropped"}
    assert account.spent == Cost(4), "nothing was sent: no tokens, no dollars"


def test_a_question_that_the_server_refuses_is_not_asked_again() -> None:
    with serving(scripted(Say("the context is too long", status=400))) as server:
        error, request_log, waits, _ = ask(server)
        assert isinstance(error, RequestRejected) and "too long" in str(error)
        assert request_log.outcomes == ["http 400"] and waits == []


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_ends_the_run(status: int) -> None:
    with serving(scripted(Say("no such model", status=status))) as server:
        error, request_log, _, account = ask(server)
        assert isinstance(error, ServerError) and "no such model" in str(error)
        assert len(request_log.outcomes) == 1 and account.reserved == Cost()


def test_models_that_know_the_limit_by_its_newer_name() -> None:
    def script(request: dict[str, Any], number: int) -> Say:
        if "max_tokens" in request:
            return Say("Unsupported parameter: use 'max_completion_tokens' instead.", status=400)
        return Say("yes")

    with serving(script) as server:
        reply, *_ = ask(server)
        assert isinstance(reply, Reply) and server.requests[-1]["max_completion_tokens"] == 1000


def test_the_budget_stops_before_a_request() -> None:
    with serving(scripted(Say("yes"))) as server:
        error, request_log, *_ = ask(server, Budget(tokens=1000))
        assert isinstance(error, BudgetSpent)
        assert server.requests == [] and request_log.most == []


def test_the_budget_stops_retries_too() -> None:
    with serving(scripted(Say(status=500))) as server:
        error, request_log, *_ = ask(server, Budget(requests=2))
        assert isinstance(error, BudgetSpent) and len(server.requests) == 2


def test_without_the_servers_count_the_most_is_charged() -> None:
    body = b'{"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [{"index": 0, ' \
           b'"finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}]}'  # fmt: skip
    with serving(scripted(Say(body=body))) as server:
        reply, request_log, *_ = ask(server)
        assert isinstance(reply, Reply) and reply.text == "yes" and reply.took == request_log.most[0]


def test_a_date_to_come_back_at() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    with serving(scripted(Say(status=503, headers={"Retry-After": date}), Say("yes"))) as server:
        reply, _, waits, _ = ask(server)
        assert isinstance(reply, Reply) and 50 < waits[0] <= 100


def test_what_a_model_thought_is_kept() -> None:
    with serving(scripted(Say("yes", reasoning="Hm. \ud800"))) as server:
        reply, *_ = ask(server)
        assert isinstance(reply, Reply) and (reply.text, reply.reasoning) == ("yes", "Hm. ?")


def test_a_refusal_is_an_answer() -> None:
    with serving(scripted(Say("", refusal="I will not."))) as server:
        reply, *_ = ask(server)
        assert isinstance(reply, Reply) and (reply.text, reply.finish) == ("I will not.", "refusal")


@pytest.mark.parametrize("usage", [(-5, 50), (100, -50), (0, 0), (10**30, 1), (1, 10**30), (float("inf"), 1), (1.5, 1)])
def test_what_is_no_count_of_tokens_is_charged_in_full(usage: Any) -> None:
    with serving(scripted(Say("yes", prompt_tokens=usage[0], answer_tokens=usage[1]))) as server:
        reply, request_log, _, account = ask(server)
        assert isinstance(reply, Reply) and account.spent == request_log.most[0]


def test_an_answer_without_end_is_cut() -> None:
    with serving(scripted(Say("x" * (ANSWER_CHARS + 1), reasoning="y" * (ANSWER_CHARS + 1)))) as server:
        reply, *_ = ask(server)
        assert isinstance(reply, Reply) and reply.finish == "length"
        assert len(reply.text) == len(reply.reasoning) == ANSWER_CHARS


def test_a_page_instead_of_an_answer_is_told() -> None:
    page = Say(body=b"<html>Sign in, please</html>", headers={"Content-Type": "text/html"})
    with serving(scripted(page)) as server:
        _, request_log, *_ = ask(server)
        assert "Sign in, please" in request_log.replies[0].text


def test_half_a_surrogate_pair_is_no_trouble() -> None:
    with serving(scripted(Say("half \ud800 and \0"))) as server:
        reply, *_ = ask(server)
        assert isinstance(reply, Reply) and reply.text == "half ? and "


def test_a_request_that_is_cut_from_outside_is_charged_in_full() -> None:
    account, request_log = SpendingAccount(Budget()), ListedRequests()

    async def run(url: str) -> None:
        client = Client(url, account, request_log, options=AnswerOptions(1000))
        task = asyncio.ensure_future(client.ask(1, MESSAGES, MODEL))
        while not request_log.most:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()

    with serving(scripted(Say("late", stall_s=30))) as server:
        asyncio.run(run(server.url))
    assert account.spent == request_log.most[0] and account.reserved == Cost() and request_log.outcomes == ["lost"]


def test_without_server_and_key_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        check_server()
    check_server("http://localhost:1/v1")  # a server of one's own needs no key
