"""Attacks by servers of language models: their replies are bounded, cleaned and charged, and lead nowhere else."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.clean_text import clean_text
from outblas_lab.llm.bounded_http import ANSWER_BYTES
from outblas_lab.llm.budget import BYTES_PER_TOKEN, Cost
from outblas_lab.llm.client import RequestRejected, ServerError
from outblas_lab.llm.evolve_journal import EvolveJournal
from outblas_lab.llm.reply import Reply
from support.llm_kernels import answer, kernel, passed, record
from support.llm_server import MESSAGES, Say, ask, evolve_by_command, scripted, serving

pytest.importorskip("openai")

#: What sockets and servers hold beside what a client has read, at most.
IN_FLIGHT = 16 << 20
ESCAPES = "\x1b]0;PWN\x07\x1b[2J\x9b2J\u202e"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def completion(
    content: object = "yes", finish: object = "stop", usage: object = None, **more: object
) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


def body(*contents: object, **more: object) -> bytes:
    return json.dumps(completion(*contents, **more)).encode()


def cut(head: bytes, part: bytes, parts: int) -> Iterator[bytes]:
    """Return a head and a part repeated beyond any client's limit, with an end for a client that reads all."""
    return itertools.chain([head], itertools.repeat(part, parts))


# --- the size of an answer ---

