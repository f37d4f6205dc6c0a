"""JSON documents of ``--json`` of the commands of outblas-lab."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from outblas.cli.documents import Document, schema


class ResultsDocument(Document):
    """``outblas results --json``: the published figures."""

    schema_: Literal["outblas-results"] = schema("outblas-results")
    rows: list[dict[str, Any]] = Field(description="rows of summary.json")


class ScoreFigure(BaseModel, extra="forbid"):
    """The regret of an agent after a number of measurements."""

    agent: str = Field(description="path of the agent file, or name of a baseline")
    measurements: int = Field(description="measurements per problem and launch option; 0: the first proposal")
    regret: float = Field(description="1 / geometric mean of (best recorded time / time of the choice), minus 1")
    low: float = Field(description="lower end of its 95% interval over problems")
    high: float = Field(description="upper end")
    found: float = Field(description="share of searches whose choice passes, 0 to 1")


class ScoreDocument(Document):
    """``outblas recording score --json``: an agent file on held-out problems, beside baselines."""

    schema_: Literal["outblas-score"] = schema("outblas-score")
    agent: str = Field(description="path of the agent file")
    agent_sha256: str = Field(description="SHA-256 of the file")
    recording: str = Field(description="name or path of the recording")
    recording_sha256: str = Field(description="SHA-256 of its matrix")
    split: str = Field(description="kind of the split")
    split_seed: int | None = Field(description="seed of the split; null for a private one")
    training: int = Field(description="problems that an agent may learn from")
    searched: int = Field(description="held-out problems that were searched")
    noise_regret: float | None = Field(description="regret of the fastest recorded kernels under the recording's noise")
    scores: list[ScoreFigure] = Field(description="every agent after every number of measurements, the file first")


DOCUMENTS: tuple[type[Document], ...] = (ResultsDocument, ScoreDocument)
