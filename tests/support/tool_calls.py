"""Calls of the tools of ``outblas mcp`` through the SDK's own client and server, without a process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outblas_lab.mcp.stdio_server import make_server
from outblas_lab.mcp.tool_session import ToolSession


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to a call: its text, and its JSON values, which are None after an error."""

    text: str
    data: dict[str, Any] | None

    @property
    def failed(self) -> bool:
        return self.data is None


def answer_call(session: ToolSession, tool: str, arguments: dict[str, Any]) -> ToolAnswer:
    """Return the answer of a server of the session to a client."""
    import mcp

    async def ask(calls: ThreadPoolExecutor) -> Any:
        async with mcp.Client(make_server(session, calls)) as client:
            return await client.call_tool(tool, arguments)

    with ThreadPoolExecutor(1) as calls:
        result = asyncio.run(ask(calls))
    assert result.is_error == (result.structured_content is None)
    return ToolAnswer(result.content[0].text, result.structured_content)