OPENING = b'{"choices": [{"message": {"content": "yes'
CLOSING = b'"}}]}'


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x-unknown"])
def test_a_packed_answer_is_not_unpacked(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[object] = []
    monkeypatch.setattr(zlib, "decompressobj", lambda *how: unpacked.append(how))
    bomb = gzip.compress(OPENING + b" " * (32 << 20) + CLOSING, 1)
    with serving(scripted(Say(body=bomb, headers={"Content-Encoding": encoding}), Say("yes"))) as server:
        reply, log, _, account = ask(server)
        assert isinstance(reply, Reply) and log.outcomes == ["unreadable", "answered"] and unpacked == []
        assert "compressed" in log.replies[0].text and log.replies[0].took == log.most[0]
        assert [one["accept-encoding"] for one in server.headers] == ["identity"] * 2


@pytest.mark.parametrize("status", [200, 400, 429])
def test_a_body_without_end_is_cut(status: int) -> None:
    parts = cut(OPENING, b" " * (1 << 20), 64)
    with serving(scripted(Say(status=status, parts=parts), Say("yes"))) as server:
        reply, log, *_ = ask(server)
        assert log.outcomes[0] == ("unreadable" if status == 200 else f"http {status}")
        assert isinstance(reply, RequestRejected if status == 400 else Reply)
    assert server.sent <= (ANSWER_BYTES if status == 200 else 0) + IN_FLIGHT


@pytest.mark.parametrize("status", [400, 429])
def test_a_packed_refusal_keeps_its_status(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlib, "decompressobj", lambda *how: pytest.fail("unpacked"))
    packed = Say(status=status, body=gzip.compress(b"no"), headers={"Content-Encoding": "gzip"})
    with serving(scripted(packed, Say("yes"))) as server:
        _, log, *_ = ask(server)
        assert log.outcomes[0] == f"http {status}"


@pytest.mark.parametrize("charset", ["zlib", "bz2", "hex", "punycode", "utf-7", "undefined", "\xff"])
@pytest.mark.parametrize("status", [200, 400])
def test_an_encoding_that_a_server_names_is_not_used(charset: str, status: int) -> None:
    """``Content-Type: ...; charset=bz2`` makes some libraries unpack the body."""
    packed = {"zlib": zlib.compress, "bz2": bz2.compress}.get(charset, lambda text: text)(b"0" * (1 << 20))
    with serving(scripted(Say(status=status, body=packed, headers={"Content-Type": f"text/x; charset={charset}"}),
                          Say("yes"))) as server:  # fmt: skip
        _, log, *_ = ask(server)
        assert log.outcomes[0] == ("unreadable" if status == 200 else "http 400")
        if charset in ("zlib", "bz2"):
            assert "000000" not in log.replies[0].text


def test_a_million_choices_are_a_list_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ``openai`` package makes an object of each, of a hundred times its bytes."""
    import openai

    monkeypatch.setattr(openai.BaseModel, "construct", lambda *fields, **more: pytest.fail("an object was made"))
    found = body()[:-1].replace(b"}], ", b"}" + b",{}" * 1_000_000 + b"], ", 1) + b"}"
    with serving(scripted(Say(body=found))) as server:
        reply, *_ = ask(server)
        assert isinstance(reply, Reply) and reply.text == "yes"


# --- where it leads ---


def test_a_key_that_an_answer_repeats_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-0123456789")
    found = body("// sk-secret-\x000123456789", reasoning="sk-secret-0123456789")
    with serving(scripted(Say(body=found))) as server:
        reply, *_ = ask(server)
        assert isinstance(reply, Reply) and "0123456789" not in reply.text + reply.reasoning


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    with serving(scripted(Say("stolen"))) as other:
        place = f"{other.url}/{ESCAPES.encode('latin-1', 'ignore').decode('latin-1').replace(chr(27), '')}"
        with serving(scripted(Say(status=status, headers={"Location": place}))) as server:
            error, log, *_ = ask(server)
            assert isinstance(error, ServerError) and other.url in str(error), "it says where it pointed"
            assert log.outcomes == [f"http {status}"] and len(server.requests) == 1 and other.requests == []
            assert str(error) == clean_text(str(error), 10**6)


@pytest.mark.parametrize("place", ["http://127.0.0.1:99999999/", "http://[::1/", "//\x07", "http://" + "a" * 30_000])
def test_a_redirect_to_no_address_is_asked_once(place: str) -> None:
    with serving(scripted(Say(status=302, headers={"Location": place}))) as server:
        error, log, *_ = ask(server)
        assert isinstance(error, ServerError) and log.outcomes == ["http 302"] and len(server.requests) == 1


def test_a_loop_of_redirects_is_one_request() -> None:
    with serving(lambda request, number: Say(status=307, headers={"Location": "/v1/chat/completions"})) as server:
        error, log, _, account = ask(server)
        assert isinstance(error, ServerError) and account.spent.requests == len(server.requests) == 1


def test_cookies_are_not_sent_back() -> None:
    with serving(lambda request, number: Say(status=500, headers={"Set-Cookie": f"c{number}={'x' * 4000}"})) as server:
        ask(server)
        assert len(server.headers) == 4 and not any("cookie" in one for one in server.headers)


# --- what it counts ---


@pytest.mark.parametrize("usage", [{"prompt_tokens": 1, "completion_tokens": 0}, {"prompt_tokens": 1}])
def test_a_server_that_counts_too_little_is_charged_what_was_sent_and_heard(usage: dict[str, int]) -> None:
    text, thought = "x" * 3200, "é" * 1600
    with serving(scripted(Say(body=body(text, usage=usage, reasoning_content=thought)))) as server:
        reply, log, _, account = ask(server)
        prompt = (len(MESSAGES[0]["content"]) + 16) // BYTES_PER_TOKEN
        assert isinstance(reply, Reply) and account.spent == reply.took == Cost(1, prompt, 400, (prompt + 800) / 1e6)


def test_the_floor_is_no_more_than_was_set_aside() -> None:
    with serving(scripted(Say(body=body("x" * 100_000, usage={"prompt_tokens": 1})))) as server:
        reply, log, *_ = ask(server)
        assert isinstance(reply, Reply) and reply.took.answer_tokens == log.most[0].answer_tokens == 1000


# --- shapes and words ---


@pytest.mark.parametrize(
    "found, text, finish",
    [
        (body("yes", "\ud800"), "yes", "?"),
        (body("yes", ESCAPES), "yes", "]0;PWN[2J2J"),
        (body("yes", "x" * 1_000_000), "yes", "x" * 40),
        (body("yes", {"a": 1}), "yes", ""),
        (body("yes", ["stop"]), "yes", ""),
        (body("a\x1b[2Jb\u202ec\td\r\ne\rf\vg\fh\0"), "a[2Jbc\td\ne\nf g h", "stop"),
        (body("yes", tool_calls=[{"function": {"name": "rm", "arguments": "{"}}], function_call=7), "yes", "stop"),
        (body("yes", refusal=7), "yes", "refusal"),
        (body("yes", reasoning=[1, 2], reasoning_content={"a": 1}), "yes", "stop"),
        (body("yes", usage={"prompt_tokens": 1e400, "completion_tokens": float("nan")}), "yes", "stop"),
        (body("yes", usage=[1, 2]), "yes", "stop"),
        (body("yes", usage={"prompt_tokens": True, "completion_tokens": True}), "yes", "stop"),
        (body("yes", usage={"prompt_tokens": 5, "completion_tokens": {"a": 1}}), "yes", "stop"),
        (body([{"type": "text", "text": "yes"}, 7, {"text": 7}, {"thinking": {}}]), "yes", "stop"),
        (b"\xef\xbb\xbf" + body(), "yes", "stop"),
        (json.dumps(completion()).encode("utf-16"), "yes", "stop"),
        (json.dumps(completion()).encode("utf-32-be"), "yes", "stop"),
        (b'{"choices": 1, ' + body()[1:], "yes", "stop"),
        (b'{"id": ' + b"9" * 4000 + b", " + body()[1:], "yes", "stop"),
        (b" " * 1_000_000 + body() + b"\n" * 1_000_000, "yes", "stop"),
    ],
)
def test_odd_answers_are_read(found: bytes, text: str, finish: str) -> None:
    with serving(scripted(Say(body=found, headers={"Content-Type": "image/png"}))) as server:
        reply, *_ = ask(server)
        assert isinstance(reply, Reply) and (reply.text, reply.finish) == (text, finish)
        assert 0 < reply.took.tokens < 2000 and reply.reasoning == clean_text(reply.reasoning, 10**6)


@pytest.mark.parametrize(
    "found",
    [
        body([{"type": "image"}]), body(["yes"]), body({"a": 1}), body(True), body() + body(), body()[:-1],
        b'{"id": ' + b"9" * 100_000 + b", " + body()[1:],
        b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"choices": ' + b"[" * 100_000,
        b'data: {"choices": [{"delta": {"content": "yes"}}]}\n\ndata: [DONE]\n\n',
        b'{"choices": {"0": {"message": {"content": "yes"}}}}', b'{"choices": ["yes"]}', b'{"choices": [[]]}',
        b'{"choices": [{"message": "yes"}]}', b'{"choices": [{"text": "yes"}]}', b'{"choices": "yes"}', b"7", b'"x"',
        b"\xff\xfe\xff", b"\0" * 1000, b'{"error": {"message": "' + ESCAPES.encode() + b'"}}',
    ],
)  # fmt: skip
def test_what_is_no_answer_is_unreadable_in_clean_words(found: bytes) -> None:
    with serving(scripted(Say(body=found), Say("yes"))) as server:
        reply, log, *_ = ask(server)
        assert isinstance(reply, Reply) and log.outcomes == ["unreadable", "answered"]
        said = log.replies[0].text
        assert said == clean_text(said, 2000) and log.replies[0].took == log.most[0]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "raw, outcome",
    [
        ([body()], "dropped"),  # HTTP/0.9
        ([b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n", body()], "dropped"),
        ([HEAD, *[b"X-%d: y\r\n" % i for i in range(20_000)], b"\r\n", body()], "dropped"),
        ([HEAD + LENGTH % 10**6, body()], "dropped"),
        ([HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", body()], "dropped"),
        ([HEAD + b"Content-Length: -1\r\n\r\n", body()], "dropped"),
        ([HEAD + b"Content-Length: 9" + b"9" * 30 + b"\r\n\r\n", body()], "dropped"),
        ([HEAD + LENGTH % 10, body()], "unreadable"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"FFFFFFFFFFFFFFFFF\r\n", body()], "dropped"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n", body()], "dropped"),
        ([HEAD + b"Transfer-Encoding: gzip\r\n\r\n", body()], "dropped"),
        ([b"HTTP/1.1 99999 no\r\n\r\n"], "dropped"),
        ([b"HTTP/1.1 200 OK\r\nA\0B: \x1b\r\n\r\n", body()], "dropped"),
        ([b"HTTP/1.1 200 OK"], "dropped"),
        ([b""], "dropped"),
        ([b"HTTP/1.1 204 none\r\n\r\n"], "unreadable"),
        ([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"], "dropped"),
        ([b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 2000, HEAD + LENGTH % len(body()), body()], "answered"),
        ([HEAD + LENGTH % len(body()), body(), HEAD + LENGTH % 3 + b"bad"], "answered"),
        ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n%c\r\n" % one for one in body()], b"0\r\n\r\n"],
         "answered"),
    ],
)  # fmt: skip
def test_bad_http_is_an_outcome(raw: list[bytes], outcome: str) -> None:
    with serving(scripted(Say(raw=raw), Say("yes"))) as server:
        reply, log, *_ = ask(server)
        assert log.outcomes[0] == outcome and log.replies[0].text == clean_text(log.replies[0].text, 2000)
        assert isinstance(reply, (Reply, RequestRejected))


@pytest.mark.parametrize("name", ["Retry-After", "retry-after-ms"])
@pytest.mark.parametrize(
    "wait",
    ["NaN", "inf", "-inf", "-1", "1e300", "1e-300", "0x10", "1_000", "\xb2", "Mon, 99 Foo 99999 99:99:99", "(", "\"'",
     "Thu, 01 Jan 0001 00:00:00 +9999", "Fri, 31 Dec 9999 23:59:59 -2359", "," * 5000, "9" * 5000, ""],
)  # fmt: skip
def test_no_wait_that_a_server_asks_for_is_too_long(wait: str, name: str) -> None:
    with serving(scripted(Say(status=429, headers={name: wait}), Say("yes"))) as server:
        reply, _, waits, _ = ask(server)
        assert isinstance(reply, Reply) and len(waits) == 1 and 1.0 <= waits[0] <= 300.0


# --- whole runs ---


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return record(tmp_path / "r.jsonl", passed(kernel(1), 3.0), passed(kernel(2), 2.9))


def clean(text: str) -> bool:
    return text == clean_text(text, len(text))


def files_hold_no_escapes(folder: Path) -> bool:
    marks = (b"\x1b]0;PWN", b"\x1b[2J", b"\\u001b]0;PWN", b"\\u001b[2J", b"\\ud800")
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return len(files) > 1 and not any(mark in data for mark in marks for data in files)


@pytest.mark.parametrize("status", [200, 307, 400, 401, 429])
def test_escapes_of_a_server_reach_neither_terminal_nor_files(status: int, recording: Path, tmp_path: Path) -> None:
    told = f"told {ESCAPES} {ESCAPES}"
    page = told.encode() if status == 200 else json.dumps({"error": {"message": told + "\ud800"}}).encode()
    headers = {"Retry-After": "0", **({"Location": "/else"} if status == 307 else {})}
    run = tmp_path / "run"
    code, said = evolve_by_command(
        lambda request, number: Say(status=status, body=page, headers=headers), recording, run, 1
    )
    assert code == 2 and "told ]0;PWN[2J" in said and clean(said)
    assert files_hold_no_escapes(run)
    code, said = evolve_by_command(lambda request, number: Say(answer(kernel(1).text)), recording, run, 3)
    assert code == 0 and clean(said)
    with EvolveJournal(run / "store.sqlite") as journal:
        assert "proven" in [one.kind for one in journal.outcomes().values()]


def test_a_finish_that_no_file_can_hold_does_not_end_the_run(recording: Path, tmp_path: Path) -> None:
    odd = body(answer(kernel(1).text), "\ud800\x1b[2J", {"prompt_tokens": 9000, "completion_tokens": 9})
    code, _ = evolve_by_command(lambda request, number: Say(body=odd), recording, tmp_path / "run", 2)
    assert code == 0 and files_hold_no_escapes(tmp_path / "run")
    with EvolveJournal(tmp_path / "run" / "store.sqlite") as journal:
        assert [reply.finish for _, reply in journal.replies()] == ["?[2J"] * 2
