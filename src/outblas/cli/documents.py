"""JSON documents of ``--json``: one record a command, the single source of their fields and of their page.

Each document has ``schema`` and ``version``. A version grows when a field goes or changes its meaning; a new field
leaves it as it is.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


def schema(name: str) -> Any:
    """Return the field of a document that names its schema."""
    return Field(default=name, serialization_alias="schema", description="name of the schema")


class Document(BaseModel, extra="forbid"):
    """Fields of every document."""

    version: int = Field(default=1, description="version of the schema")


class DoctorCheck(BaseModel, extra="forbid"):
    """A check of ``outblas doctor``."""

    name: str = Field(description="the thing that was looked at")
    ok: bool | None = Field(description="true: works; false: broken, or missing and needed; null: absent, optional")
    found: str = Field(description="what is there, one line")
    do: str = Field(description="what to do about it; empty if nothing")
    required: bool = Field(description="nothing works without it")


class DoctorDocument(Document):
    """``outblas doctor --json``: the state of this machine."""

    schema_: Literal["outblas-doctor"] = schema("outblas-doctor")
    checks: list[DoctorCheck] = Field(description="every check, in the order of the text")
    can: list[str] = Field(description="what this machine can do")
    cannot: list[str] = Field(description="what it cannot do, each with the reason")
    next: str = Field(description="the next command")


class CalibrateDocument(Document):
    """``outblas calibrate --json``: the record of this GPU."""

    schema_: Literal["outblas-calibrate"] = schema("outblas-calibrate")
    gpu: str = Field(description="short name of the GPU")
    path: str = Field(description="path of the record")
    record: dict[str, Any] = Field(description="content of the record, see file formats")


class ListedSuite(BaseModel, extra="forbid"):
    """A suite of problems."""

    name: str = Field(description="name of the suite")
    problems: int = Field(description="problems per layout, dtype and accumulator")
    recorded: list[str] = Field(description="tables that can be replayed, e.g. h200: TN fp16/fp32")


class ListedAgent(BaseModel, extra="forbid"):
    """A search agent."""

    name: str = Field(description="name for --agent")
    summary: str = Field(description="its method, one line")
    extra: str = Field(description="extra that it needs; empty for none")


class ListedKernel(BaseModel, extra="forbid"):
    """A kernel family and its knobs."""

    name: str = Field(description="name of the family")
    knobs: list[str] = Field(description="names of its knobs")


class ListedCounter(BaseModel, extra="forbid"):
    """A hardware counter."""

    name: str = Field(description="name in evaluations")
    meaning: str = Field(description="meaning in words")
    unit: str = Field(description="unit of the value")
    metrics: list[str] = Field(description="names of Nsight Compute; the first that is there counts")


class ListDocument(Document):
    """``outblas list --json``: the names that other commands take."""

    schema_: Literal["outblas-list"] = schema("outblas-list")
    suites: list[ListedSuite] | None = Field(default=None, description="suites; null if not asked for")
    agents: list[ListedAgent] | None = Field(default=None, description="search agents; null if not asked for")
    kernels: list[ListedKernel] | None = Field(default=None, description="kernel families; null if not asked for")
    counters: list[ListedCounter] | None = Field(default=None, description="hardware counters; null if not asked for")


class TunedLaunch(BaseModel, extra="forbid"):
    """The outcome for one launch option. All fields are required (``weighted`` may be None); others are refused."""

    launch: str = Field(description="plain, pdl or weights")
    geomean: float = Field(description="geometric mean of the speed-ups; a fall-back counts as 1")
    fallbacks: int = Field(description="problems that fall back to a rival")
    weighted: float | None = Field(description="speed-up of all captured products together; null without --captured")


class TuneDocument(Document):
    """``outblas tune --json``: the outcome of a run, and its files."""

    schema_: Literal["outblas-tune"] = schema("outblas-tune")
    asked: int = Field(default=0, description="problems of the request; of a range of M those that are sampled")
    tuned: int = Field(default=0, description="problems that were reached")
    intervals: int = Field(default=0, description="intervals of M in the library")
    gates: int = Field(default=0, description="intervals of M with a kernel that has a gate, of --model")
    kept: int = Field(default=0, description="measurements that a resumed run had already")
    launches: list[TunedLaunch] = Field(default=[], description="outcome per launch option")
    library: str | None = Field(default=None, description="path of the library; null: nothing of --model was missing")
    result: str | None = Field(default=None, description="path of the result file; null as for the library")
    report: str | None = Field(default=None, description="path of the report; also null without outblas-lab")
    installed: str | None = Field(default=None, description="path of the user's library that took the winners, or null")


class EvalRow(BaseModel, extra="forbid"):
    """A callable that was timed."""

    name: str = Field(description="the callable: a kernel of OutBLAS or a rival")
    us: float | None = Field(default=None, description="median GPU time per call in microseconds (offline)")
    p50_us: float | None = Field(default=None, description="median latency in microseconds (server)")
    p99_us: float | None = Field(default=None, description="99th percentile of the latency in microseconds (server)")
    tflops: float | None = Field(default=None, description="TFLOP/s")
    floor_percent: float | None = Field(default=None, description="floor over time, percent")
    speedup: float | None = Field(default=None, description="how much faster OutBLAS is than this callable")
    low: float | None = Field(default=None, description="lower end of its 95% interval")
    high: float | None = Field(default=None, description="upper end of its 95% interval")
    spread: float | None = Field(default=None, description="spread of the samples, relative")
    detail: str | None = Field(default=None, description="version or algorithm")


class EvalDocument(Document):
    """``outblas eval --json``: one problem beside its rivals, or one free kernel."""

    schema_: Literal["outblas-eval"] = schema("outblas-eval")
    problem: str = Field(description="the problem as M_N_K_LAYOUT_DTYPE_ACC")
    rows: list[EvalRow] = Field(description="every callable; empty if nothing was timed")
    facts: dict[str, Any] = Field(
        description="all other lines of the text by name, e.g. mode, proof, floor_us, written"
    )


class CapturedProblem(BaseModel, extra="forbid"):
    """A product that can be tuned."""

    problem: str = Field(description="the problem as M_N_K_LAYOUT_DTYPE_ACC")
    count: int = Field(description="how often it ran")


class CaptureDocument(Document):
    """``outblas capture --json``: the record of a program. The program's own output goes to stderr."""

    schema_: Literal["outblas-capture"] = schema("outblas-capture")
    file: str = Field(description="path of the record")
    exit_code: int = Field(description="exit status of the program")
    problems: list[CapturedProblem] = Field(description="products that can be tuned, the most frequent first")
    not_served: dict[str, int] = Field(description="reason -> number of products that the library has no place for")


