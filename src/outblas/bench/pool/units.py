"""The units of one batch: drawn as they are wanted, compiled ahead, handed out, put back when a worker is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import groupby

from outblas.bench.pool.compile_queue import CompileQueue
from outblas.bench.pool.transport import Pair
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import work_us
from outblas.kernels.source import KernelKind, kernel_kind

#: Units of other workers' problems that wait, above which one is taken even though units of its own may come.
_PLENTY = 4


@dataclass
class WorkUnit:
    """The pairs of one problem that are not answered yet.

    Attributes:
        problem: the problem.
        pairs: the pairs.
        lost_by: numbers of the workers that were lost with it, in order.
    """

    problem: Problem
    pairs: list[Pair]
    lost_by: list[int] = field(default_factory=list)


class WorkUnits:
    """The units that wait for a worker, in no promised order.

    Args:
        pairs: consecutive pairs of one problem form a unit. A generator may be slow (an agent thinks about the next
            pair); it is drawn from while workers are busy.
        compiling: compiles a unit's kernels before the unit is handed out; None: workers compile.
        homes: problem -> the worker that had it before, kept by the caller from batch to batch. That worker has already
            chosen cuBLASLt's algorithm, which takes as long as half a unit.
    """

    def __init__(
        self,
        pairs: Iterable[Pair],
        compiling: CompileQueue | None = None,
        homes: MutableMapping[Problem, int] | None = None,
    ) -> None:
        self._source: Iterator[WorkUnit] = (
            WorkUnit(p, list(group)) for p, group in groupby(pairs, key=lambda pair: pair[0])
        )
        self._compiling = compiling
        self._homes = {} if homes is None else homes
        self._waiting: list[WorkUnit] = []
        self._drawn = False

    def draw(self) -> bool:
        """Draw one more unit from ``pairs``; return False if none was left."""
        unit = None if self._drawn else next(self._source, None)
        if unit is None:
            self._drawn = True
        elif self._compiling is None:
            self._waiting.append(unit)
        else:
            self._compiling.put(unit)
        return unit is not None

    @property
    def pending(self) -> bool:
        """Return True if units are left that may be handed out now or later, apart from those not drawn yet."""
        return bool(self._waiting) or self.compiling

    @property
    def compiling(self) -> bool:
        return self._compiling is not None and self._compiling.pending

    def take(
        self, worker: int, others: Iterable[int], elsewhere: Collection[KernelKind] = frozenset()
    ) -> WorkUnit | None:
        """Choose and remove the next unit for ``worker``; None if it can have none now.

        Candidates are the units of problems that ``worker`` has had, or that no worker has had. If it has none, or many
        other units wait, all units are candidates. Units with few kernels of ``elsewhere`` come first, because this
        worker would have to load, and perhaps prove, them again. Among those the unit with the most work wins, so that
        no long unit starts last.

        A unit that has cost ``worker`` is left to ``others``, if one of them was not lost by it yet.

        Args:
            worker: number of the worker.
            others: the other workers that are not given up.
            elsewhere: kernels that other workers have loaded.
        """
        if self._compiling is not None:
            self._waiting += self._compiling.done()
        others = set(others)
        allowed = [unit for unit in self._waiting if worker not in unit.lost_by or not others - set(unit.lost_by)]
        mine = [unit for unit in allowed if self._homes.get(unit.problem, worker) not in others]
        if not mine and (len(allowed) > _PLENTY or (self._drawn and not self.compiling)):
            mine = allowed
        if not mine:
            return None

        def rank(unit: WorkUnit) -> tuple[float, ...]:
            twice = sum(kernel_kind(*pair) in elsewhere for pair in unit.pairs) if elsewhere else 0
            return len(unit.lost_by), -twice, work_us(unit.problem, reference_gpu()) * len(unit.pairs)

        unit = max(mine, key=rank)
        self._waiting.remove(unit)
        if self._homes.get(unit.problem) not in others:
            self._homes[unit.problem] = worker
        return unit

    def put_back(self, unit: WorkUnit) -> None:
        """Put back the unit of a lost worker. Of the units that a worker may have, :meth:`take` prefers these."""
        self._waiting.append(unit)
