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
        problem: key of the problem.
        island: number of the island, from 0.
        name: the candidate's name; equal kernels have equal names.
        candidate: the candidate as JSON values.
        score: natural logarithm of the lower bound of the speed-up.
        us: median time, microseconds.
        question: number of the question that it answered.
        origin: ``insert``, or ``migrate`` for a copy.
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
        islands: number of separate populations of a problem, which are numbered from 0.
        width: width of a speed bucket, in natural log of the speed-up.
        temperature: temperature of the draw of buckets, in the same unit; less is greedier.
        migrate_every: number of kernels inserted for a problem from one migration to the next.
    """

    islands: int = 3
    width: float = 0.1
    temperature: float = 0.2
    migrate_every: int = 8


class Archive:
    """The proven kernels of all problems, by island and speed bucket. It is in memory only.

    Args:
        entries: first entries, migrants included. They are taken as they are, and cause no migration.
    """

    def __init__(self, shape: ArchiveShape, seed: int = 0, entries: Iterable[Entry] = ()) -> None:
        self.shape, self.seed = shape, seed
        self.entries: list[Entry] = list(entries)

    def insert(self, entry: Entry) -> list[Entry]:
        """Add a kernel, unless its problem has a kernel of that name on some island.

        A migration is due at every ``migrate_every``-th kernel that is inserted for a problem. The best kernel of each
        island is then copied to the next island, and from the last to the first. A kernel whose name the next island
        has is not copied.

        Returns:
            The added entries, in order: the kernel's own, then the migrants. Empty if nothing was added.
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
        """Return a list of a problem's entries in the order of their insertion; empty for an unknown problem.

        Args:
            island: number of the island; None: all.
        """
        return [e for e in self.entries if e.problem == problem and island in (None, e.island)]

    def best(self, problem: str) -> Entry | None:
        """Return a problem's first entry with the highest score, on any island; None if it has no entry."""
        return max(self.of(problem), key=lambda e: e.score, default=None)

    def draw(self, problem: str, island: int, number: int) -> tuple[Entry, ...]:
        """Draw a contrastive pair: two buckets by a softmax over their best scores, and one kernel of each.

        Args:
            number: number of the draw. The same number, entries and seed of the archive give the same draw.

        Returns:
            Two entries, the slower first; one entry if the island has a single bucket; ``()`` if it is empty.
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
        """Return the number of the speed bucket of a score: score / width, rounded down.

        Example: with width 0.1, scores from 0 to below 0.1 are in bucket 0, and -0.05 is in bucket -1.
        """
        return math.floor(score / self.shape.width)

    def table(self, problem: str) -> dict[int, Counter[int]]:
        """Return island -> speed bucket (see :meth:`bucket`) -> number of a problem's kernels there.

        Every island of the shape is a key, those without kernels with an empty Counter. Copies count on their island,
        too. Example: one kernel of score 0.05 on island 0 gives ``{0: Counter({0: 1}), 1: Counter(), 2: Counter()}``.
        """
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
