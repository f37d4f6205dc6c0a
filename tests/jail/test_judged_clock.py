"""The clock of free kernels without a GPU: cheats that tell one launch from another by any signal gain nothing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

from outblas.core.errors import DeviceError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.bench_cell import Options  # noqa: E402
from outblas.judge.stream_clock import HostBehindGpu  # noqa: E402
from outblas_lab.jail import judged_clock  # noqa: E402
from outblas_lab.jail.fresh_operands import FreshOperands  # noqa: E402
from outblas_lab.jail.judged_clock import Defences, JudgedClock, JudgedEntry  # noqa: E402
from support.gpus.known import H200  # noqa: E402

P, CALLS, ROUNDS = Problem(24, 16, 32), 4, 5
#: Microseconds of a call that works, and of one that does not; the former is that of the rival, too.
WORK, NONE = 10.0, 1.0


def product(a, b, c):
    c.copy_(a.float() @ b.float().t())


class World:
    """A stream whose works run at once, and take the microseconds that kernels say."""

    problem, repeats, stream, gpu_index, l2_bytes = P, CALLS, 7, 0, 1 << 30

    def __init__(self):
        self.us, self.behind, self.evicted = 0.0, 0, 0

    def limit(self, tries, longest):
        assert tries == 1

    def synchronize(self):
        pass

    def evict(self):
        self.evicted += 1

    def current(self):
        return contextlib.nullcontext()

    def timed(self, works):
        begin = self.us
        for work in works:
            work()
        if self.behind:
            self.behind -= 1
            raise HostBehindGpu("the host was slow", "a fast one", "wait")
        return [self.us - begin]


class Kernel:
    """``cheats(launch)`` decides by all that a kernel can read whether a launch leaves its work out."""

    def __init__(self, world, cheats=lambda launch: False, name="kernel", does=product):
        self.world, self.name, self.cheats, self.does = world, name, cheats, does
        self.state, self.workspace, self.launches, self.released, self.broken = {}, None, 0, 0, False

    def bind_many(self, problem, operands):
        self.workspace = {}  # new and empty, as a judged replay's is
        workspace = self.workspace
        return [lambda stream, each=each: self.launch(each, workspace) for each in operands]

    def launch(self, operands, workspace):
        a, b, c = operands
        self.launches += 1
        launch = SimpleNamespace(
            a=a, b=b, c=c, workspace=workspace, state=self.state, count=self.launches, clock=self.world.us,
            address=c.data_ptr(), place=len(workspace),
        )  # fmt: skip
        workspace[len(workspace)] = True
        leaves_out = self.cheats(launch)
        self.world.us += NONE if leaves_out else WORK
        if not leaves_out:
            self.does(a, b, c)

    def broken_workspace(self):
        return self.broken

    def release(self):
        self.released += 1


@pytest.fixture
def world(monkeypatch):
    made = World()
    driver = SimpleNamespace(
        cuGraphUpload=lambda *a: (0,), cuGraphExecDestroy=lambda graph: (0,),
        cuCtxResetPersistingL2Cache=lambda: (0,),
        cuGraphLaunch=lambda graph, stream: (int(any(call(stream) for call in graph)),),
    )  # fmt: skip
    monkeypatch.setattr(judged_clock, "driver", lambda: driver)
    monkeypatch.setattr(judged_clock, "instantiate", lambda calls, stream, change: list(calls))
    monkeypatch.setattr(judged_clock, "perf_counter", lambda: made.us / 1e6)
    monkeypatch.setattr("outblas.judge.faults.raise_if_context_lost", lambda error: error)
    return made


def measured(world, *kernels, defences=None, rounds=ROUNDS, prune=None):
    """Timings and entries of some kernels beside an honest rival."""
    clock = JudgedClock(world, FreshOperands(P, CALLS, "cpu"), defences)
    entries = {kernel.name: JudgedEntry(kernel) for kernel in kernels}
    rival = Kernel(world, name="rival")
    return clock.measure({"rival": rival}, entries, Options(0, H200), rounds, prune), entries


def test_an_honest_kernel_passes_with_its_time(world):
    kernel = Kernel(world)
    found, entries = measured(world, kernel)
    assert entries["kernel"].failure is None and 0 < entries["kernel"].max_err_ratio <= 1.0
    assert found["kernel"].median_us == found["rival"].median_us == WORK
    assert (found["kernel"].mode, found["kernel"].repeats, len(found["kernel"].samples_us)) == (
        "offline",
        CALLS,
        ROUNDS,
    )


def test_every_launch_of_a_kernel_but_those_launched_again_has_operands_of_its_own(world):
    seen = []
    kernel = Kernel(world, lambda launch: seen.append((float(launch.a.float().sum()), launch.c.clone())))
    measured(world, kernel)
    timed = 1 + ROUNDS
    assert len(seen) == timed * (CALLS + 1) + 2 * (3 * CALLS + 1)
    assert kernel.released == timed + 2
    values = [value for value, _ in seen if value == value]
    assert len(set(values)) > timed * CALLS
    assert all(len(c.unique()) > 50 for _, c in seen), "C never holds a constant"


#: Signal -> a rule by which a kernel leaves its work out in launches that it takes for unjudged ones.
SIGNALS = {
    "c: not one constant": lambda launch: len(launch.c.unique()) > 1,
    "a: no integers alone": lambda launch: bool((launch.a != launch.a.round()).any()),
    "b: no integers alone": lambda launch: bool((launch.b != launch.b.round()).any()),
    "workspace: not the first call on it": lambda launch: launch.place > 0,
    "addresses: seen before": lambda launch: launch.state.setdefault(launch.address, launch.count) != launch.count,
    "clock: soon after the last launch": lambda launch: (
        launch.clock - launch.state.get("last", -99) < 2 * WORK or launch.state.update(last=launch.clock)
    ),
    "call count: from the 20th on": lambda launch: launch.count >= 20,
    "call count: each second one": lambda launch: launch.count % 2 == 0,
    "place in the replay: the last": lambda launch: launch.place == CALLS,
    "kept answers: the same operands": lambda launch: (
        launch.state.setdefault(float(launch.a.float().sum() + launch.b.float().sum()), launch.count) != launch.count
    ),
}


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_kernel_that_leaves_work_out_by_what_it_reads_is_refused(world, signal):
    """It is wrong, or its third launch on the same operands is the first that is faster, where places are drawn so."""
    _, entries = measured(world, Kernel(world, SIGNALS[signal]))
    failure = entries["kernel"].failure
    assert failure is not None and failure.status in (Status.WRONG, Status.RULE_BROKEN), signal


def test_without_the_comparison_the_same_kernel_would_gain(world):
    found, entries = measured(world, Kernel(world, SIGNALS["c: not one constant"]), defences=Defences(judged=False))
    assert entries["kernel"].failure is None and found["rival"].median_us / found["kernel"].median_us == WORK / NONE


def batching():
    """Learns the operands of all calls, computes all of them in the first launch of a replay, and then returns."""

    def cheats(launch):
        known = launch.state.setdefault("known", [])
        if all(c is not launch.c for _, _, c in known):
            known.append((launch.a, launch.b, launch.c))
        if launch.place == 1 and len(known) > CALLS:
            for a, b, c in known:
                product(a, b, c)
            return True
        return launch.place > 1 and len(known) > CALLS

    return cheats


def test_one_launch_cannot_compute_for_the_next_whose_places_it_does_not_know(world):
    _, entries = measured(world, Kernel(world, batching()))
    assert entries["kernel"].failure is not None and entries["kernel"].failure.status is Status.WRONG


def test_answers_kept_in_c_help_only_where_values_contents_and_places_stay(world):
    kept = {}

    def key(a, b, c):
        return c.data_ptr(), float(a.float().sum() + b.float().sum())

    def answered(launch):
        return kept.get(key(launch.a, launch.b, launch.c)) == float(launch.c.float().sum())

    def keeps(a, b, c):
        product(a, b, c)
        kept[key(a, b, c)] = float(c.float().sum())

    off = Defences(judged=False, values=False, outputs=False, places=False)
    found, entries = measured(world, Kernel(world, answered, does=keeps), defences=off, rounds=15)
    assert entries["kernel"].failure is None and found["kernel"].median_us < WORK / 1.3
    kept.clear()
    found, entries = measured(world, Kernel(world, answered, does=keeps))
    assert entries["kernel"].failure is None and found["kernel"].median_us == WORK, "nothing is kept that helps"


@pytest.mark.parametrize("patience", [1, 2])
def test_answers_kept_in_a_workspace_help_only_where_a_replay_is_launched_again(world, patience):
    """Its results are right, and its timed launches honest; it is refused for what it would do elsewhere."""

    def keeps(launch):
        key = launch.c.data_ptr(), float(launch.a.float().nan_to_num().sum())
        answers = launch.workspace.setdefault(key, [])
        if len(answers) == patience:
            launch.c.copy_(answers[0])
            return True
        product(launch.a, launch.b, launch.c)
        answers.append(launch.c.clone())
        return False

    _, entries = measured(world, Kernel(world, keeps))
    failure = entries["kernel"].failure
    assert failure is not None and failure.status is Status.RULE_BROKEN
    assert "40.0 us on new operands, 4.0 us on the same again: it caches results" in failure.detail


def test_results_that_differ_from_launch_to_launch_are_not_repeatable(world):
    turn = [0]

    def unsteady(a, b, c):
        product(a, b, c)
        turn[0] += 1
        c.view(torch.int16).add_(turn[0] % 2 * (c.abs() > 2).to(torch.int16))

    _, entries = measured(world, Kernel(world, does=unsteady))
    assert entries["kernel"].failure.status in (Status.NOT_REPEATABLE, Status.WRONG)


def test_a_kernel_that_fails_is_run_no_more_and_others_go_on(world):
    bad, good = Kernel(world, lambda launch: True, "bad"), Kernel(world, name="good")
    found, entries = measured(world, bad, good)
    assert bad.launches <= 2 * CALLS + 1
    assert entries["bad"].failure is not None and found["bad"].median_us == float("inf")
    assert entries["good"].failure is None and found["good"].median_us == WORK


def test_a_kernel_that_raises_has_a_launch_error(world):
    def raises(launch):
        raise DeviceError("a grid of 0 CTAs", "1 or more", "look at it")

    _, entries = measured(world, Kernel(world, raises))
    failure = entries["kernel"].failure
    assert failure.status is Status.LAUNCH_ERROR and "a grid of 0 CTAs" in failure.detail


def test_a_guard_of_the_workspace_that_breaks_is_a_memory_violation(world):
    kernel = Kernel(world)
    kernel.broken = True
    _, entries = measured(world, kernel)
    assert entries["kernel"].failure.status is Status.MEMORY_VIOLATION


def test_a_replay_that_the_host_delayed_is_repeated_on_other_operands(world):
    seen = []
    world.behind = 3
    kernel = Kernel(world, lambda launch: seen.append(float(launch.a.float().sum())))
    found, entries = measured(world, kernel)
    assert entries["kernel"].failure is None and found["kernel"].median_us == WORK


def test_a_host_that_is_always_behind_ends_the_measurement(world):
    world.behind = 10**6
    with pytest.raises(HostBehindGpu):
        measured(world, Kernel(world))


def test_the_hosts_clock_has_to_confirm_the_events(world, monkeypatch):
    monkeypatch.setattr(judged_clock, "perf_counter", lambda: 9 * world.us / 1e6)
    _, entries = measured(world, Kernel(world))
    failure = entries["kernel"].failure
    assert failure.status is Status.RULE_BROKEN
    assert "the host measures 360.0 us, but the events report 40.0 us" in failure.detail


@pytest.mark.parametrize(("l2_bytes", "evicts"), [(2 * CALLS * P.bytes, False), (2 * CALLS * P.bytes - 1, True)])
def test_operands_that_overflow_l2_are_evicted_after_they_were_written(world, l2_bytes, evicts):
    world.l2_bytes = l2_bytes
    measured(world, Kernel(world))
    assert bool(world.evicted) is evicts
    world.evicted = 0
    measured(world, Kernel(world), defences=Defences(caches=False))
    assert not world.evicted