class TryFigure(BaseModel, extra="forbid"):
    """A figure with its interval."""

    median: float = Field(description="median")
    low: float = Field(description="lower end of the 95% interval")
    high: float = Field(description="upper end of the 95% interval")


class TryDocument(Document):
    """``outblas try --json``: a program without and with OutBLAS. The exit status is 1 if ``keep`` is false."""

    schema_: Literal["outblas-try"] = schema("outblas-try")
    keep: bool = Field(description="OutBLAS was on, and the lower end of the speed-up's interval is above 1.01")
    without: TryFigure = Field(description="figure without OutBLAS: wall time in seconds, or that of --metric")
    with_outblas: TryFigure = Field(description="the same figure with OutBLAS")
    speedup: TryFigure = Field(description="ratio over pairs of runs; above 1 is better with OutBLAS")
    pairs: int = Field(description="number of pairs")
    ours: int = Field(description="products that OutBLAS computed in the last run")
    torchs: int = Field(description="products that it left to torch in that run")
    reason: str = Field(description="why OutBLAS was not on; empty if it was")
    library: str | None = Field(description="path of the library that was tuned for the program; null: none was")


class ResultDocument(Document):
    """``--json`` of every other command: its files and figures, whose names are in the table below."""

    schema_: Literal["outblas-result"] = schema("outblas-result")
    command: str = Field(description="words of the command, e.g. recording export")
    files: dict[str, Any] = Field(description="files and folders by role: a path, an array of paths, or null")
    facts: dict[str, Any] = Field(description="counts and other figures by name")
    rows: list[dict[str, Any]] = Field(description="lines of the text's table, each an object; empty if it has none")


DOCUMENTS: tuple[type[Document], ...] = (
    DoctorDocument,
    CalibrateDocument,
    ListDocument,
    TuneDocument,
    EvalDocument,
    CaptureDocument,
    TryDocument,
    ResultDocument,
)
