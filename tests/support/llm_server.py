"""A scripted server of OpenAI's chat interface, and a client that asks it one question.

A function of the prompt decides the server's reply.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner

from outblas.cli.main import app
from outblas_lab.llm.budget import Budget, Cost, Price, SpendingAccount
from outblas_lab.llm.client import AnswerOptions, Client, RetryPolicy
from outblas_lab.llm.models import Model
from outblas_lab.llm.reply import Reply
from support.llm_kernels import PROBLEM


@dataclass
class Say:
    """A reply of the server: a completion, an HTTP error, a dropped connection, or silence."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    stall_s: float = 0.0
    finish: str = "stop"
    refusal: str | None = None
    reasoning: str | None = None
    prompt_tokens: int = 100
    answer_tokens: int = 50
    body: bytes | None = None
    wait: Callable[[], Any] | None = None
    half: bool = False  # the connection is dropped in the middle of the body
    parts: Iterable[bytes] | None = None  # a body without a length, until it or the client ends
    raw: Iterable[bytes] | None = None  # all that is sent, head included, until it or the client ends


#: (request's JSON, how many requests came before) -> reply.
Script = Callable[[dict[str, Any], int], Say]


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.sent = 0  # bytes of parts and of raw replies
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(request)
            self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
            say = self.server.script(request, number)
        if say.wait is not None:
            say.wait()
        if say.stall_s:
            self.server.released.wait(say.stall_s)
        if say.drop:
            self.close_connection = True
            self.connection.close()
            return
        if say.raw is not None:
            self._send_parts(say.raw)
            return
        body = say.body if say.body is not None else json.dumps(_completion(request, say)).encode()
        self.send_response(say.status)
        for name, value in {"Content-Type": "application/json", **say.headers}.items():
            self.send_header(name, value)
        if say.parts is not None:
            self.end_headers()
            self._send_parts(say.parts)
            return
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if say.half else body)
        self.close_connection = say.half

    def do_GET(self) -> None:
        """Answer the GET that a client sends if it follows a redirect as browsers do."""
        with self.server.lock:
            self.server.requests.append({"method": "GET"})
        self.send_error(404)

    def _send_parts(self, parts: Iterable[bytes]) -> None:
        self.close_connection = True
        for part in parts:
            self.connection.sendall(part)
            self.server.sent += len(part)


def _completion(request: dict[str, Any], say: Say) -> dict[str, Any]:
    if say.status != 200:
        return {"error": {"message": say.text or "scripted", "type": "scripted", "code": str(say.status)}}
    message = {"role": "assistant", "content": say.text, "refusal": say.refusal, "reasoning_content": say.reasoning}
    usage = {
        "prompt_tokens": say.prompt_tokens,
        "completion_tokens": say.answer_tokens,
        "total_tokens": say.prompt_tokens + say.answer_tokens,
    }
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": say.finish, "logprobs": None}],
        "usage": usage,
    }


@contextmanager
def serving(script: Script) -> Iterator[ScriptedServer]:
    """A server on a free port of this machine, until the block ends."""
    server = ScriptedServer(script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


# --- one question to it, with no wait between attempts, and what came of each ---

MESSAGES = [{"role": "user", "content": "a kernel, please"}]
MODEL = Model("scripted", price=Price(1.0, 2.0))


class ListedRequests:
    """Attempts in memory, with the request and the outcome of each."""

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
    """Ask a question; return its reply or error, the book, the waits between attempts, and the account."""
    request_log, waits, account = ListedRequests(), list[float](), SpendingAccount(budget or Budget())

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def run() -> Reply:
        client = Client(
            server.url, account, request_log, options=AnswerOptions(1000, **options),
            retry_policy=retry_policy or RetryPolicy(attempts=4), sleep=sleep,
        )  # fmt: skip
        try:
            return await client.ask(1, MESSAGES, MODEL)
        finally:
            await client.close()

    try:
        with patch("random.uniform", lambda low, high: high):
            return asyncio.run(run()), request_log, waits, account
    except Exception as error:
        return error, request_log, waits, account


def scripted(*says: Say) -> Callable[[dict[str, Any], int], Say]:
    return lambda request, number: says[min(number, len(says) - 1)]


def evolve_by_command(script: Script, recording: Path, folder: Path, requests: int, turns: int = 1) -> tuple[int, str]:
    """Run ``outblas evolve`` on a recording of free kernels, against a scripted server.

    Args:
        script: the server's replies.
        recording: file that answers the evaluations of one problem, ``support.llm_kernels.PROBLEM``.
        folder: run folder; a run that lies there resumes.
        requests: budget of requests.
        turns: questions of a conversation at most.

    Returns:
        The exit code and the printed text. An exception other than SystemExit fails the test.
    """
    with serving(script) as server:
        options = ("--model", "m", "--base-url", server.url, "--device", recording, "--parallel", 1, "--run", folder)
        arguments = ["evolve", "--mnk", PROBLEM.mnk, *options, "--budget", f"{requests} requests", "--turns", turns]
        found = CliRunner().invoke(app, [str(one) for one in arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output
