"""``outblas mcp``: a server that gives the tools of this package to a coding agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outblas.cli import common
from outblas.core.errors import UsageError
from outblas_lab.cli.eval_free import say_what_holds
from outblas_lab.cli.evolve import DeviceOption


def mcp(
    device: DeviceOption = None,
    recording: Annotated[
        str,
        typer.Option(help="Packaged recording or recording directory to replay for template kernels if no GPU exists."),
    ] = common.DEFAULT_RECORDING,
    compilations: Annotated[int, typer.Option(help="Maximum number of kernels to compile per session.")] = 200,
    evaluations: Annotated[int, typer.Option(help="Maximum number of kernels to prove and time per session.")] = 100,
    gpu_seconds: Annotated[float, typer.Option(help="Maximum GPU time per session in seconds.")] = 600.0,
    run: Annotated[
        Path | None, typer.Option(help="Directory for the archive. Without --run, the archive tool saves nothing.")
    ] = None,
) -> None:
    """Offer a coding agent tools to compile, prove, time and archive kernels, over MCP on stdin and stdout."""
    from outblas_lab.llm.evaluators import parse_evaluator
    from outblas_lab.mcp.session_budget import SessionLimits
    from outblas_lab.mcp.stdio_server import require_sdk, serve
    from outblas_lab.mcp.tool_session import SessionSettings, ToolSession
    from outblas_lab.recordings.recording import packaged

    limits = SessionLimits(compilations, evaluations, gpu_seconds)
    require_sdk()
    if recording not in packaged() and not Path(recording).exists():
        known = ", ".join(packaged())
        wrong = f"recording {recording!r} does not exist"
        raise UsageError(wrong, f"the name of a packaged recording ({known}) or a path", "correct --recording")
    place = parse_evaluator(device)
    if place.workers is not None:
        raise UsageError(f"--device {device} names several GPUs", "one GPU per session", "pass e.g. --device cuda:0")
    if place.gpu_index is not None:
        say_what_holds()
    with ToolSession(SessionSettings(place, recording, limits, run)) as session:
        common.err.print("waiting for a client on stdin; a coding agent starts this command", markup=False)
        serve(session)
