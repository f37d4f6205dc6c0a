"""Shared parts of the gates: guards, inputs, one bound call for all experiments, and the blame of memory errors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from outblas.core.evaluation import GateFailed, Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import operands, proof_context  # noqa: E402
from outblas.judge.proof_context import ProofContext  # noqa: E402
from outblas.judge.proof_inputs import normal_inputs  # noqa: E402
from outblas.judge.trials import CachedTrials, ProofTrials  # noqa: E402

PROBLEM = Problem(3, 5, 8)


class Entry:
    """An entry whose calls run a given function on (A, B, C)."""

    def __init__(self, act=lambda a, b, c: c.fill_(1.0)):
        self.act, self.bound, self.streams = act, [], []

    def bind(self, problem, a, b, c):
        self.bound.append((problem, a, b, c))

        def call(stream):
            self.streams.append(stream)
            self.act(a, b, c)

        return call


def context(act=lambda a, b, c: c.fill_(1.0), problem=PROBLEM, trials=None):
    return ProofContext(Entry(act), problem, "cpu", trials or ProofTrials())


@pytest.mark.parametrize(
    ("n", "guard_bytes"),
    [
        (1, 65536),
        (127, 65536),
        (128, 65536),
        (129, 66048),
        (4096, 2**21),
        (16383, 2**23 - 512),
        (16384, 2**23),
        (16385, 2**23),
    ],
)
def test_guards_are_as_wide_as_256_rows_of_c_within_limits(n, guard_bytes):
    (a, b, _), (second, *_) = (data := context(problem=Problem(1, n, 1)).data)[0], data[1]
    words = guard_bytes // 2
    assert a.storage_offset() == words and b.storage_offset() == 2 * words + 128
    assert second.storage_offset() == a.storage_offset() + 3 * words + 128 + 2 * 128 * -(-n // 128)


def test_the_entry_is_bound_once_to_each_of_two_sets_with_inputs_of_their_own():
    made = context()
    assert (made.data.sets, made.cuda, made.stream, made.torch_stream, made.before) == (2, False, 0, None, {})
    assert len(made.calls) == len(made.entry.bound) == 2
    for index, (problem, a, b, c) in enumerate(made.entry.bound):
        assert problem is PROBLEM
        assert [t.data_ptr() for t in (a, b, c)] == [t.data_ptr() for t in made.data[index]]
        expected = normal_inputs(PROBLEM, 100 + index)
        assert torch.equal(a, expected[0]) and torch.equal(b, expected[1]) and c.isnan().all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((7,), (PROBLEM, 7, 1.0)),
        ((7, 0.5), (PROBLEM, 7, 0.5)),
        ((8, 2.0, Problem(2, 2, 2)), (Problem(2, 2, 2), 8, 2.0)),
    ],
)
def test_inputs_of_a_seed_are_drawn_once_if_trials_are_kept(arguments, expected):
    made = context(trials=CachedTrials())
    found, again = made.normal(*arguments), made.normal(*arguments)
    a, b = normal_inputs(expected[0], expected[1], scale=expected[2])
    assert found is again and torch.equal(found[0], a) and torch.equal(found[1], b)
    assert made.trials.get(expected, lambda: None) is found


@pytest.mark.parametrize("index", [None, 0, 1])
def test_a_run_has_the_inputs_and_the_pattern_it_is_given_and_returns_a_copy(index):
    seen = []

    def act(a, b, c):
        seen.append((a.clone(), b.clone(), c.view(torch.int16).clone()))
        c.fill_(4.0)

    made = context(act)
    a, b = torch.full((3, 8), 2.0).half(), torch.full((5, 8), 3.0).half()
    where = {} if index is None else {"index": index}
    for pattern, first in ((None, operands.CANARY), (0, 0), (0x1234, 0x1234)):
        found = made.run(a, b, pattern=pattern, **where)
        assert torch.equal(seen[-1][0], a) and torch.equal(seen[-1][1], b) and (seen[-1][2] == first).all()
        assert (found == 4).all() and found.data_ptr() != made.data[index or 0][2].data_ptr()
    assert made.data[1 - (index or 0)][2].isnan().all() and made.entry.streams == [0, 0, 0]


def beside(t, place):
    """The word that is so far from a tensor's first."""
    return t.as_strided((1,), (1,), t.storage_offset() + place)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda a, b, c: beside(a, -1).zero_(), "the canary in front of A was overwritten"),
        (lambda a, b, c: beside(a, a.numel()).zero_(), "the canary in front of B was overwritten"),
        (lambda a, b, c: beside(b, b.numel()).zero_(), "the canary in front of C was overwritten"),
        (lambda a, b, c: beside(c, c.numel()).zero_(), "the canary behind C was overwritten"),
        (lambda a, b, c: a[0, 0].add_(1), "A or B was changed"),
        (lambda a, b, c: b[-1, -1].add_(1), "A or B was changed"),
    ],
)
def test_what_was_written_is_named(act, said, index):
    made = context(act)
    with pytest.raises(GateFailed) as caught:
        made.run(*made.normal(1), index)
    assert caught.value.status is Status.MEMORY_VIOLATION and said in str(caught.value)


def test_on_a_gpu_the_stream_is_its_own_and_every_wait_is_for_that_gpu(monkeypatch):
    log, on_host = [], operands.Operands
    monkeypatch.setattr(
        proof_context, "Operands", lambda p, sets, device, guard: log.append(device) or on_host(p, sets, "cpu", guard)
    )
    monkeypatch.setattr(
        proof_context,
        "normal_inputs",
        lambda p, s, device, scale: log.append(device) or normal_inputs(p, s, "cpu", scale),
    )
    monkeypatch.setattr(proof_context, "process_state", lambda: {"state": 5})
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: log.append(("set", device)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: log.append(("stream", device)) or stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: log.append(("wait", index)))
    made = ProofContext(Entry(), PROBLEM, "cuda:3", ProofTrials())
    assert log == ["cuda:3", ("set", "cuda:3"), ("stream", "cuda:3"), "cuda:3", "cuda:3", ("wait", 3)]
    assert (made.cuda, made.stream, made.torch_stream, made.before) == (True, 77, stream, {"state": 5})
    inputs = made.normal(1)
    log.clear()
    made.run(*inputs)
    assert made.entry.streams == [77] and log == [("wait", 3), ("wait", 3)]
    log.clear()
    ProofContext(Entry(), PROBLEM, "cuda", ProofTrials()).wait()
    assert log[-2:] == [("wait", 0)] * 2


def test_the_state_of_the_process_is_its_threads_and_what_l2_keeps(monkeypatch):
    limit = SimpleNamespace(CU_LIMIT_PERSISTING_L2_CACHE_SIZE=6)
    cu = SimpleNamespace(CUlimit=limit, cuCtxGetLimit=lambda which: (0, {6: 4096}[which]))
    monkeypatch.setattr(proof_context, "driver", lambda: cu)
    assert proof_context.process_state() == {
        "started a thread of Python": threading.active_count(), "changed the persisting L2 size": 4096
    }  # fmt: skip
