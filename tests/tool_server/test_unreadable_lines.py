"""Lines from a client that are no messages: those with a request's id are answered, the others left out."""

from __future__ import annotations

from typing import Any

import pytest

from outblas_lab.mcp.unreadable_lines import AnsweringStream, request_id

pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install './lab[mcp]'")
import anyio  # noqa: E402
import mcp_types  # noqa: E402

HALF = '{"jsonrpc": "2.0", "id": %s, "method": "tools/call", "params": {"name": "\\ud83d"}}'


def read(line: str) -> Any:
    """Return what the SDK's reader makes of a line: a message, or an error."""
    try:
        return mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except Exception as error:
        return error


def test_a_request_that_cannot_be_read_is_answered_and_the_next_one_goes_on() -> None:
    ping = '{"jsonrpc": "2.0", "id": 3, "method": "ping"}'

    async def run() -> tuple[list[Any], list[Any]]:
        to_server, incoming = anyio.create_memory_object_stream[Any](10)
        outgoing, to_client = anyio.create_memory_object_stream[Any](10)
        for line in (HALF % 1, "no JSON", "[]", HALF % '"two"', HALF % "null", ping, HALF % 4):
            to_server.send_nowait(read(line))
        to_server.send_nowait(OSError("of the reader"))
        to_server.close()
        async with AnsweringStream(incoming, outgoing) as stream:
            messages = [message async for message in stream]
        outgoing.close()
        return messages, [answer.message async for answer in to_client]

    messages, answers = anyio.run(run)
    assert [message.method for message in messages] == ["ping"]
    assert [answer.id for answer in answers] == [1, "two", 4]
    assert {answer.error.code for answer in answers} == {mcp_types.PARSE_ERROR}


@pytest.mark.parametrize("line", ['{"id": 1}', "[" * 100_000, '{"id": true, "method": "\\ud800"}', '"\\ud800"'])
def test_what_is_no_request_has_no_id(line: str) -> None:
    assert request_id(read(line)) is None
