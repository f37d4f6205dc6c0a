"""The protocol: tools and resources over standard input and output, by the official SDK's high-level server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import create_model

from outblas.core.child_process import end_children
from outblas.core.errors import OutblasError, UsageError
from outblas.core.install_hint import needed
from outblas.core.problem import Problem
from outblas.core.version import __version__
from outblas_lab.mcp.guide_resources import EXAMPLE, RESOURCES, GuideResource
from outblas_lab.mcp.kernel_tools import TOOLS
from outblas_lab.mcp.tool_arguments import Tool
from outblas_lab.mcp.tool_replies import error_text
from outblas_lab.mcp.tool_session import ToolSession

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
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
    needed("mcp.server.mcpserver", "the MCP SDK, package mcp from 2.3 on", "mcp")


def serve(session: ToolSession) -> None:
    """Serve one client on stdin and stdout until it closes stdin. Nothing else is written to stdout.

    A call that still runs shortly after the client has gone loses its processes. If it runs on, this process ends at
    once. The archive keeps what was stored.

    SIGINT, SIGTERM and SIGHUP end the process, even while the client keeps stdin open. Its status is then 128 and the
    signal's number.
    """
    calls = ThreadPoolExecutor(1, "outblas-tools")
    asyncio.run(_serve(session, calls))
    if not _finish(calls):
        sys.stderr.flush()
        os._exit(0)  # an orderly end would wait for the call, up to minutes


async def _serve(session: ToolSession, calls: ThreadPoolExecutor) -> None:
    def end(number: int) -> None:
        # An orderly end would wait for the SDK's thread, which reads stdin until the client closes it.
        if _finish(calls):
            session.close()
        sys.stderr.write("\ninterrupted; the archive keeps what was stored\n")
        sys.stderr.flush()
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, end, number)
    await make_server(session, calls).run_stdio_async()


def _finish(calls: ThreadPoolExecutor) -> bool:
    """Wait shortly for the running call, then end its processes. Return False if it runs on even then."""
    last = calls.submit(int)
    if not wait([last], GRACE_S).done:
        end_children()  # a call that waits for its compiler ends then, and removes its files
    return bool(wait([last], GRACE_S).done)


def make_server(session: ToolSession, calls: ThreadPoolExecutor) -> MCPServer[Any]:
    """Return the SDK's server with all tools and resources.

    Args:
        calls: the one thread that uses the session, so that calls run one after the other. A cancelled call that has
            not begun is left out.
    """
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ResourceError

    def reader(resource: GuideResource) -> Callable[..., Any]:
        async def read_one(problem: str) -> str:
            try:
                return await _in_turn(calls, lambda: resource.text(session, Problem.from_key(problem)))
            except OutblasError as error:
                raise ResourceError(error_text(error)) from error

        async def read() -> str:
            return await read_one(EXAMPLE.key)

        return read_one if "{problem}" in resource.uri else read

    tools = [_sdk_tool(name, tool, session, calls) for name, tool in TOOLS.items()]
    server = MCPServer("outblas", version=__version__, instructions=INSTRUCTIONS, tools=tools, log_level="WARNING")
    for one in RESOURCES:
        server.resource(one.uri, name=one.name, description=one.description, mime_type=one.mime_type)(reader(one))
    return server


def _sdk_tool(name: str, tool: type[Tool], session: ToolSession, calls: ThreadPoolExecutor) -> Any:
    """Return the SDK's record of a tool. The SDK would derive the arguments from a function; here they are a model."""
    from mcp.server.mcpserver.tools import Tool as SdkTool
    from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase, FuncMetadata
    from mcp_types import CallToolResult, TextContent, ToolAnnotations

    class WholeModel(ArgModelBase):
        def model_dump_one_level(self) -> dict[str, Any]:
            return {"arguments": self}

    async def answer(arguments: Tool) -> Any:
        try:
            return await _in_turn(calls, lambda: _answer(session, arguments))
        except OutblasError as error:
            return CallToolResult(content=[TextContent(type="text", text=error_text(error))], is_error=True)

    model: Any = create_model(name, __base__=(tool, WholeModel))
    return SdkTool(
        name=name,
        description=tool.description(),
        parameters=model.model_json_schema(),
        fn=answer,
        is_async=True,
        fn_metadata=FuncMetadata(arg_model=model, output_model=dict[str, Any]),
        annotations=ToolAnnotations(read_only_hint=tool.read_only, destructive_hint=False, open_world_hint=False),
    )


async def _in_turn(calls: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(calls, call)


def _answer(session: ToolSession, tool: Tool) -> dict[str, Any]:
    """Return the tool's keys and ``budget_left``. Raise OutblasError also for what the system or a package refuses."""
    try:
        return {**tool.run(session), "budget_left": session.budget.left()}
    except OutblasError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed", "the package in the server's environment", "ask the user to install it"
        ) from error
    except OSError as error:
        logger.exception("tool %s", type(tool).__name__)
        wrong, do = f"a system call failed: {error.strerror}", "ask the user to check both"
        raise UsageError(wrong, "free disk space and sufficient file permissions", do) from error
