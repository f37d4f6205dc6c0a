"""Settings of an evolution, apart from its problems and its server."""

from __future__ import annotations

from dataclasses import dataclass

from outblas_lab.llm.answer import CODE, CONFIG
from outblas_lab.llm.archive import ArchiveShape
from outblas_lab.llm.repair_chain import TurnLimits


@dataclass(frozen=True)
class EvolveSettings:
    """Settings of a search, apart from its problems and its server.

    Attributes:
        seed: seed of the archive's draws, and of the draw of models with different weights.
        turns: most turns of a conversation, with the first question.
        repairs: most repairs in a row in a conversation; None: as many as ``turns`` allows.
        improvements: most improvements of proven kernels in a conversation; None: as many as ``turns`` allows.
        nearest: most kernels of near problems, and most lessons, in a first prompt; 0: none.
    """

    shape: ArchiveShape = ArchiveShape()
    seed: int = 0
    turns: int = 4
    parallel: int = 4
    kinds: tuple[str, ...] = (CODE, CONFIG)
    max_tokens: int = 16384
    repairs: int | None = None
    improvements: int | None = None
    nearest: int = 3

    @property
    def limits(self) -> TurnLimits:
        return TurnLimits(self.turns, self.repairs, self.improvements)
