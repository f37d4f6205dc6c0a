"""A stand-in for the package xllamacpp: a server that repeats the recorded replies of SmolLM2-135M-Instruct.

``replies.json`` has the replies of a run of ``outblas evolve --gguf`` on two cores. Its settings were those of
``tests/llm/test_gguf.py``, with an answer of 2048 tokens at most.
"""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPLIES = json.loads(Path(__file__).with_name("replies.json").read_text())


class CommonParams(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(model=SimpleNamespace(path=""), cpuparams=SimpleNamespace(n_threads=-1))


class Server:
    def __init__(self, params: CommonParams) -> None:
        model = Path(params.model.path)
        if model.read_bytes() != b"GGUF and weights":
            raise RuntimeError("Failed to init server, please check the input params.")
        print("llama.cpp prints this on its standard output", flush=True)
        model.with_suffix(".json").write_text(json.dumps({"pid": os.getpid(), "context": params.n_ctx}))
        self._http = ThreadingHTTPServer(("127.0.0.1", params.port), _Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{self._http.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    asked = 0

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        assert self.path == "/slots"
        token = {"n_decoded": 310}
        busy = {"is_processing": True, "n_prompt_tokens": 4053, "next_token": [token]}
        self._send([busy, {"is_processing": False}])

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/completion":
            self._send({"timings": {"prompt_per_second": 100.0, "predicted_per_second": 10.0}})
            return
        assert self.path == "/v1/chat/completions"
        said = REPLIES[_Handler.asked]
        _Handler.asked += 1
        usage = {"prompt_tokens": said["prompt_tokens"], "completion_tokens": said["answer_tokens"]}
        message = {"role": "assistant", "content": said["text"]}
        choice = {"index": 0, "message": message, "finish_reason": said["finish"]}
        self._send({"object": "chat.completion", "choices": [choice], "usage": usage})

    def _send(self, data: object) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
