"""Both ends of a sandbox's pipe in this process: what a worker sends, and whom a loss is blamed on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outblas.core.errors import DeviceError
from outblas.core.evaluation import Status
from outblas.core.phase_times import PhaseTotals
from outblas.judge.faults import ContextLost
from outblas.workers import sandbox
from outblas.workers.sandbox import Sandbox, WorkerLoss, make_from_name, serve_sandbox


class Pipe:
    """A worker's end: gives messages, then closes; keeps what is sent."""

    def __init__(self, *messages):
        self.messages, self.sent = list(messages), []

    def recv(self):
        if not self.messages:
            raise EOFError
        return self.messages.pop(0)

    def send(self, message):
        self.sent.append(message)


def doubling(times):
    def handler(items, emit):
        for index, item in items:
            emit.begin(index)
            if isinstance(item, Exception):
                raise item
            emit.done(index, item * times)

    return handler


TURN = (f"{__name__}:doubling", (3,))


def served(*messages, **keys):
    pipe = Pipe(*messages)
    serve_sandbox(pipe, **keys)
    return pipe.sent


def test_a_worker_serves_batches_until_the_pipe_closes():
    sent = served(TURN, [(0, 1), (1, 2)], [(0, 5)])
    assert [message[0] for message in sent] == [
        "ready",
        "begin",
        "done",
        "begin",
        "done",
        "end",
        "begin",
        "done",
        "end",
    ]
    assert [message[1:] for message in sent if message[0] == "done"] == [(0, 3), (1, 6), (0, 15)]
    assert sent[0][1] == sent[-1][1] == PhaseTotals()
    assert served() == [] and [message[0] for message in served(TURN)] == ["ready"]


def test_a_factory_that_fails_is_reported_and_serves_nothing():
    ((kind, words),) = served(("math:sqrt", (-1.0,)), [(0, 1)])
    assert kind == "error" and words.startswith("ValueError: ")


def test_an_error_of_the_handler_ends_the_worker():
    sent = served(TURN, [(0, RuntimeError("odd")), (1, 1)], [(0, 1)])
    assert sent[1:] == [("begin", 0), ("error", "RuntimeError: odd")]


def test_a_lost_context_ends_the_process_after_a_word(monkeypatch):
    ended = []

    def leave(code):
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr(sandbox.os, "_exit", leave)
    pipe = Pipe(TURN, [(0, ContextLost("ILLEGAL_ADDRESS"))], [(0, 1)])
    with pytest.raises(SystemExit):
        serve_sandbox(pipe)
    assert pipe.sent[-1] == ("fault", "ILLEGAL_ADDRESS") and ended == [1]


def test_a_worker_is_prepared_before_its_turn_and_its_error_waits(monkeypatch):
    order = []
    monkeypatch.setattr(sandbox, "close_inherited", lambda connection: order.append("closed"))
    monkeypatch.setattr(sandbox, "PlainConnection", lambda connection, codec: order.append(codec) or connection)
    prepared = []
    monkeypatch.setattr("support.free_workers.prepare", lambda: order.append("prepared") or prepared.append(1) or 1 / 0)
    sent = served(TURN, [(0, 1)], codec="a codec", prepare="support.free_workers:prepare")
    assert order == ["closed", "prepared", "a codec"] and sent[2] == ("done", 0, 3)


def test_names_are_of_a_module_and_its_function():
    assert make_from_name("math:sqrt", (4.0,)) == 2.0
    assert sandbox.factory_name(doubling) == f"{__name__}:doubling"


class Child:
    """A process whose words are listed; a number is a silence, an exception is raised."""

    pid = 7

    def __init__(self, *words, code=0):
        self.words, self.code = [("ready", PhaseTotals()), *words], code
        self.given, self.ended, self.connection, self.alive = [], [], self, True

    def send(self, message):
        self.given.append(message)

    def poll(self, seconds=0.0):
        return not (self.words and isinstance(self.words[0], float))

    def recv(self):
        if not self.words:
            raise EOFError
        word = self.words.pop(0)
        if isinstance(word, Exception):
            raise word
        return word

    def is_alive(self):
        return self.alive

    def exit_code(self):
        return self.code

    def kill(self):
        self.ended.append("killed")

    def end(self, kill):
        self.ended.append(kill)


def box_of(*children, **keys):
    waiting = list(children)
    return Sandbox("module:factory", (1,), keys.pop("step_s", 0.01), 0.01, spawn=lambda: waiting.pop(0), **keys)


def test_a_worker_gets_its_turn_then_the_batch_and_stays():
    child = Child(("begin", 0), ("done", 0, "a"), ("done", 1, "b"), ("end", PhaseTotals({"x": 1.0}, {})))
    with box_of(child) as box:
        assert list(box.run(["p", "q"])) == [(0, "a"), (1, "b")] and box.pid == 7 and box.lost == 0
        assert child.given == [("module:factory", (1,)), [(0, "p"), (1, "q")]]
        assert box.account.seconds == {"x": 1.0}
    assert child.ended == [False] and box.pid is None and box.account.seconds == {"x": 1.0}


