"""llama.cpp's server for one GGUF file: on this machine's CPU, in a child process that ends with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.install_hint import needed
from outblas_lab.llm.client import ServerError
from outblas_lab.llm.evolve import EvolveSettings

_BOOT = "import sys; sys.path[:0] = {paths!r}; from {module} import main; main()"
#: Tokens that are read between two looks at the progress, and tokens for the reply to an answer.
_BATCH, _REPLY_TOKENS = 256, 2000
#: A proxy of the environment does not serve this machine's own addresses.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class GgufServer:
    """A running server at an address, without ``/v1``."""

    address: str

    def rates(self) -> tuple[float, float]:
        """Return the tokens per second that the model reads and writes, measured by one short request."""
        body = {"prompt": "sum += A[k] * B[k];\n" * 40, "n_predict": 24, "ignore_eos": True, "cache_prompt": False}
        found = self.request("/completion", json.dumps(body).encode(), 600.0)["timings"]
        return found["prompt_per_second"], found["predicted_per_second"]

    def progress(self) -> str:
        """Return words on the answers under way: ``1800 tokens read, 256 written``. Return "" if nothing is known."""
        try:
            busy = [slot for slot in self.request("/slots", None, 0.5) if slot["is_processing"]]
            written = sum(slot["next_token"][0]["n_decoded"] for slot in busy)
            read = sum(slot["n_prompt_tokens"] for slot in busy) - written
        except (OSError, ValueError, LookupError, TypeError):
            return ""
        return f"{read} tokens read, {written} written" if busy else ""

    def request(self, path: str, body: bytes | None, seconds: float) -> Any:
        """Return the JSON that the server answers to a POST of JSON, or to a GET without a body, within a time."""
        request = urllib.request.Request(self.address + path, body, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=seconds) as reply:
            return json.load(reply)


@contextmanager
def serving_gguf(path: Path, settings: EvolveSettings) -> Iterator[GgufServer]:
    """Serve a model until the block ends. The server ends with this process, too, however that ends.

    Its context holds a first prompt, two answers and the reply to the first, for each parallel conversation.

    Raises:
        UsageError: the file cannot be read, or is no GGUF file.
        ServerError: llama.cpp cannot load the model.
        ToolchainMissing: xllamacpp is not installed.
    """
    if not path.is_file() or path.open("rb").read(4) != b"GGUF":
        raise UsageError(f"--gguf {path} is no GGUF file", "a file that begins with GGUF", "download it again")
    needed("xllamacpp", "xllamacpp, which has llama.cpp's server", "gguf")
    boot = _BOOT.format(module=__name__, paths=[os.path.abspath(one) for one in sys.path if one])
    context = (settings.prompt_tokens or 0) * 9 // 8 + 2 * settings.max_tokens + _REPLY_TOKENS
    command = [sys.executable, "-c", boot, str(path), str(context * settings.parallel), str(settings.parallel)]
    # In a session of its own, Ctrl-C does not reach it. It ends when this process closes the child's input, or dies.
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            found = json.loads(child.stdout.readline() or b'{"error": "its process ended"}')
            if "error" in found:
                wrong, do = f"llama.cpp cannot load {path.name}: {found['error']}", "download it, or pass another file"
                raise ServerError(wrong, "a model in a format of llama.cpp", do)
            yield GgufServer(found["address"])
        finally:
            child.kill()


def main() -> None:
    """Serve the file of the arguments, in the child: print the address, and end when the input is closed."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints is no address
    try:
        import xllamacpp  # type: ignore[import-not-found,import-untyped,unused-ignore]

        params = xllamacpp.CommonParams()
        params.model.path, params.port, params.ui, params.verbosity, params.n_gpu_layers = sys.argv[1], 0, False, 0, 0
        params.n_ctx, params.n_parallel, params.n_batch = int(sys.argv[2]), int(sys.argv[3]), _BATCH
        params.cpuparams.n_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else -1
        server = xllamacpp.Server(params)
        found = {"address": server.listening_address}
    except Exception as error:
        found = {"error": str(error)}
    print(json.dumps(found), file=said, flush=True)
    sys.stdin.read()
    os._exit(0)
