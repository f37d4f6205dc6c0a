from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from outblas.core.config import Candidate
from outblas.core.errors import DeviceError, RecordError, ToolchainMissing, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator
from outblas.core.problem import Problem
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.async_evaluator import AsyncEvaluator
from support.llm_kernels import PROBLEM, failed, kernel, passed


class Scripted(Evaluator):
    """Answers when it is let; remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.let = threading.Event()
        self.let.set()

    def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        listed = list(pairs)
        self.batches.append([c.text for _, c in listed if isinstance(c, FreeKernel)])
        assert self.let.wait(20)
        for problem, candidate in listed:
            assert isinstance(candidate, FreeKernel)
            yield passed(candidate, 3.0, problem)


def test_what_waits_meanwhile_is_one_batch_ordered_by_problem() -> None:
    evaluator, recorded = Scripted(), list[Evaluation]()
    other = Problem(64, 64, 64)

    async def run() -> None:
        evaluator_queue = AsyncEvaluator(evaluator, recorded.append)
        evaluator.let.clear()
        first = asyncio.ensure_future(evaluator_queue.evaluate(PROBLEM, kernel(0)))
        while not evaluator.batches:
            await asyncio.sleep(0.01)
        rest = [(PROBLEM, kernel(1)), (other, kernel(2)), (PROBLEM, kernel(3)), (PROBLEM, kernel(1))]
        waiting = [asyncio.ensure_future(evaluator_queue.evaluate(*pair)) for pair in rest]
        await asyncio.sleep(0.05)
        assert evaluator_queue.under_way == 4  # the same pair once
        evaluator.let.set()
        answers = await asyncio.gather(first, *waiting)
        assert [(e.problem, e.config) for e in answers] == [(PROBLEM, kernel(0)), *rest]
        assert (await evaluator_queue.evaluate(PROBLEM, kernel(0))) is answers[0]
        evaluator_queue.close()

    asyncio.run(run())
    assert [len(batch) for batch in evaluator.batches] == [1, 3]
    assert set(evaluator.batches[1][:2]) == {kernel(1).text, kernel(3).text}
    assert len(recorded) == 4


def test_what_is_known_is_not_asked_for() -> None:
    known = failed(kernel(1), Status.WRONG, "why")

    async def run() -> None:
        evaluator_queue = AsyncEvaluator(Scripted(), lambda evaluation: pytest.fail("recorded again"), [known])
        assert await evaluator_queue.evaluate(PROBLEM, kernel(1)) is known
        evaluator_queue.close()

    asyncio.run(run())


def test_a_missing_tool_fails_those_who_need_it_only() -> None:
    class Without(Scripted):
        def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
            for one in super().evaluate(pairs):
                if one.config == kernel(2):
                    raise ToolchainMissing("nvcc is missing", "nvcc", "pip install it")
                yield one

    async def run() -> None:
        evaluator = Without()
        evaluator_queue = AsyncEvaluator(evaluator, lambda evaluation: None)
        evaluator.let.clear()
        first = asyncio.ensure_future(evaluator_queue.evaluate(PROBLEM, kernel(0)))
        while not evaluator.batches:
            await asyncio.sleep(0.01)
        rest = [asyncio.ensure_future(evaluator_queue.evaluate(PROBLEM, kernel(i))) for i in (1, 2, 3)]
        await asyncio.sleep(0.05)
        evaluator.let.set()
        answers = await asyncio.gather(first, *rest, return_exceptions=True)
        assert [isinstance(a, ToolchainMissing) for a in answers] == [False, False, True, False]
        evaluator_queue.close()

    asyncio.run(run())


def test_errors_reach_those_who_wait_and_only_them() -> None:
    class Half(Scripted):
        def evaluate(self, pairs: Iterable[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
            (problem, candidate), *_ = pairs
            assert isinstance(candidate, FreeKernel)
            if candidate == kernel(0):
                yield passed(candidate, 3.0)
            elif candidate == kernel(1):
                raise DeviceError("gone", "a GPU", "look")

    def full(evaluation: Evaluation) -> None:
        raise RecordError("the disk is full", "space", "free some")

    async def run() -> None:
        evaluator_queue = AsyncEvaluator(Half(), lambda evaluation: None)
        assert (await evaluator_queue.evaluate(PROBLEM, kernel(0))).status is Status.PASSED
        with pytest.raises(DeviceError, match="gone"):
            await evaluator_queue.evaluate(PROBLEM, kernel(1))
        with pytest.raises(DeviceError, match="skipped a candidate"):
            await evaluator_queue.evaluate(PROBLEM, kernel(2))
        assert (await evaluator_queue.call(lambda: 7)) == 7
        with pytest.raises(ZeroDivisionError):
            await evaluator_queue.call(lambda: 1 // 0)
        evaluator_queue.close()
        unwritten = AsyncEvaluator(Half(), full)
        with pytest.raises(RecordError):  # nobody acts on what is not on record
            await unwritten.evaluate(PROBLEM, kernel(0))
        unwritten.close()

    asyncio.run(run())


def test_after_the_end_only_what_is_known_or_under_way_is_answered() -> None:
    async def run() -> None:
        evaluator = Scripted()
        evaluator_queue = AsyncEvaluator(evaluator, lambda evaluation: None)
        known = await evaluator_queue.evaluate(PROBLEM, kernel(0))
        evaluator.let.clear()
        waiting = asyncio.ensure_future(evaluator_queue.evaluate(PROBLEM, kernel(1)))
        await asyncio.sleep(0)
        evaluator_queue.close()
        evaluator_queue.close()
        for question in (evaluator_queue.evaluate(PROBLEM, kernel(2)), evaluator_queue.call(lambda: 7)):
            with pytest.raises(UsageError, match="the evaluator is closed"):
                await asyncio.wait_for(question, 20)
        assert await evaluator_queue.evaluate(PROBLEM, kernel(0)) is known and evaluator_queue.under_way == 1
        also = asyncio.ensure_future(evaluator_queue.evaluate(PROBLEM, kernel(1)))
        await asyncio.sleep(0)
        evaluator.let.set()
        assert await waiting is await also

    asyncio.run(run())


def test_a_pool_takes_what_is_asked_for_meanwhile_and_calls_wait_for_it() -> None:
    """The first answer is held until the second is there, which a batch of its own could never give."""

    class Pool:
        draws_while_busy = True

        def __init__(self) -> None:
            self.calls = 0

        def evaluate(self, pairs: Iterable[tuple[Problem, Candidate] | None]) -> Iterator[Evaluation]:
            self.calls += 1
            held: list[tuple[Problem, Candidate]] = []
            for pair in pairs:
                if pair is None:
                    time.sleep(0.001)
                    continue
                held.append(pair)
                if len(held) == 2:
                    for problem, candidate in reversed(held):
                        assert isinstance(candidate, FreeKernel)
                        yield passed(candidate, 3.0, problem)
                    held.clear()
            assert not held, "it ended before all were answered"

    pool, recorded = Pool(), list[Evaluation]()

    async def run() -> None:
        evaluator_queue = AsyncEvaluator(pool, recorded.append)
        first = asyncio.ensure_future(evaluator_queue.evaluate(PROBLEM, kernel(0)))
        while not pool.calls:
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(evaluator_queue.evaluate(PROBLEM, kernel(1)))
        assert [e.config for e in await asyncio.gather(first, second)] == [kernel(0), kernel(1)]
        assert await evaluator_queue.call(lambda: len(recorded)) == 2
        evaluator_queue.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [e.config for e in recorded] == [kernel(1), kernel(0)]


def test_a_call_ends_the_drawing_of_a_pool_and_comes_after_its_pairs() -> None:
    events: list[str] = []

    class Pool:
        draws_while_busy = True

        def evaluate(self, pairs: Iterable[tuple[Problem, Candidate] | None]) -> Iterator[Evaluation]:
            (problem, candidate), *rest = [pair for pair in self._until_the_end(pairs) if pair is not None]
            assert not rest and isinstance(candidate, FreeKernel)
            events.append("answered")
            yield passed(candidate, 3.0, problem)

        def _until_the_end(self, pairs: Iterable[Any]) -> Iterator[Any]:
            for pair in pairs:
                events.append("drawn")
                yield pair
                time.sleep(0.001)

    async def run() -> None:
        evaluator_queue = AsyncEvaluator(Pool(), lambda evaluation: None)
        answered = asyncio.ensure_future(evaluator_queue.evaluate(PROBLEM, kernel(0)))
        while not events:
            await asyncio.sleep(0.01)
        await evaluator_queue.call(lambda: events.append("called"))
        assert (await answered).config == kernel(0)
        evaluator_queue.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert [event for event in events if event != "drawn"] == ["answered", "called"]
