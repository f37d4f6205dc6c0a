"""Arguments of the tools: their schemas, and their conversion to problems and candidates."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from outblas.core.config import Candidate, KernelConfig
from outblas.core.errors import ConfigError, OutblasError, ProblemError, UsageError, unknown_name
from outblas.core.gpu_records import packaged_records
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.config_text import config_from_name
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.compact import read_config

#: Agents that propose at once: they need no server and no preparation.
SuggestingAgent = Literal["heuristic", "regressor", "ppo", "transfer", "recorded", "random"]


def _whole(value: Any) -> Any:
    """Return 2 for 2.0, which JSON's schema counts as an integer and some clients send; else the value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: A number of things, as JSON has it.
Count = Annotated[int, BeforeValidator(_whole)]


class ToolArguments(BaseModel):
    """Base of the arguments of all tools. Other names are refused, and values keep their JSON type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ProblemArguments(ToolArguments):
    """Arguments that name a product.

    Attributes:
        mnk: extents in elements, ``M_N_K``.
        layout: ``tn`` or ``nn``.
        dtype: ``fp16`` or ``bf16``.
        acc: ``fp32`` or ``fp16``.
    """

    mnk: str = Field(description="Extents M_N_K of the product in elements, e.g. 64_4096_4096.", max_length=80)
    layout: Literal["tn", "nn"] = Field("tn", description="tn: B is stored N x K. nn: B is stored K x N.")
    dtype: Literal["fp16", "bf16"] = Field("fp16", description="Type of A, B and C.")
    acc: Literal["fp32", "fp16"] = Field("fp32", description="Accumulator; fp16 for fp16 inputs only.")

    def problem(self) -> Problem:
        """Return the problem.

        Raises:
            ProblemError: the extents do not parse, or the problem is invalid.
        """
        try:
            return Problem.from_mnk(self.mnk, self.layout, self.dtype, self.acc)
        except ProblemError as error:  # its words are those of the command line
            raise ProblemError(*(part.replace("--mnk", "mnk") for part in error.__reduce__()[1])) from error


class CandidateArguments(ProblemArguments):
    """Arguments that name a product and a candidate for it. Exactly one of the two kinds is given.

    Attributes:
        kernel: CUDA C++ text of a free kernel.
        config: a kernel of the template families: its knobs, or its name.
    """

    kernel: str | None = Field(
        None,
        description="A free kernel: CUDA C++ with a launch block, at most 256 KiB. Resource outblas://guide "
        "has the contract. Pass either kernel or config.",
    )
    config: dict[str, Any] | str | None = Field(
        None,
        description='A kernel of the template families: an object {"family": ..., knob: value, ...}, or a name as '
        "tool suggest returns it. Pass either kernel or config.",
    )

    def candidate(self) -> Candidate:
        """Return the candidate.

        Raises:
            UsageError: neither or both kinds are given.
            ContractError: the text is not a free kernel.
            ConfigError: the knobs are no kernel of a family.
        """
        return read_candidate(self.kernel, self.config)


class CompileArguments(CandidateArguments):
    """Arguments of tool ``compile``.

    Attributes:
        architecture: target of the compilation; None: the GPU of the session.
    """

    architecture: str | None = Field(
        None, description="Target: a GPU, e.g. h200, or an architecture, e.g. sm_90a. Default: the session's GPU."
    )


class SuggestArguments(ProblemArguments):
    """Arguments of tool ``suggest``.

    Attributes:
        count: number of candidates.
        agent: the agent that proposes.
    """

    count: Count = Field(4, ge=1, le=32, description="Number of candidates.")
    agent: SuggestingAgent = Field(
        "heuristic", description="Agent that proposes. heuristic ranks by the analytic cost model."
    )


class BestKnownArguments(ProblemArguments):
    """Arguments of tool ``best-known``.

    Attributes:
        count: number of recorded kernels.
    """

    count: Count = Field(3, ge=1, le=32, description="Number of recorded kernels, fastest first.")


class ArchiveArguments(ToolArguments):
    """Arguments of tool ``archive``. Which of them are needed depends on the action.

    Attributes:
        action: ``list``, ``read`` or ``store``.
        name: name of the kernel to read.
        mnk: extents of the product; with ``list`` it restricts the answer.
        layout: as for other tools.
        dtype: as for other tools.
        acc: as for other tools.
        kernel: free kernel to store.
        config: template kernel to store.
    """

    action: Literal["list", "read", "store"] = Field(
        description="list: names, times and scores. read: one kernel's text or knobs. store: keep a proven kernel."
    )
    name: str | None = Field(None, description="Name of the kernel; for action read.", max_length=400)
    mnk: str | None = Field(None, description="Extents M_N_K; needed to store, optional to list.", max_length=80)
    layout: Literal["tn", "nn"] = Field("tn", description="tn or nn.")
    dtype: Literal["fp16", "bf16"] = Field("fp16", description="fp16 or bf16.")
    acc: Literal["fp32", "fp16"] = Field("fp32", description="fp32 or fp16.")
    kernel: str | None = Field(None, description="The free kernel to store.")
    config: dict[str, Any] | str | None = Field(None, description="The template kernel to store.")

    def problem(self) -> Problem | None:
        """Return the named problem; None if ``mnk`` is not given.

        Raises:
            ProblemError: as for other tools.
        """
        if self.mnk is None:
            return None
        return ProblemArguments(mnk=self.mnk, layout=self.layout, dtype=self.dtype, acc=self.acc).problem()


def read_candidate(kernel: str | None, config: dict[str, Any] | str | None) -> Candidate:
    """Return the candidate of a kernel's text or a config; exactly one of them is not None.

    Args:
        kernel: CUDA C++ text.
        config: knobs as an object or as its JSON text, or a config's name.

    Raises:
        UsageError: neither or both are given.
        ContractError: the text is not a free kernel.
        ConfigError: the knobs are no kernel of a family.
    """
    if (kernel is None) == (config is None):
        given = "neither kernel nor config" if kernel is None else "both kernel and config"
        raise UsageError(given, "exactly one of them", "pass the CUDA text as kernel, or the knobs as config")
    return FreeKernel.parse(kernel) if kernel is not None else _template(config)


def _template(config: dict[str, Any] | str | None) -> KernelConfig:
    try:
        if isinstance(config, str) and not config.lstrip().startswith("{"):
            return config_from_name(config)
        knobs = json.loads(config) if isinstance(config, str) else config
        return read_config({k: _whole(v) for k, v in knobs.items()} if isinstance(knobs, dict) else knobs)
    except OutblasError:
        raise
    except (ValueError, ArithmeticError, RecursionError) as error:  # e.g. text that is cut, or nesting without end
        raise ConfigError(
            f"config cannot be read ({type(error).__name__}: {error})",
            'an object {"family": ..., knob: value, ...}',
            "see resource outblas://guide",
        ) from error


def target_gpu(named: str) -> Gpu:
    """Return the packaged GPU of a short name or an architecture.

    Example: ``target_gpu("sm_90a")`` and ``target_gpu("h200")`` compile for the same architecture.

    Args:
        named: short name, or architecture as the compiler spells it.

    Raises:
        UsageError: the package has no such GPU.
    """
    gpus = {name: record.gpu for name, record in packaged_records().items()}
    of_architecture = {architecture(gpu): gpu for gpu in gpus.values()}
    found = gpus.get(named.lower()) or of_architecture.get(named.lower())
    if found is None:
        raise unknown_name("architecture", named, (*gpus, *of_architecture), "pass one of them, or leave it out")
    return found


def argument_faults(error: Exception) -> str:
    """Return one line on the arguments that a schema refuses: each with its fault, at most five.

    Example: ``mnk: Field required; count: Input should be less than or equal to 32 (got 99)``.

    Args:
        error: a ``pydantic.ValidationError``.
    """
    from pydantic import ValidationError

    assert isinstance(error, ValidationError)
    faults = []
    for fault in error.errors(include_url=False)[:5]:
        place = ".".join(str(part) for part in fault["loc"]) or "arguments"
        got = "" if fault["type"] == "missing" else f" (got {_short(fault['input'])})"
        faults.append(f"{place}: {fault['msg']}{got}")
    return "; ".join(faults)


def _short(value: Any) -> str:
    return re.sub(r"\s+", " ", repr(value))[:80]
