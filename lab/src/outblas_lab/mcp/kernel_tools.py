"""The tools themselves: each is a model of its arguments with a method ``run``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from outblas.core.config import LAUNCHES, KernelConfig, config_name
from outblas.core.errors import DeviceError, RecordError, UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.mcp.kernel_folder import listed
from outblas_lab.mcp.tool_arguments import CandidateTool, Count, Extents, ProblemTool, Tool, target_gpu
from outblas_lab.mcp.tool_replies import compile_reply, config_reply, proof_reply, time_reply
from outblas_lab.mcp.tool_session import ToolSession
from outblas_lab.pool.counters import counters_of
from outblas_lab.pool.ncu import find_ncu
from outblas_lab.pool.ncu_target import Profiler, ProfileWork, cache_of

#: Agents that propose at once: they need no server and no preparation.
SuggestingAgent = Literal["heuristic", "regressor", "ppo", "transfer", "recorded", "random"]
#: Seconds for each start of ncu.
_NCU_S = 300.0


class CompileTool(CandidateTool):
    """Compile a kernel for a product and inspect its machine code; nothing runs. Returns registers, spills, shared
    memory, counts of instructions and the compiler's log. Costs one compilation."""

    architecture: str | None = Field(
        None, description="Target: a GPU, e.g. h200, or an architecture, e.g. sm_90a. Default: the session's GPU."
    )

    def run(self, session: ToolSession) -> dict[str, Any]:
        problem, candidate = self.problem(), self.candidate()
        gpu = session.gpu if self.architecture is None else target_gpu(self.architecture)
        return compile_reply(session.compiled(problem, candidate, gpu), gpu)


class ProveTool(CandidateTool):
    """Put a kernel through all gates of the proof. Returns the status and the failed gate's words. Needs a GPU;
    without one, a template kernel is answered from the recording. Costs one evaluation."""

    def run(self, session: ToolSession) -> dict[str, Any]:
        return proof_reply(session.evaluated(self.problem(), self.candidate()))


class TimeTool(CandidateTool):
    """Prove a kernel, then time it beside torch, cuBLAS and cuBLASLt. Returns microseconds and the speed-up with its
    95% interval. A kernel that was proved in this session costs nothing more. Needs a GPU; without one, a template
    kernel is answered from the recording. Costs one evaluation."""

    def run(self, session: ToolSession) -> dict[str, Any]:
        return time_reply(session.evaluated(self.problem(), self.candidate()))


class ProfileTool(CandidateTool):
    """Read hardware counters of a proven template kernel with Nsight Compute. Needs a GPU and ncu."""

    def run(self, session: ToolSession) -> dict[str, Any]:
        """Return ``problem``, ``name`` and ``counters``."""
        problem, candidate = self.problem(), self.candidate()
        if not isinstance(candidate, KernelConfig):
            wrong = "a free kernel cannot be profiled: ncu runs outside the sandbox"
            do = "pass config; the compile tool reports the registers and instructions of a free kernel"
            raise UsageError(wrong, "a kernel of a template family", do)
        if session.gpu_index is None:
            do = "ask the user to start the server on a machine with a GPU"
            raise DeviceError("this session has no GPU to profile on", "a GPU with Nsight Compute", do)
        ncu = find_ncu()
        proof = proof_reply(session.evaluated(problem, candidate))
        if not proof["proven"]:
            wrong = f"{proof['name']} is not proven ({proof['status']})"
            raise UsageError(wrong, "a proven kernel", "prove it with the prove tool")
        with session.budget.gpu_time():
            counters = profiled_counters(problem, candidate, session.gpu, session.gpu_index, ncu)
        return {"problem": problem.key, "name": config_name(candidate), "counters": counters}


class SuggestTool(ProblemTool):
    """Ask a search agent for the most promising template kernels of a product. Kernels that this session has timed
    are left out. Costs nothing."""

    count: Count = Field(4, ge=1, le=32, description="Number of candidates.")
    agent: SuggestingAgent = Field(
        "heuristic", description="Agent that proposes. heuristic ranks by the analytic cost model."
    )

    def run(self, session: ToolSession) -> dict[str, Any]:
        """Return ``problem``, ``agent``, ``offered`` (their number), ``source`` and ``suggestions``.

        A suggestion has ``name``, ``config``, ``launch`` and ``predicted_us`` of the cost model. Without a GPU only
        recorded candidates are offered, so that tool ``time`` can answer for them.
        """
        from outblas.kernels.cost.cost_model import predict_many
        from outblas.tune.agents.agent_registry import make_agent

        problem, evaluator = self.problem(), session.template_evaluator
        offered = evaluator.candidates(problem)
        agent = make_agent(self.agent, 0, evaluator.gpu)
        chosen = agent.propose(problem, offered, session.history(problem), self.count)
        predicted = predict_many(problem, chosen, evaluator.gpu)
        suggestions = [
            {**config_reply(config), "predicted_us": round(float(us), 3)}
            for config, us in zip(chosen, predicted, strict=True)
        ]
        return {
            "problem": problem.key,
            "agent": self.agent,
            "offered": len(offered),
            "source": evaluator.source,
            "suggestions": suggestions,
        }


