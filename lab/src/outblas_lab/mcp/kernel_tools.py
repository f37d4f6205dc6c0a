"""The tools themselves: each takes a session and checked arguments, and returns JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outblas.core.config import LAUNCHES, KernelConfig, config_name
from outblas.core.errors import DeviceError, UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.mcp.counter_profile import profiled_counters
from outblas_lab.mcp.kernel_folder import listed
from outblas_lab.mcp.tool_arguments import (
    ArchiveArguments,
    BestKnownArguments,
    CandidateArguments,
    CompileArguments,
    SuggestArguments,
    ToolArguments,
    read_candidate,
    target_gpu,
)
from outblas_lab.mcp.tool_replies import compile_reply, config_reply, proof_reply, time_reply
from outblas_lab.mcp.tool_session import ToolSession
from outblas_lab.pool.ncu import find_ncu


@dataclass(frozen=True)
class KernelTool:
    """A tool as clients see it.

    Attributes:
        name: its name.
        description: its description for the agent.
        arguments: model of its arguments, whose JSON schema clients get.
        run: function of the session and the arguments that returns JSON values.
        read_only: True if it keeps nothing.
    """

    name: str
    description: str
    arguments: type[ToolArguments]
    run: Callable[[ToolSession, Any], dict[str, Any]]
    read_only: bool = True


def compile_kernel(session: ToolSession, arguments: CompileArguments) -> dict[str, Any]:
    """Compile a candidate and inspect its machine code; nothing is run.

    Returns:
        Result of :func:`outblas_lab.mcp.tool_replies.compile_reply`.

    Raises:
        OutblasError: the arguments are wrong, the budget is spent, or a compiler is missing.
    """
    problem, candidate = arguments.problem(), arguments.candidate()
    gpu = session.gpu if arguments.architecture is None else target_gpu(arguments.architecture)
    return compile_reply(session.compiled(problem, candidate, gpu), gpu)


def prove_kernel(session: ToolSession, arguments: CandidateArguments) -> dict[str, Any]:
    """Put a candidate through the gates.

    Returns:
        Result of :func:`outblas_lab.mcp.tool_replies.proof_reply`.

    Raises:
        OutblasError: the arguments are wrong, the budget is spent, or nothing here can run the candidate.
    """
    return proof_reply(session.evaluated(arguments.problem(), arguments.candidate()))


def time_kernel(session: ToolSession, arguments: CandidateArguments) -> dict[str, Any]:
    """Prove a candidate, then time it beside the baselines.

    Returns:
        Result of :func:`outblas_lab.mcp.tool_replies.time_reply`.

    Raises:
        OutblasError: the arguments are wrong, the budget is spent, or nothing here can run the candidate.
    """
    return time_reply(session.evaluated(arguments.problem(), arguments.candidate()))


def profile_kernel(session: ToolSession, arguments: CandidateArguments) -> dict[str, Any]:
    """Read hardware counters of a proven template kernel on the session's GPU.

    Returns:
        ``problem``, ``name`` and ``counters``.

    Raises:
        OutblasError: there is no GPU or no ncu, the candidate is a free kernel or not proven, or the budget is spent.
    """
    problem, candidate = arguments.problem(), arguments.candidate()
    if not isinstance(candidate, KernelConfig):
        raise UsageError(
            "a free kernel cannot be profiled: ncu works outside the jail",
            "a kernel of the template families",
            "pass config; tool compile has the registers and instructions of a free kernel",
        )
    if session.gpu_index is None:
        raise DeviceError(
            "no counters: this session has no GPU",
            "a GPU with Nsight Compute",
            "ask the user to start the server on a machine with a GPU; a recording has no counters",
        )
    tool = find_ncu()
    proof = proof_reply(session.evaluated(problem, candidate))
    if not proof["proven"]:
        raise UsageError(f"{proof['name']} is not proven ({proof['status']})", "a proven kernel", "see tool prove")
    with session.budget.gpu_time():
        counters = profiled_counters(problem, candidate, session.gpu, session.gpu_index, tool)
    return {"problem": problem.key, "name": config_name(candidate), "counters": counters}


def suggest_kernels(session: ToolSession, arguments: SuggestArguments) -> dict[str, Any]:
    """Let a search agent propose template kernels that this session has not tried.

    Without a GPU only recorded candidates are offered, so that tool ``time`` can answer for them.

    Returns:
        ``problem``, ``agent``, ``offered`` (their number), ``source`` and ``suggestions``. A suggestion has ``name``,
        ``config``, ``launch`` and ``predicted_us`` of the cost model.

    Raises:
        OutblasError: the problem was not recorded and there is no GPU, or the agent lacks a package.
    """
    from outblas.kernels.cost.cost_model import predict_many
    from outblas.tune.agents.agent_registry import make_agent

    problem, evaluator = arguments.problem(), session.template_evaluator
    offered = evaluator.candidates(problem)
    agent = make_agent(arguments.agent, 0, evaluator.gpu)
    chosen = agent.propose(problem, offered, session.history(problem), arguments.count)
    predicted = predict_many(problem, chosen, evaluator.gpu)
    suggestions = [
        {**config_reply(config), "predicted_us": round(float(us), 3)}
        for config, us in zip(chosen, predicted, strict=True)
    ]
    return {
        "problem": problem.key,
        "agent": arguments.agent,
        "offered": len(offered),
        "source": evaluator.source,
        "suggestions": suggestions,
    }


def best_known(session: ToolSession, arguments: BestKnownArguments) -> dict[str, Any]:
    """Return the decision of the packaged library and the best rows of the recording.

    Returns:
        ``problem``, ``floor_us``, ``library`` and ``recording``. The last two are null if they lack the problem.

    Raises:
        OutblasError: the recording or the library cannot be read.
    """
    problem = arguments.problem()
    return {
        "problem": problem.key,
        "floor_us": round(floor_us(problem, session.gpu), 3),
        "library": _library_row(session, problem),
        "recording": recorded_rows(session, problem, arguments.count),
    }


def keep_kernels(session: ToolSession, arguments: ArchiveArguments) -> dict[str, Any]:
    """List, read or store kernels of the session's archive.

    Returns:
        ``list``: ``folder`` and ``kernels``. ``read``: the entry with ``kernel`` or ``config``. ``store``: ``stored``,
        ``name``, ``folder``, ``kernels`` (their number), and for a template kernel ``library``.

    Raises:
        OutblasError: the session has no archive, an argument is missing, or the kernel is not proven.
    """
    if arguments.action == "list":
        folder = session.folder
        return {"folder": str(folder.files.path), "kernels": listed(folder.entries(arguments.problem()))}
    if arguments.action == "read":
        return _read_kernel(session, arguments)
    return _store_kernel(session, arguments)


def recorded_rows(session: ToolSession, problem: Problem, count: int) -> dict[str, Any] | None:
    """Return the best rows of the session's recording on a problem; None if it does not hold the problem.

    Args:
        count: number of kernels.

    Returns:
        ``source``, ``baselines_us``, ``proven`` (number of kernels) and ``best``, fastest first.

    Raises:
        RecordError: the recording is damaged.
    """
    recording, source = session.replay.recording, session.replay.source
    if problem not in recording.problems:
        return None
    best = session.fastest_recorded(problem)
    return {
        "source": source,
        "baselines_us": {name: round(us, 3) for name, us in recording.baselines_of(problem).items()},
        "proven": len(best),
        "best": [{**config_reply(config), "us": round(us, 3)} for config, us in best[:count]],
    }


def _library_row(session: ToolSession, problem: Problem) -> dict[str, Any] | None:
    row = Library.packaged(session.gpu.name, missing_ok=True).lookup(problem)
    if row is None:
        return None
    choices: dict[str, Any] = {launch: _choice(row.choice(launch)) for launch in LAUNCHES}
    return {"gpu": session.gpu.name, "baseline": row.baseline, "source": row.source, **choices}


def _choice(choice: LibraryChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    figures = {name: round(getattr(choice, name), 4) for name in ("speedup", "low", "high")}
    return {**config_reply(choice.config), **figures}


def _read_kernel(session: ToolSession, arguments: ArchiveArguments) -> dict[str, Any]:
    if arguments.name is None:
        raise UsageError("action read without a name", "the name of a kernel", "use action list, then pass name")
    entry = session.folder.entry(arguments.name)
    free = entry.candidate.get("family") == FreeKernel.family
    body = {"kernel": entry.candidate["text"]} if free else {"config": entry.candidate}
    return {**listed([entry])[0], **body}


def _store_kernel(session: ToolSession, arguments: ArchiveArguments) -> dict[str, Any]:
    folder, problem = session.folder, arguments.problem()
    if problem is None:
        raise UsageError("action store without mnk", "the product M_N_K of the kernel", "pass mnk, layout and dtype")
    found = session.evaluated(problem, read_candidate(arguments.kernel, arguments.config))
    stored = folder.store(found)
    reply: dict[str, Any] = {
        "stored": stored,
        "name": config_name(found.evaluation.config),
        "folder": str(folder.files.path),
        "kernels": len(folder.entries(problem)),
    }
    if isinstance(found.evaluation.config, KernelConfig):
        installed = folder.install(problem, session.template_evaluator)
        reply["library"] = None if installed is None else {"file": folder.library.name, "installed": installed}
    return reply


_RUNS = "Needs a GPU; without one, a template kernel is answered from the recording. Costs one evaluation."
TOOLS: Mapping[str, KernelTool] = {
    tool.name: tool
    for tool in (
        KernelTool(
            "compile",
            "Compile a kernel for a product and inspect its machine code; nothing runs. Returns registers, spills, "
            "shared memory, counts of instructions and the compiler's log. Costs one compilation.",
            CompileArguments,
            compile_kernel,
        ),
        KernelTool(
            "prove",
            f"Put a kernel through all gates of the proof. Returns the status and the failed gate's words. {_RUNS}",
            CandidateArguments,
            prove_kernel,
        ),
        KernelTool(
            "time",
            "Prove a kernel, then time it beside torch, cuBLAS and cuBLASLt. Returns microseconds and the speed-up "
            f"with its 95% interval. A kernel that was proved in this session costs nothing more. {_RUNS}",
            CandidateArguments,
            time_kernel,
        ),
        KernelTool(
            "profile",
            "Read hardware counters of a proven template kernel with Nsight Compute. Needs a GPU and ncu.",
            CandidateArguments,
            profile_kernel,
        ),
        KernelTool(
            "suggest",
            "Ask a search agent for the most promising template kernels of a product. Kernels that this session has "
            "timed are left out. Costs nothing.",
            SuggestArguments,
            suggest_kernels,
        ),
        KernelTool(
            "best-known",
            "Return the best kernels known for a product: the packaged library's decision, and the fastest rows of "
            "the recording with its baselines. Costs nothing.",
            BestKnownArguments,
            best_known,
        ),
        KernelTool(
            "archive",
            "List, read or store kernels in the session's folder. Only proven kernels are stored. A template kernel "
            "that wins is also installed in the folder's library.json.",
            ArchiveArguments,
            keep_kernels,
            read_only=False,
        ),
    )
}
