"""Products that are learned: their stages, and the report that users see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from outblas.core.config import KernelConfig, Launch, config_name
from outblas.core.problem import Problem
from outblas.records.library_row import LibraryRow


class Stage(StrEnum):
    """The stages of a product, in their order; the value is the word in reports."""

    SEEN = "seen"
    QUEUED = "queued"
    WAITING = "waiting for settle()"
    PROVING = "proving"
    TIMING = "timing"
    SETTLED = "settled"
    LEFT_ALONE = "left alone"


#: Stages of a product that the thread is to work on.
IN_WORK = (Stage.QUEUED, Stage.PROVING, Stage.TIMING)


@dataclass(frozen=True)
class Contender:
    """A way to compute a product that is ready on this machine.

    Attributes:
        config: a kernel of this package; None: an algorithm of cuBLASLt.
        algorithm: that algorithm, as :func:`outblas.runtime.cublas.describe` spells it; empty for a kernel.
    """

    config: KernelConfig | None
    algorithm: str = ""

    @property
    def name(self) -> str:
        return f"cuBLASLt {self.algorithm}" if self.config is None else config_name(self.config)


@dataclass
class LearnedProduct:
    """A product and its state of learning.

    Attributes:
        launch: launch option of its calls, ``plain`` or ``pdl``.
        contenders: number of ways that were tried.
        refused: name of a way -> the reason why it failed its proof.
        proof_seconds: the part of it that proofs took.
        row: the decision; None before the product is settled, or if it goes on as without learning.
    """

    problem: Problem
    launch: Launch
    index: int = 0
    stage: Stage = Stage.SEEN
    detail: str = ""
    contenders: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    gpu_seconds: float = 0.0
    proof_seconds: float = 0.0
    row: LibraryRow | None = None


@dataclass(frozen=True)
class LearningReport:
    """The products of a process; ``print`` shows it as a table.

    Attributes:
        products: the products, those that were met first in front.
        reason: why nothing is learned though the program asked for it, in one line; else empty.
    """

    products: tuple[LearnedProduct, ...]
    gpu_seconds: float
    budget_seconds: float
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"nothing is learned: {self.reason}"
        title = f"{len(self.products)} products, {self.gpu_seconds:.3g} of {self.budget_seconds:g} GPU seconds"
        return "\n".join([title, *_lines(self.products)])


def _lines(products: Iterable[LearnedProduct]) -> list[str]:
    found = []
    for one in products:
        option = "" if one.launch == "plain" else f" ({one.launch})"
        detail = f": {one.detail}" if one.detail else ""
        found.append(f"  {one.problem.key}{option}  {one.stage}{detail}")
        found += [f"    refused: {name}: {reason}" for name, reason in one.refused.items()]
    return found
