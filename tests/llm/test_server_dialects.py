"""Replies as real servers send them: hosted ones, gateways, reasoning models and proxies, each in its own dialect."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas_lab.llm.answer import read_answer
from outblas_lab.llm.budget import Budget, Cost, SpendingAccount
from outblas_lab.llm.client import AnswerOptions, Client, RetryPolicy, ServerError, Unanswered, check_server
from outblas_lab.llm.models import Model
from outblas_lab.llm.reply import Reply
from support.gpus.known import H200
from support.llm_kernels import PROBLEM, kernel, passed, record
from support.llm_server import MESSAGES, MODEL, ListedRequests, Say, ask, evolve_by_command, scripted, serving

pytest.importorskip("openai")
USAGE = {"prompt_tokens": 30, "completion_tokens": 7, "total_tokens": 37}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def said(found: object, status: int = 200) -> Say:
    return Say(status=status, body=json.dumps(found).encode())


def completion(message: object, finish: str = "stop", usage: object = USAGE, **choice: object) -> Say:
    return said({"choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}], "usage": usage})


def answered(say: Say) -> Reply:
    """Ask once, and return the reply, which answers at the first attempt."""
    with serving(scripted(say)) as server:
        reply, request_log, *_ = ask(server)
    assert isinstance(reply, Reply) and request_log.outcomes == ["answered"], reply
    return reply


def outcomes(*says: Say) -> tuple[list[str], list[float], SpendingAccount]:
    """Return the outcomes of the attempts at one question, the waits and the account."""
    with serving(scripted(*says)) as server:
        _, request_log, waits, account = ask(server)
    return request_log.outcomes, waits, account


@pytest.mark.parametrize("thinking", ["hm", [{"type": "text", "text": "hm"}]])
def test_a_content_in_parts_is_the_text_of_its_parts(thinking: object) -> None:
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]
    reply = answered(completion({"content": parts}))
    assert (reply.text, reply.reasoning) == ("yes", "hm")


@pytest.mark.parametrize("opening", ["<think>", "", "\n<think>"])
def test_thoughts_between_marks_are_no_part_of_the_answer(opening: str) -> None:
    reply = answered(completion({"content": f"{opening}a draft\n```json\n{{}}\n```</think>yes"}))
    assert reply.text == "yes" and reply.reasoning.startswith("a draft")


def test_thoughts_that_were_cut_are_an_empty_answer() -> None:
    reply = answered(completion({"content": "<think>and so on"}, "length"))
    assert reply.text == "" and "and so on" in reply.reasoning
    assert read_answer(reply.text, reply.finish, PROBLEM, H200).words == "the limit of tokens was reached"


def test_marks_in_an_answer_whose_thoughts_came_apart_are_text() -> None:
    reply = answered(completion({"content": "no </think> here", "reasoning": "hm"}))
    assert (reply.text, reply.reasoning) == ("no </think> here", "hm")


def test_thoughts_that_only_the_total_counts_are_charged() -> None:
    reply = answered(completion({"content": "yes"}, usage={**USAGE, "total_tokens": 500}))
    assert reply.took == Cost(1, 30, 470, 970e-6)


@pytest.mark.parametrize("finish", ["content_filter: PROHIBITED_CONTENT", "SAFETY"])
def test_a_filter_that_leaves_no_message_is_a_refusal(finish: str) -> None:
    usage = {"prompt_tokens": 30, "total_tokens": 30}
    reply = answered(said({"choices": [{"index": 0, "finish_reason": finish}], "usage": usage}))
    assert reply.finish == "content_filter" and reply.took.answer_tokens == 0
    assert read_answer(reply.text, reply.finish, PROBLEM, H200).kind == "refusal"


def test_an_error_in_the_body_of_a_success_counts_as_its_status() -> None:
    busy = said({"error": {"code": 429, "message": "busy"}, "user_id": "u"})
    found, _, account = outcomes(busy, completion({"content": "yes"}))
    assert found == ["http 429", "answered"] and account.spent.answer_tokens == 7, "a refusal costs no tokens"
    with serving(scripted(said({"error": {"code": 402, "message": "no credits"}}))) as server:
        error, *_ = ask(server)
    assert isinstance(error, ServerError) and "no credits" in str(error) and len(server.requests) == 1


@pytest.mark.parametrize("code", [None, "server_error", 7])
def test_an_error_without_a_status_is_tried_again(code: object) -> None:
    found, *_ = outcomes(said({"error": {"code": code, "message": "down"}}), completion({"content": "yes"}))
    assert found == ["unreadable", "answered"]


@pytest.mark.parametrize(
    "say",
    [
        completion({"content": "ha"}, "error", error={"code": 502, "message": "the provider is gone"}),
        completion({"content": "ha"}, "stop", error={"code": 502, "message": "the provider is gone"}),
        completion({"content": "ha"}, "abort"),
        completion({"content": ""}, "insufficient_system_resource"),
    ],
)
def test_an_answer_that_the_server_gave_up_is_asked_for_again(say: Say) -> None:
    found, _, account = outcomes(say, completion({"content": "yes"}))
    assert found == ["unreadable", "answered"] and account.spent == Cost(2, 60, 14, 88e-6)


def test_a_spent_quota_ends_the_run_at_once() -> None:
    spent = {"message": "You exceeded your quota", "type": "insufficient_quota", "code": "insufficient_quota"}
    with serving(scripted(said({"error": spent}, 429))) as server:
        error, request_log, *_ = ask(server)
    assert isinstance(error, ServerError) and "your quota" in str(error) and request_log.outcomes == ["http 429"]


def test_a_limit_by_the_minute_is_outlasted_without_a_hint() -> None:
    with serving(scripted(said({"error": {"message": "slower"}}, 429))) as server:
        error, _, waits, _ = ask(server, retry_policy=RetryPolicy())
    assert isinstance(error, Unanswered) and sum(waits) / 2 >= 60, "even if every wait is drawn at its least"


def test_a_delay_in_the_body_is_followed() -> None:
    busy = [{"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "details": [{"retryDelay": "36s"}]}}]
    _, waits, _ = outcomes(said(busy, 429), completion({"content": "yes"}))
    assert waits == [36.0]


@pytest.mark.parametrize("status", [408, 504, 524])
def test_a_gateway_that_waited_in_vain_may_have_cost_an_answer(status: int) -> None:
    _, _, account = outcomes(Say(status=status, body=b"<html>late</html>"), completion({"content": "yes"}))
    assert account.spent.answer_tokens == 1000 + 7


def test_what_a_server_lacks_is_not_asked_for_again() -> None:
    assert outcomes(said({"error": {"message": "not supported"}}, 501))[0] == ["http 501"]


@pytest.mark.parametrize(
    "body", [b'{"error": "no seats"}', b'{"detail": "no seats"}', b'{"message": {"detail": ["no seats"]}}', b"no seats"]
)
def test_a_refusal_without_a_message_is_quoted(body: bytes) -> None:
    with serving(scripted(Say(status=422, body=body))) as server:
        error, *_ = ask(server)
    assert "no seats" in str(error)


def test_a_field_that_a_server_refuses_is_left_out() -> None:
    fault = {"object": "error", "message": {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"]}]}}

    def script(request: dict[str, Any], number: int) -> Say:
        return said(fault, 422) if "seed" in request else Say("yes")

    with serving(script) as server:
        reply, request_log, *_ = ask(server, extra={"seed": 3, "top_p": 0.5})
    assert isinstance(reply, Reply) and request_log.outcomes == ["http 422", "answered"]
    assert server.requests[-1]["top_p"] == 0.5


def test_questions_under_way_learn_the_newer_name_of_the_limit_together() -> None:
    both = threading.Barrier(2)

    def script(request: dict[str, Any], number: int) -> Say:
        if request["model"] == "old":
            return Say("yes") if "max_tokens" in request else Say("what is max_completion_tokens?", status=400)
        if "max_tokens" in request:
            return Say("use 'max_completion_tokens' instead", status=400, wait=both.wait)
        return Say("yes")

    async def run(url: str) -> list[Reply]:
        policy = RetryPolicy(first_s=0.0)
        client = Client(url, SpendingAccount(Budget()), ListedRequests(), retry_policy=policy,
                        options=AnswerOptions(1000))  # fmt: skip
        replies = await asyncio.gather(*(client.ask(1, MESSAGES, MODEL) for _ in range(2)))
        replies.append(await client.ask(2, MESSAGES, Model("old")))
        await client.close()
        return replies

    with serving(script) as server:
        assert [reply.text for reply in asyncio.run(run(server.url))] == ["yes"] * 3


@pytest.mark.parametrize("key", ["sk-0123456789\nsk-abcdefghij", "sk-“0123456789”"])
def test_a_key_that_no_header_can_carry_is_told_without_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as found:
        check_server("http://localhost:1/v1")
    assert "0123456789" not in str(found.value)


@pytest.mark.parametrize(
    "say",
    [
        Say(status=403, body=b'{"detail": "no sk-a\\/b+c\\"01234567"}'),
        Say(status=403, body=b"<p>no sk-a/b+c&quot;01234567"),
        said({"error": {"code": 401, "message": 'no sk-a/b+c"01234567'}}),
        Say(status=302, headers={"Location": "https://x.invalid/?k=sk-a%2Fb%2Bc%2201234567"}),
        Say(status=302, headers={"Location": "https://x.invalid/?k=sk-a/b%2Bc%2201234567"}),
    ],
)
def test_a_key_is_crossed_out_however_it_is_spelled(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", 'sk-a/b+c"01234567')
    with serving(scripted(say)) as server:
        error, *_ = ask(server)
    assert "[OPENAI_API_KEY]" in str(error) and "01234567" not in str(error)


def test_a_server_that_refuses_every_first_question_ends_the_run(tmp_path: Path) -> None:
    recording = record(tmp_path / "r.jsonl", *(passed(kernel(i), 3.9 - 0.1 * i) for i in range(3)))
    script = lambda request, number: Say("'temperature' is not supported", status=400)  # noqa: E731
    code, said = evolve_by_command(script, recording, tmp_path / "run", 20)
    said = " ".join(said.split())
    assert code == 2 and "3 conversations in a row with 'm'" in said and "'temperature' is not supported" in said