@pytest.mark.parametrize(
    ("words", "code", "status", "detail"),
    [
        ((), 3, Status.EXITED, "the worker ended with exit code 3"),
        ((), None, Status.EXITED, "the worker closed its pipe and kept running"),
        ((), -11, Status.FAULT, "the worker died of SIGSEGV"),
        ((), -6, Status.FAULT, "the worker died of SIGABRT"),
        ((), -9, Status.EXITED, "the worker ended with exit code -9"),
        ((OSError(),), 0, Status.EXITED, "the worker ended with exit code 0"),
        ((("fault", "ILLEGAL"),), 0, Status.FAULT, "ILLEGAL"),
        ((0.5,), 0, Status.HANG, "no answer within 0.01 s"),
    ],
)
def test_a_loss_is_blamed_on_the_item_that_was_begun_last(words, code, status, detail):
    end = ("end", PhaseTotals())
    first = Child(("begin", 0), ("done", 0, "a"), ("begin", 1), *words, code=code)
    second = Child(("done", 2, "c"), end)
    with box_of(first, second) as box:
        assert list(box.run(["p", "q", "r"])) == [(0, "a"), (1, WorkerLoss(status, detail)), (2, "c")]
        assert second.given[1] == [(2, "r")]
        assert box.lost == 1 and first.ended == [True]


def test_an_item_that_is_left_unanswered_is_blamed_and_the_worker_stays():
    end = ("end", PhaseTotals())
    child = Child(("done", 1, "b"), end, ("done", 2, "c"), end)
    with box_of(child) as box:
        found = list(box.run(["p", "q", "r"]))
        assert found == [(1, "b"), (0, WorkerLoss(Status.EXITED, "the worker did not answer")), (2, "c")]
        assert child.given[2:] == [[(2, "r")]] and box.lost == 0


def test_a_loss_without_blame_sends_each_item_alone():
    end = ("end", PhaseTotals())
    first = Child(("begin", 0), ("done", 0, "a"), ("begin", None), code=5)
    alone = [Child(("done", 1, "b"), end, ("begin", 2)), Child(("done", 3, "d"), end)]
    alone[0].code = 6
    with box_of(first, *alone) as box:
        found = list(box.run(["p", "q", "r", "s"]))
        assert alone[0].given[1:] == [[(1, "q")], [(2, "r")]] and alone[1].given[1:] == [[(3, "s")]]
    assert found == [(0, "a"), (1, "b"), (2, WorkerLoss(Status.EXITED, "the worker ended with exit code 6")), (3, "d")]
    assert box.lost == 2


def test_an_item_that_is_done_is_not_blamed():
    first = Child(("begin", 0), ("done", 0, "a"), code=5)
    second = Child(("done", 1, "b"), ("end", PhaseTotals()))
    with box_of(first, second) as box:
        assert list(box.run(["p", "q"])) == [
            (0, "a"),
            (1, WorkerLoss(Status.EXITED, "the worker ended with exit code 5")),
        ]


def test_an_error_of_the_evaluator_is_raised_and_of_a_stranger_is_a_loss(monkeypatch):
    with (
        box_of(Child(("begin", 0), ("error", "ValueError: x"))) as box,
        pytest.raises(DeviceError, match="failed: ValueError: x"),
    ):
        list(box.run(["p"]))
    monkeypatch.setattr(sandbox, "receive", lambda connection, codec, left: connection.recv())
    child = Child(("begin", 0), ("error", "ValueError: x"))
    with box_of(child, codec="codec", step_s=20.0) as box:
        assert list(box.run(["p"])) == [(0, WorkerLoss(Status.EXITED, "the worker failed: ValueError: x"))]
    child = Child(("done", 0, 1), ("end",))
    with box_of(child, codec="codec", step_s=20.0) as box:
        assert list(box.run(["p"])) == [(0, 1)] and box.account == PhaseTotals()
    assert child.ended == [True], "it gets no time to say goodbye"


def test_a_batch_has_a_limit_despite_words(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(sandbox.time, "monotonic", lambda: now[0])

    class Talking(Child):
        def recv(self):
            now[0] += 1.0
            return self.words.pop(0) if len(self.words) > 1 else ("begin", 0)

    with box_of(Talking(("begin", 0), ("begin", 0)), batch_timeout_s=3.0) as box:
        assert list(box.run(["p"])) == [(0, WorkerLoss(Status.HANG, "the batch did not finish within 3 s"))]
        assert now[0] == 105.0, "one word more than three seconds"


def test_a_worker_over_its_limits_is_lost():
    looks = []
    limits = SimpleNamespace(why_over=lambda pid: looks.append(pid) or ("it filled all" if len(looks) > 1 else ""))
    child = Child(("begin", 0), ("begin", 0))
    with box_of(child, limits=limits) as box:
        box._look = 0.0
        found = box._silent(child, None)
        assert found is None and looks == [7]
        assert box._silent(child, None) is None and looks == [7], "a second has not passed"
        box._look = 0.0
        assert box._silent(child, None) == WorkerLoss(Status.FAULT, "it filled all")


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (("error", "DeviceError: no GPU"), "cannot start: DeviceError: no GPU"),
        (("begin", 0), "cannot start: 0"),
        (("odd",), "cannot start: its first message was 'odd'"),
        (0.5, "cannot start: it did not start within 0.01 s"),
        (EOFError(), "cannot start: it ended with exit code 4"),
    ],
)
def test_a_worker_whose_first_word_is_not_ready_cannot_start(first, words):
    child = Child(code=4)
    child.words = [first]
    box = box_of(child)
    with pytest.raises(DeviceError, match=words):
        box.start()
    assert child.ended == [True] and box.pid is None and box.lost == 0


def test_a_worker_that_died_between_batches_is_replaced_and_counted():
    end = ("end", PhaseTotals())
    first, second = Child(("done", 0, 1), end), Child(("done", 0, 2), end)
    with box_of(first, second) as box:
        assert list(box.run(["p"])) == [(0, 1)]
        first.alive = False
        assert list(box.run(["p"])) == [(0, 2)] and box.lost == 1 and first.ended == [True]
