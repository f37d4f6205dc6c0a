"""Known facts of problems near the one of a prompt: kernels with their speeds, and lessons.

Three places are searched: the packaged library's tuned kernels, the archive of the run, and the journal. Distance is
that of the problems' features: dtype, layout, accumulator, regime and extents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outblas.core.config import config_to_json
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, regime
from outblas.kernels.legality import why_illegal
from outblas.predict.extents import problem_distance
from outblas.records.library import Library
from outblas_lab.llm.answer import CODE, CONFIG
from outblas_lab.llm.archive import Archive
from outblas_lab.llm.feedback import clipped
from outblas_lab.llm.journal_lessons import MAX_DISTANCE, nearest_lessons
from outblas_lab.llm.prompt import near_section, shown_kernel

#: Approximate limits on the characters of the section, of one kernel and of one lesson.
SECTION_CHARS, _KERNEL_CHARS, _LESSON_CHARS = 12_000, 5_000, 1_500
#: What another regime adds to the distance, in powers of two.
_OTHER_REGIME = 1.0


@dataclass(frozen=True)
class NearKernel:
    """A proven kernel of a near problem.

    Attributes:
        words: its speed and its origin.
        distance: distance of the problems, see :func:`feature_distance`.
    """

    problem: Problem
    candidate: dict[str, Any]
    words: str
    distance: tuple[int, float]


def feature_distance(one: Problem, other: Problem, gpu: Gpu) -> tuple[int, float]:
    """Return how far apart two problems are for a kernel's author.

    The first number counts differences of layout, dtype and accumulator. The second is the sum of |log2| of the ratios
    of extents, and 1 more if the problems are of different regimes. Equal problems give (0, 0.0).
    """
    types, apart = problem_distance(one, other)
    return types, apart + (0.0 if regime(one, gpu) == regime(other, gpu) else _OTHER_REGIME)


class NearProblems:
    """Find the kernels and lessons of near problems, and write them as a section of a prompt.

    Args:
        gpu: GPU of the requested kernels; its packaged library is read.
        most: most kernels, and most lessons, of a section; 0: every section is empty.
    """

    def __init__(self, gpu: Gpu, most: int) -> None:
        self._gpu, self._most = gpu, most

    @cached_property
    def _library(self) -> Library:
        return Library.packaged(self._gpu.name, missing_ok=True)

    def text(self, problem: Problem, archive: Archive, kinds: Sequence[str] = (CODE, CONFIG)) -> str:
        """Return the section, at most about :data:`SECTION_CHARS` characters long; "" if nothing is near.

        Args:
            archive: archive of the run. Its kernels of the problem itself are left out: a prompt shows them apart.
            kinds: kinds of answers that are asked for: without ``config`` the library's knobs are left out, without
                ``code`` free kernels.
        """
        if self._most == 0:
            return ""
        shown: list[str] = []
        for part in self._parts(problem, archive, kinds):
            if sum(map(len, shown)) + len(part) <= SECTION_CHARS:
                shown.append(part)
        return near_section("\n".join(shown)) if shown else ""

    def kernels(self, problem: Problem, archive: Archive, kinds: Sequence[str] = (CODE, CONFIG)) -> list[NearKernel]:
        """Return the nearest kernels, the nearest first, at most the number of the constructor.

        The arguments are those of :meth:`text`.
        """
        found = [*self._archived(problem, archive, kinds), *(self._tuned(problem) if CONFIG in kinds else ())]
        different: dict[str, NearKernel] = {}
        for kernel in sorted((k for k in found if k.distance[1] <= MAX_DISTANCE), key=lambda k: k.distance):
            different.setdefault(str(kernel.candidate), kernel)
        return list(different.values())[: self._most]

    def _parts(self, problem: Problem, archive: Archive, kinds: Sequence[str]) -> Iterator[str]:
        for kernel in self.kernels(problem, archive, kinds):
            yield shown_kernel(f"{kernel.problem.key}: {kernel.words}", kernel.candidate, most=_KERNEL_CHARS)
        for lesson in nearest_lessons(problem, self._most):
            yield f"Journal {lesson.number}, {lesson.title}\n{clipped(lesson.text, _LESSON_CHARS)}\n"

    def _archived(self, problem: Problem, archive: Archive, kinds: Sequence[str]) -> Iterator[NearKernel]:
        for key in dict.fromkeys(entry.problem for entry in archive.entries):
            best, other = archive.best(key), Problem.from_key(key)
            if best is None or other == problem:
                continue
            if (CODE if best.candidate.get("family") == "free" else CONFIG) not in kinds:
                continue
            words = f"{best.us:.2f} us, {math.exp(best.score):.3f}x of the fastest baseline at least (this run)"
            yield NearKernel(other, best.candidate, words, feature_distance(problem, other, self._gpu))

    def _tuned(self, problem: Problem) -> Iterator[NearKernel]:
        """Yield tuned kernels of the library that are legal on the problem, too."""
        rows = [(feature_distance(problem, row.problem, self._gpu), row) for row in self._library.rows if row.plain]
        for distance, row in sorted(rows, key=lambda pair: pair[0])[: 4 * self._most]:
            assert row.plain is not None
            if why_illegal(problem, row.plain.config, self._gpu) is None:
                words = f"{row.plain.low:.3f}x of the fastest baseline ({row.baseline}) at least (tuned library)"
                yield NearKernel(row.problem, config_to_json(row.plain.config), words, distance)
