"""The archive of proven kernels: islands of kernels by speed, from which the next question shows a pair.

An archive is a pure function of its insertions, in order. A draw comes from a generator of the seed and the draw's
number alone. An archive that is read back from a record therefore draws as the first one would have.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A proven kernel on one island of one problem.

    Attributes:
        problem: key of the problem. name: the candidate's, the same for equal kernels. candidate: its JSON.
        score: log of the lower bound of the speed-up. us: median time, microseconds.
        question: number of the question that it answered. origin: ``insert``, or ``migrate`` for a copy.
    """

    problem: str
    island: int
    name: str
    candidate: dict[str, Any]
    score: float
    us: float
    question: int
    origin: str = "insert"


@dataclass(frozen=True)
class ArchiveShape:
    """Settings of an archive.

    Attributes:
        islands: separate populations of a problem. width: of a speed bucket, in log speed-up.
        temperature: of the draw of buckets, in log speed-up; less is greedier.
        migrate_every: kernels inserted for a problem between two migrations.
    """

    islands: int = 3
    width: float = 0.1
    temperature: float = 0.2
    migrate_every: int = 8


class Archive:
    """Islands x speed buckets of entries, for every problem."""

    def __init__(self, shape: ArchiveShape, seed: int = 0, entries: Iterable[Entry] = ()) -> None:
        self.shape, self.seed = shape, seed
        self.entries: list[Entry] = list(entries)

    def insert(self, entry: Entry) -> list[Entry]:
        """Add a kernel, unless the problem has it already on some island.

        Returns:
            The added entries, in order: the kernel's own, then migrants if a migration is due. Empty if nothing was
            added.
        """
        mine = self.of(entry.problem)
        if any(e.name == entry.name for e in mine):
            return []
        added = [entry]
        if (1 + sum(e.origin == "insert" for e in mine)) % self.shape.migrate_every == 0:
            added += self._migrants([*mine, entry])
        self.entries += added
        return added

    def of(self, problem: str, island: int | None = None) -> list[Entry]:
        """A problem's entries, of one island or all, in the order of their insertion."""
        return [e for e in self.entries if e.problem == problem and island in (None, e.island)]

    def best(self, problem: str) -> Entry | None:
        """The highest score of a problem; the first of equal ones."""
        return max(self.of(problem), key=lambda e: e.score, default=None)

    def draw(self, problem: str, island: int, number: int) -> tuple[Entry, ...]:
        """Draw a contrastive pair: two buckets by a softmax over their best scores, and one kernel of each.

        Args:
            number: number of the draw; the same number gives the same draw.

        Returns:
            Two entries, the slower first; one entry if the island has a single bucket; none if it is empty.
        """
        rng = random.Random(f"{self.seed}/{problem}/{island}/{number}")
        buckets: dict[int, list[Entry]] = {}
        for entry in self.of(problem, island):
            buckets.setdefault(self.bucket(entry.score), []).append(entry)
        drawn: list[Entry] = []
        left = sorted(buckets)
        while left and len(drawn) < 2:
            best = [max(e.score for e in buckets[b]) for b in left]
            weights = [math.exp((score - max(best)) / self.shape.temperature) for score in best]
            bucket = rng.choices(left, weights)[0]
            left.remove(bucket)
            drawn.append(rng.choice(buckets[bucket]))
        return tuple(sorted(drawn, key=lambda e: e.score))

    def bucket(self, score: float) -> int:
        """Of a speed-up of 1 and a little more: 0."""
        return math.floor(score / self.shape.width)

    def table(self, problem: str) -> dict[int, Counter[int]]:
        """Island -> bucket -> kernels."""
        islands = range(self.shape.islands)
        return {i: Counter(self.bucket(e.score) for e in self.of(problem, i)) for i in islands}

    def _migrants(self, mine: list[Entry]) -> list[Entry]:
        """The best of every island goes to the next one, unless that has it."""
        migrants = []
        for island in range(self.shape.islands):
            best = max((e for e in mine if e.island == island), key=lambda e: e.score, default=None)
            to = (island + 1) % self.shape.islands
            if best is not None and all(e.name != best.name for e in mine if e.island == to):
                migrants.append(replace(best, island=to, origin="migrate"))
        return migrants
