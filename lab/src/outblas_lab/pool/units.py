"""The units of one batch: drawn as they are wanted, compiled ahead, handed out, put back when a worker is lost."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from outblas.core.config import KernelConfig, KernelKind, kernel_kind
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import work_us
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.jailed_evaluator import FreeOptions
from outblas_lab.pool.transport import Pair

#: Units of other workers' problems that wait, above which one is taken even though units of its own may come.
_PLENTY = 4


@dataclass
class WorkUnit:
    """The pairs of one problem that are not answered yet.

    Attributes:
        form: form of the free kernels, ``device`` or ``host``; "" for configs of templates.
        lost_by: numbers of the workers that were lost with it, in order.
    """

    problem: Problem
    pairs: list[Pair]
    form: str = ""
    lost_by: list[int] = field(default_factory=list)

    @property
    def kinds(self) -> set[KernelKind]:
        """Return the kinds of its template kernels. A free kernel has none: each worker proves it anew."""
        return {kernel_kind(problem, config) for problem, config in self.pairs if isinstance(config, KernelConfig)}

    @property
    def silence_s(self) -> float:
        """Return the seconds that its free kernels may take without an answer, by the limits of the jail."""
        return FreeOptions.candidate_s * len(self.pairs) if self.form else 0.0


class WorkUnits:
    """The units that wait for a worker, in no promised order.

    Consecutive configs of one problem form a unit. Its free kernels form others, each of one form. Such a unit has at
    most a batch of the jail, and no more than an even share of the workers.

    Args:
        pairs: the pairs. A generator may be slow (an agent thinks about the next pair); it is drawn from while workers
            are busy. None in place of a pair says that the next one is not known yet.
        compiling: compiles a unit's kernels before the unit is handed out; None: workers compile.
        homes: problem -> the worker that had it before, kept by the caller from batch to batch. That worker has already
            chosen cuBLASLt's algorithm, which takes as long as half a unit. Free kernels have no home, because each
            jailed worker begins anew.
        workers: number of workers that share the free kernels of a problem.
    """

    def __init__(
        self, pairs: Iterable[Pair | None], compiling: CompileQueue | None = None,
        homes: MutableMapping[Problem, int] | None = None, workers: int = 1,
    ) -> None:  # fmt: skip
        self._source = _groups(pairs)
        self._compiling, self._workers = compiling, workers
        self._homes = {} if homes is None else homes
        self._waiting: list[WorkUnit] = []
        self._drawn = False
        #: True if the last draw found that the next pair is not known yet.
        self.dry = False

    def draw(self) -> bool:
        """Draw the pairs of one more problem from ``pairs``; return False if none was left."""
        group = None if self._drawn else next(self._source, None)
        self._drawn, self.dry = group is None, group == []
        forms: dict[str, list[Pair]] = {}  # "" is the form of configs of templates
        for pair in group or ():
            forms.setdefault(pair[1].launch.form if isinstance(pair[1], FreeKernel) else "", []).append(pair)
        for form, same in forms.items():
            if form:
                self._share(same, form)
            elif self._compiling is None:
                self._waiting.append(WorkUnit(same[0][0], same))
            else:
                self._compiling.put(WorkUnit(same[0][0], same))
        return group is not None

    def _share(self, pairs: Sequence[Pair], form: str) -> None:
        """Share free kernels of one problem evenly among the workers, with those of the problem that wait already."""
        problem = pairs[0][0]
        alike = [unit for unit in self._waiting if (unit.problem, unit.form, unit.lost_by) == (problem, form, [])]
        self._waiting = [unit for unit in self._waiting if unit not in alike]
        pairs = [*(pair for unit in alike for pair in unit.pairs), *pairs]
        # The jail gives a kernel of form host a worker of its own.
        most = 1 if form == "host" else min(FreeOptions.batch, ceil(len(pairs) / self._workers))
        for start in range(0, len(pairs), most):
            self._waiting.append(WorkUnit(problem, list(pairs[start : start + most]), form))

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
            others: the other workers that are not given up.
        """
        if self._compiling is not None:
            self._waiting += self._compiling.done()
        others = set(others)
        allowed = [unit for unit in self._waiting if worker not in unit.lost_by or not others - set(unit.lost_by)]
        mine = [unit for unit in allowed if unit.form or self._homes.get(unit.problem, worker) not in others]
        if not mine and (len(allowed) > _PLENTY or (self._drawn and not self.compiling)):
            mine = allowed
        if not mine:
            return None

        def rank(unit: WorkUnit) -> tuple[float, ...]:
            twice = len(unit.kinds & set(elsewhere)) if elsewhere else 0
            return len(unit.lost_by), -twice, work_us(unit.problem, reference_gpu()) * len(unit.pairs)

        unit = max(mine, key=rank)
        self._waiting.remove(unit)
        if not unit.form and self._homes.get(unit.problem) not in others:
            self._homes[unit.problem] = worker
        return unit

    def put_back(self, unit: WorkUnit) -> None:
        """Put back the unit of a lost worker. Of the units that a worker may have, :meth:`take` prefers these."""
        self._waiting.append(unit)


def _groups(pairs: Iterable[Pair | None]) -> Iterator[list[Pair]]:
    """Yield consecutive pairs of one problem as one list; an empty list where the next pair is not known yet."""
    group: list[Pair] = []
    for pair in pairs:
        if group and (pair is None or pair[0] != group[0][0]):
            yield group
            group = []
        if pair is None:
            yield []
        else:
            group.append(pair)
    if group:
        yield group


#: Compiles the kernels of pairs into a cache; yields now and then.
Compile = Callable[[Sequence[Pair]], Iterator[object]]
#: Units compiled together at most: the first are wanted soon.
MAX_UNITS_TOGETHER = 8


class CompileQueue:
    """A queue that compiles the kernels of units in a background thread and gives the units back in their order."""

    def __init__(self, compile: Compile) -> None:
        self._compile = compile
        self._todo: queue.SimpleQueue[WorkUnit | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[WorkUnit | Exception] = queue.SimpleQueue()
        self._stop = threading.Event()
        #: Units put and not given back; of the driver's thread alone.
        self._inside = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def pending(self) -> bool:
        return self._inside > 0

    def put(self, unit: WorkUnit) -> None:
        self._inside += 1
        self._todo.put(unit)

    def done(self) -> list[WorkUnit]:
        """Return the units compiled since the last call.

        Raises:
            ToolchainMissing: NVRTC is not installed; or whatever else ended the thread.
        """
        found: list[WorkUnit] = []
        while not self._done.empty():
            item = self._done.get()
            if isinstance(item, Exception):
                raise item
            found.append(item)
        self._inside -= len(found)
        return found

    def close(self) -> None:
        """Cancel all waiting compilations; running ones finish in their processes."""
        self._stop.set()
        self._todo.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (unit := self._todo.get()) is not None and not self._stop.is_set():
            units = [unit]
            while len(units) < MAX_UNITS_TOGETHER and not self._todo.empty() and (more := self._todo.get()) is not None:
                units.append(more)
            try:
                for _ in self._compile([pair for one in units for pair in one.pairs]):
                    if self._stop.is_set():
                        return
            except Exception as error:  # the driver's to raise
                self._done.put(error)
                return
            for one in units:
                self._done.put(one)
            if self._stop.is_set():  # the None that ends the outer loop may have ended the inner one
                return
