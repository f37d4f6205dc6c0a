"""Arguments that tools share: their schemas, and their conversion to problems and candidates."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from outblas.core.config import Candidate
from outblas.core.errors import ConfigError, OutblasError, ProblemError, UsageError, unknown_name
from outblas.core.gpu_records import packaged_records
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.kernels.config_text import config_from_name
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.compact import read_config
from outblas_lab.mcp.tool_session import ToolSession


def _whole(value: Any) -> Any:
    """Return 2 for 2.0, which JSON's schema counts as an integer and some clients send; else the value."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: A number of things, as JSON has it.
Count = Annotated[int, BeforeValidator(_whole)]
Extents = Annotated[str, Field(max_length=80)]


class Tool(BaseModel):
    """Base of all tools. A tool is the model of its arguments; its docstring is its description for agents.

    Other arguments are refused, and values keep their JSON type.

    Attributes:
        read_only: True if it keeps nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    read_only: ClassVar[bool] = True

    @classmethod
    def description(cls) -> str:
        """Return the description for agents, on one line."""
        return " ".join((cls.__doc__ or "").split())

    def run(self, session: ToolSession) -> dict[str, Any]:
        """Return the answer in JSON values.

        Raises:
            OutblasError: an argument is wrong, the budget is spent, or the session lacks what the tool needs.
        """
        raise NotImplementedError


class ProblemTool(Tool):
    """Base of tools on a product."""

    mnk: Extents = Field(description="Extents M_N_K of the product in elements, e.g. 64_4096_4096.")
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


class CandidateTool(ProblemTool):
    """Base of tools on a candidate for a product."""

    kernel: str | None = Field(
        None,
        description="A free kernel: CUDA C++ with a launch block, at most 256 KiB. Resource outblas://guide "
        "has the contract. Pass either kernel or config.",
    )
    config: dict[str, Any] | str | None = Field(
        None,
        description='A kernel of the template families: an object {"family": ..., knob: value, ...}, or a name as '
        "the suggest tool returns it. Pass either kernel or config.",
    )

    def candidate(self) -> Candidate:
        """Return the candidate.

        Raises:
            UsageError: neither or both of ``kernel`` and ``config`` are given.
            ContractError: the text is not a free kernel.
            ConfigError: the knobs are no kernel of a family.
        """
        if self.kernel is not None and self.config is None:
            return FreeKernel.parse(self.kernel)
        if self.config is None or self.kernel is not None:
            given = "neither kernel nor config is given" if self.config is None else "kernel and config are both given"
            raise UsageError(given, "exactly one of them", "pass the CUDA source as kernel, or the knobs as config")
        try:
            if isinstance(self.config, str):
                return config_from_name(self.config)
            return read_config({knob: _whole(value) for knob, value in self.config.items()})
        except OutblasError:
            raise
        except (ValueError, ArithmeticError, RecursionError) as error:  # e.g. text that is cut
            wrong, do = f"config cannot be read ({type(error).__name__}: {error})", "see resource outblas://guide"
            raise ConfigError(wrong, 'an object {"family": ..., knob: value, ...}', do) from error


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
    gpu = gpus.get(named.lower()) or of_architecture.get(named.lower())
    if gpu is None:
        raise unknown_name("architecture", named, (*gpus, *of_architecture), "pass one of them, or leave it out")
    return gpu
