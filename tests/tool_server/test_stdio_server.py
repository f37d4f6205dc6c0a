"""``outblas mcp`` as a process, asked by the SDK's own client over stdin and stdout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outblas.records.library import Library
from support.free_fixture import BODY, device_text, exploit, missing
from support.helpers import SOURCE_PATH, running

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[tune]'")
mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install './lab[mcp]'")
from anyio.from_thread import start_blocking_portal  # noqa: E402
from mcp.client.stdio import stdio_client  # noqa: E402

compiles = pytest.mark.skipif(missing() is not None, reason=str(missing()))
TOOLS = ["compile", "prove", "time", "profile", "suggest", "best-known", "archive"]
SMALL = {"mnk": "512_512_512"}
WGMMA = {"family": "sm90_wgmma_gemm", "bm": 64, "bn": 64}


def environment(cache: Path) -> dict[str, str]:
    """The tests' own, with the sources of this checkout first."""
    paths = [SOURCE_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OUTBLAS_CACHE_DIR": str(cache)}


class Talk:
    """A client of a server process, for tests that are not coroutines."""

    def __init__(self, portal: Any, client: Any) -> None:
        self._portal, self._client = portal, client

    def ask(self, method: str, *arguments: Any) -> Any:
        return self._portal.call(getattr(self._client, method), *arguments)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer of a call that succeeds."""
        result = self.ask("call_tool", tool, arguments)
        assert not result.is_error, result.content[0].text
        assert json.loads(result.content[0].text) == result.structured_content
        return dict(result.structured_content)

    def refusal(self, tool: str, **arguments: Any) -> str:
        """Return the text of a call that fails: the mistake, the expected input and the remedy."""
        result = self.ask("call_tool", tool, arguments)
        assert result.is_error and result.structured_content is None
        text = str(result.content[0].text)
        assert [line.partition(":")[0] for line in text.splitlines()] == ["error", "expected", "do"]
        return text


@contextmanager
def talking(folder: Path, *options: str) -> Iterator[Talk]:
    """Start a server, connect to it, and assert in the end that it wrote no traceback."""
    said = folder / "stderr"
    command = ["-m", "outblas", "mcp", "--device", "compile", *options]
    parameters = mcp.StdioServerParameters(command=sys.executable, args=command, env=environment(folder / "cache"))
    with said.open("w") as errors, start_blocking_portal() as portal:
        made = mcp.Client(stdio_client(parameters, errlog=errors), read_timeout_seconds=120)
        with portal.wrap_async_context_manager(made) as client:
            yield Talk(portal, client)
    assert "Traceback" not in said.read_text()


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(name="talk", scope="module")
def talk_fixture(folder: Path) -> Iterator[Talk]:
    with talking(folder, "--run", str(folder / "kernels"), "--compilations", "5") as talk:
        yield talk


def test_it_lists_its_tools_with_schemas(talk: Talk) -> None:
    tools = talk.ask("list_tools").tools
    assert [tool.name for tool in tools] == TOOLS
    for tool in tools:
        assert tool.description and tool.input_schema["additionalProperties"] is False
        assert all(one["description"] for one in tool.input_schema["properties"].values())
    assert tools[0].input_schema["required"] == ["mnk"]


def test_it_lists_and_reads_its_resources(talk: Talk) -> None:
    assert [one.uri for one in talk.ask("list_resources").resources] == ["outblas://guide", "outblas://recordings"]
    templates = talk.ask("list_resource_templates").resource_templates
    assert [one.uri_template for one in templates] == ["outblas://guide/{problem}", "outblas://recording/{problem}"]

    def read(uri: str) -> str:
        return str(talk.ask("read_resource", uri).contents[0].text)

    guide = read("outblas://guide")
    assert "outblas-launch" in guide and "family sm90_wgmma_gemm" in guide
    assert "M = 64, N = 4096, K = 4096" in read("outblas://guide/64_4096_4096_NN_bf16_fp32")
    used, other, uncut = json.loads(read("outblas://recordings"))["recordings"]
    assert (used["gpu"], other["gpu"], uncut["gpu"]) == ("h200", "h100", "h200") and "512_512_512" in used["problems"]
    rows = json.loads(read("outblas://recording/512_512_512_TN_fp16_fp32"))
    assert len(rows["best"]) == 10 and rows["best"][0]["us"] < min(rows["baselines_us"].values())


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("outblas://guide/1_2_3", "expected: "),
        ("outblas://recording/7_7_7_TN_fp16_fp32", "expected: a recorded problem"),
        ("file:///etc/passwd", "Unknown resource"),
    ],
)
def test_a_resource_that_is_not_there_is_an_error_with_words(talk: Talk, uri: str, words: str) -> None:
    with pytest.raises(mcp.MCPError, match=words):
        talk.ask("read_resource", uri)


@compiles
def test_a_good_kernel_a_bad_one_and_one_that_tries_to_escape_until_the_budget_is_spent(talk: Talk) -> None:
    good = talk.call("compile", **SMALL, kernel=device_text(shared=1024))
    assert good["compiled"] and good["registers"] > 0 and good["spill_bytes"] == 0
    assert good["dynamic_shared_bytes"] == 1024 and good["sass"]["hgmma"] == 0 and "registers" in good["log"]
    bad = talk.call("compile", **SMALL, kernel=device_text(BODY.replace("float sum", "flot sum")))
    assert bad["status"] == "compile_error" and '"flot" is undefined' in bad["log"] and "registers" not in bad
    escape = talk.call("compile", **SMALL, kernel=exploit("includes_a_file"))
    assert escape["status"] == "static_rejected" and "only the provided headers are allowed" in escape["detail"]
    config = talk.call("compile", **SMALL, config=WGMMA, architecture="sm_90a")
    assert config["compiled"] and config["sass"]["hgmma"] > 0 and config["dynamic_shared_bytes"] > 0
    assert config["budget_left"]["compilations"] == 1
    assert "unknown architecture 'sm_12'" in talk.refusal("compile", **SMALL, config=WGMMA, architecture="sm_12")
    talk.call("compile", **SMALL, kernel=device_text())
    spent = talk.refusal("compile", **SMALL, kernel=device_text())
    assert "budget of 5 compilations is spent" in spent and "--compilations" in spent


def test_from_a_suggestion_to_an_installed_kernel(talk: Talk, folder: Path) -> None:
    first = talk.call("suggest", **SMALL, count=2)
    assert first["source"] == "replay:h200" and len(first["suggestions"]) == 2
    kernel = first["suggestions"][0]
    timed = talk.call("time", **SMALL, config=kernel["config"])
    assert timed["proven"] and timed["library_would_install"] and timed["speedup"]["low"] > 1.01
    assert timed["us"] > timed["floor_us"] and timed["source"] == "replay:h200"
    again = talk.call("prove", **SMALL, config=kernel["name"])
    assert again["proven"] and "us" not in again
    assert again["budget_left"]["evaluations"] == timed["budget_left"]["evaluations"] == 99
    names = [one["name"] for one in talk.call("suggest", **SMALL, count=2)["suggestions"]]
    assert names and kernel["name"] not in names

    stored = talk.call("archive", action="store", **SMALL, config=kernel["name"])
    assert stored["stored"] and stored["library"]["installed"]["plain"] == kernel["name"]
    row = Library.load(folder / "kernels" / "library.json").rows[0]
    assert row.plain is not None and row.plain.low == pytest.approx(timed["speedup"]["low"], abs=1e-4)
    assert [one["name"] for one in talk.call("archive", action="list")["kernels"]] == [kernel["name"]]
    read = talk.call("archive", action="read", name=kernel["name"])
    assert read["config"]["bm"] == kernel["config"]["bm"]
    assert json.loads((folder / "kernels" / "best" / f"{timed['problem']}.json").read_text()) == read["config"]
    assert talk.call("archive", action="store", **SMALL, config=kernel["name"])["stored"] is False


def test_the_best_known_kernels_of_the_packaged_recording(talk: Talk) -> None:
    found = talk.call("best-known", **SMALL, count=5)
    best = found["recording"]["best"]
    assert [one["us"] for one in best] == sorted(one["us"] for one in best) and len(best) == 5
    assert found["library"]["plain"]["low"] > 1.01 and found["floor_us"] == 1.0
    unknown = talk.call("best-known", mnk="8_8_24")
    assert unknown["recording"] is None and unknown["library"] is None


def test_what_needs_a_gpu_says_so(talk: Talk) -> None:
    assert "has no GPU" in talk.refusal("prove", **SMALL, kernel=device_text())
    assert "has no GPU" in talk.refusal("time", **SMALL, kernel=device_text())
    assert "has no GPU" in talk.refusal("profile", **SMALL, config=WGMMA)
    assert "not in the recording" in talk.refusal("suggest", mnk="8_8_24")
    unrecorded = {"family": "sm80_mma_gemm", "bm": 16, "bn": 8}
    assert "was not recorded" in talk.refusal("time", **SMALL, config=unrecorded)


def send(server: subprocess.Popen[bytes], *messages: dict[str, Any]) -> None:
    assert server.stdin is not None
    for message in messages:
        server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
    server.stdin.flush()


def compilers_of(pid: int) -> list[int]:
    """Return the compilers that a server runs."""
    listed = [child for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return [int(child) for child in listed if b"confined_compiler" in Path(f"/proc/{child}/cmdline").read_bytes()]


#: Macro T6 is a million statements, at which a compiler works for longer than it may.
MILLION = "#define T0 sum = sum * sum + 1.0f;\n" + "".join(
    f"#define T{level} {f'T{level - 1} ' * 10}\n" for level in range(1, 7)
)
HELLO = {
    "id": 0,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}},
}


@compiles
def test_it_ends_when_the_client_goes_in_the_middle_of_a_call_and_prints_only_the_protocol(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outblas", "mcp", "--device", "compile"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path)
    ) as server:
        assert server.stdin is not None and server.stdout is not None and server.stderr is not None
        send(server, HELLO)
        lines = [server.stdout.readline()]
        send(server, {"method": "notifications/initialized"}, {"id": 1, "method": "no/such"})
        lines.append(server.stdout.readline())
        server.stdin.write(b'this is no JSON\n[]\nnull\n{"jsonrpc": "2.0"}\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
        send(server, {"id": 2, "method": "tools/call", "params": {"name": "archive", "arguments": {"action": "list"}}})
        lines.append(server.stdout.readline())
        slow = {**SMALL, "kernel": device_text(MILLION + BODY.replace("  for (int i", "  T6\n  for (int i"))}
        send(server, {"id": 3, "method": "tools/call", "params": {"name": "compile", "arguments": slow}})
        while not (compilers := compilers_of(server.pid)):
            time.sleep(0.01)
        server.stdin.close()
        rest, errors = server.stdout.read(), server.stderr.read()
        assert server.wait(60) == 0 and b"Traceback" not in errors
    for _ in range(500):  # the system ends what was killed; alone, a compiler would run for minutes
        if not any(map(running, compilers)):
            break
        time.sleep(0.01)
    else:
        pytest.fail(f"compilers {compilers} outlive their server")
    answers = [json.loads(line) for line in (*lines, *rest.splitlines())]
    assert all(one["jsonrpc"] == "2.0" for one in answers)
    of = {one["id"]: one for one in answers if "id" in one}
    assert of[0]["result"]["serverInfo"]["name"] == "outblas" and "error" in of[1]
    assert "no archive" in of[2]["result"]["content"][0]["text"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_while_the_client_keeps_stdin_open(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "outblas", "mcp", "--device", "compile"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path)
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        send(server, HELLO)
        assert b"outblas" in server.stdout.readline()
        server.send_signal(number)
        try:
            assert server.wait(60) == 128 + number
        finally:
            server.kill()
        errors = server.stderr.read()
    assert b"interrupted" in errors and b"Traceback" not in errors
