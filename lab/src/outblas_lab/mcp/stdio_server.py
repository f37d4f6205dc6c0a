"""The protocol: tools and resources over standard input and output, by the official SDK."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from outblas.core.child_process import end_children
from outblas.core.errors import OutblasError, ToolchainMissing
from outblas.core.install_hint import install_hint
from outblas.core.version import __version__
from outblas_lab.mcp.call_thread import CallThread
from outblas_lab.mcp.guide_resources import FIXED, OF_A_PROBLEM, read_resource
from outblas_lab.mcp.kernel_tools import TOOLS
from outblas_lab.mcp.tool_calls import answer_call
from outblas_lab.mcp.tool_replies import error_text
from outblas_lab.mcp.tool_session import ToolSession
from outblas_lab.mcp.unreadable_lines import AnsweringStream

if TYPE_CHECKING:
    from mcp.server.lowlevel.server import Server

#: Seconds that the end of a session waits for the running call. Clients kill a server after about two.
GRACE_S = 0.5
INSTRUCTIONS = (
    "Write, prove and time half-precision GEMM kernels for NVIDIA GPUs. Read outblas://guide first. Ask best-known and "
    "suggest for what is known, compile for the compiler's words, time for the proof and the speed, and archive to "
    "keep a proven kernel. Each answer has budget_left."
)


def require_sdk() -> None:
    """Check that the SDK is installed.

    Raises:
        ToolchainMissing: it is not.
    """
    try:
        import mcp.server.lowlevel.server  # noqa: F401
    except ImportError as error:
        raise ToolchainMissing("the MCP SDK is not installed", "package mcp", install_hint("mcp")) from error


def serve(session: ToolSession) -> None:
    """Serve one client on stdin and stdout until it closes stdin. Nothing else is written to stdout.

    Calls run one after the other. A call that still runs shortly after the client has gone loses its processes. If
    it runs on, this process ends at once. The archive keeps what was stored.

    Ctrl-C ends the process with status 130, even while the client keeps stdin open.

    Args:
        session: the session; the caller closes it.
    """
    calls = CallThread()
    with _ctrl_c_ends(session, calls):
        asyncio.run(_serve(make_server(session, calls)))
    if not _finish(calls):
        sys.stderr.flush()
        os._exit(0)  # an orderly end would wait for the call, up to minutes


def _finish(calls: CallThread) -> bool:
    """End the thread of the calls, and the processes of a call that runs on. Return False if it does so even then."""
    if calls.finish(GRACE_S):
        return True
    end_children()  # a call that waits for its compiler ends then, and removes its files
    return calls.finish(GRACE_S)


@contextlib.contextmanager
def _ctrl_c_ends(session: ToolSession, calls: CallThread) -> Iterator[None]:
    """Let Ctrl-C close the session and end this process.

    An orderly end would wait for the SDK's thread, which reads stdin until the client closes it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
        if _finish(calls):
            session.close()
        sys.stderr.write("\ninterrupted; the archive keeps what was stored\n")
        sys.stderr.flush()
        os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # it is ignored, or another thread serves
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


async def _serve(server: Server[Any]) -> None:
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read, write):
        answering: Any = AnsweringStream(read, write)
        await server.run(answering, write, server.create_initialization_options())


def make_server(session: ToolSession, calls: CallThread) -> Server[Any]:
    """Return the SDK's server with the handlers of tools and resources.

    Args:
        calls: thread on which the handlers use the session.
    """
    import mcp_types as types
    from mcp.server.lowlevel.server import Server
    from mcp.shared.exceptions import MCPError

    async def list_tools(_: Any, __: Any) -> Any:
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.arguments.model_json_schema(),
                    annotations=types.ToolAnnotations(
                        read_only_hint=tool.read_only, destructive_hint=False, open_world_hint=False
                    ),
                )
                for tool in TOOLS.values()
            ]
        )

    async def call_tool(_: Any, params: Any) -> Any:
        answer = await asyncio.wrap_future(calls.submit(lambda: answer_call(session, params.name, params.arguments)))
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=answer.text)],
            structured_content=answer.data,
            is_error=answer.failed,
        )

    async def list_resources(_: Any, __: Any) -> Any:
        return types.ListResourcesResult(
            resources=[
                types.Resource(uri=one.uri, name=one.name, description=one.description, mime_type=one.mime_type)
                for one in FIXED
            ]
        )

    async def list_templates(_: Any, __: Any) -> Any:
        return types.ListResourceTemplatesResult(
            resource_templates=[
                types.ResourceTemplate(
                    uri_template=one.uri, name=one.name, description=one.description, mime_type=one.mime_type
                )
                for one in OF_A_PROBLEM
            ]
        )

    async def read(_: Any, params: Any) -> Any:
        uri = str(params.uri)
        try:
            text, mime_type = await asyncio.wrap_future(calls.submit(lambda: read_resource(session, uri)))
        except OutblasError as error:
            raise MCPError(types.INVALID_PARAMS, error_text(error)) from error
        return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, mime_type=mime_type, text=text)])

    return Server(
        "outblas",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read,
    )