class BestKnownTool(ProblemTool):
    """Return the best kernels known for a product: the packaged library's decision, and the fastest rows of the
    recording with its baselines. Costs nothing."""

    count: Count = Field(3, ge=1, le=32, description="Number of recorded kernels, fastest first.")

    def run(self, session: ToolSession) -> dict[str, Any]:
        """Return ``problem``, ``floor_us``, ``library`` and ``recording``: null if they lack the problem."""
        problem = self.problem()
        return {
            "problem": problem.key,
            "floor_us": round(floor_us(problem, session.gpu), 3),
            "library": _library_row(session, problem),
            "recording": recorded_rows(session, problem, self.count),
        }


class ArchiveTool(Tool):
    """List, read or store kernels in the session's folder. Only proven kernels are stored. A template kernel that
    wins is also installed in the folder's library.json."""

    read_only: ClassVar[bool] = False
    action: Literal["list", "read", "store"] = Field(
        description="list: names, times and scores. read: one kernel's text or knobs. store: keep a proven kernel."
    )
    name: str | None = Field(None, description="Name of the kernel; for action read.", max_length=400)
    mnk: Extents | None = Field(None, description="Extents M_N_K; needed to store, optional to list.")
    layout: Literal["tn", "nn"] = Field("tn", description="tn or nn.")
    dtype: Literal["fp16", "bf16"] = Field("fp16", description="fp16 or bf16.")
    acc: Literal["fp32", "fp16"] = Field("fp32", description="fp32 or fp16.")
    kernel: str | None = Field(None, description="The free kernel to store.")
    config: dict[str, Any] | str | None = Field(None, description="The template kernel to store.")

    def run(self, session: ToolSession) -> dict[str, Any]:
        """Return the answer to the action.

        ``list``: ``folder`` and ``kernels``. ``read``: the entry with ``kernel`` or ``config``. ``store``: ``stored``,
        ``name``, ``folder``, ``kernels`` (their number), and for a template kernel ``library``.
        """
        folder = session.folder
        if self.action == "list":
            problem = None if self.mnk is None else self._stored(self.mnk).problem()
            return {"folder": str(folder.files.path), "kernels": listed(folder.entries(problem))}
        return self._read(session) if self.action == "read" else self._store(session)

    def _stored(self, mnk: str) -> CandidateTool:
        return CandidateTool(
            mnk=mnk, layout=self.layout, dtype=self.dtype, acc=self.acc, kernel=self.kernel, config=self.config
        )

    def _read(self, session: ToolSession) -> dict[str, Any]:
        if self.name is None:
            wrong = "action 'read' was called without a name"
            raise UsageError(wrong, "the name of a kernel", "use action 'list', then pass the name")
        entry = session.folder.entry(self.name)
        free = entry.candidate.get("family") == FreeKernel.family
        body = {"kernel": entry.candidate["text"]} if free else {"config": entry.candidate}
        return {**listed([entry])[0], **body}

    def _store(self, session: ToolSession) -> dict[str, Any]:
        if self.mnk is None:
            wrong = "action 'store' was called without mnk"
            raise UsageError(wrong, "the kernel's problem M_N_K", "pass mnk, layout and dtype")
        folder, stored = session.folder, self._stored(self.mnk)
        problem, candidate = stored.problem(), stored.candidate()
        found = session.evaluated(problem, candidate)
        reply: dict[str, Any] = {
            "stored": folder.store(found),
            "name": config_name(candidate),
            "folder": str(folder.files.path),
            "kernels": len(folder.entries(problem)),
        }
        if isinstance(candidate, KernelConfig):
            installed = folder.install(problem, session.template_evaluator)
            reply["library"] = None if installed is None else {"file": folder.library.name, "installed": installed}
        return reply


#: Tools by the names that clients call.
TOOLS: Mapping[str, type[Tool]] = {
    "compile": CompileTool,
    "prove": ProveTool,
    "time": TimeTool,
    "profile": ProfileTool,
    "suggest": SuggestTool,
    "best-known": BestKnownTool,
    "archive": ArchiveTool,
}


def profiled_counters(problem: Problem, config: KernelConfig, gpu: Gpu, gpu_index: int, tool: str) -> dict[str, float]:
    """Return name -> value of the counters of one call of a kernel; the names are those of ``outblas list counters``.

    Raises:
        DeviceError: no permission to read counters, or a launch that failed.
        RecordError: ncu's output cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="outblas-profile-") as scratch:
        profiler = Profiler(tool, Path(scratch), _NCU_S, gpu_index)
        ((kernels,),) = profiler.kernels([ProfileWork(problem, (config,), cache_of(problem, gpu))])
    if len(kernels) != 1:
        wrong = f"{config_name(config)} launched {len(kernels)} kernels in one call"
        raise RecordError(wrong, "one kernel per call", "profile again")
    return counters_of(kernels[0])


def recorded_rows(session: ToolSession, problem: Problem, count: int) -> dict[str, Any] | None:
    """Return the best rows of the session's recording on a problem; None if it does not hold the problem.

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
