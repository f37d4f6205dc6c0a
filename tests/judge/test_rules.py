"""Gate ``rules`` on a fake GPU, whose streams run their queue when the host waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from outblas.core.errors import DeviceError  # noqa: E402
from outblas.core.evaluation import GateFailed, Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import rules  # noqa: E402
from outblas.judge.proof_context import ProofContext  # noqa: E402
from outblas.judge.reference import b_as_k_by_n  # noqa: E402
from outblas.judge.trials import ProofTrials  # noqa: E402
from support.fake_streams import FakeDevice  # noqa: E402
from support.gpus.known import H200  # noqa: E402

PROBLEM = Problem(8, 16, 32)
#: N = K, and A, B and C of one shape: results may be A or B of the next call.
SQUARE = Problem(16, 16, 16)


@pytest.fixture
def gpu(monkeypatch):
    device = FakeDevice(monkeypatch)
    cu = device.driver()
    monkeypatch.setattr(rules, "driver", lambda: cu)
    monkeypatch.setattr(rules, "capture_graph", device.capture)
    device.state = {"started a thread of Python": 3, "changed the persisting L2 size": 0}
    device.threads = 5
    monkeypatch.setattr(rules, "process_state", lambda: dict(device.state))
    monkeypatch.setattr(rules, "_threads", lambda: device.threads)
    return device


def product(problem, a, b):
    return (a.float() @ b_as_k_by_n(problem, b).float()).to(a.dtype)


class Queued:
    """A kernel that is right, in steps on its stream: what each does to (problem, a, b, c) of a call."""

    name, config = "queued", None

    def __init__(self, gpu, *steps, at_call=None):
        self.gpu, self.calls = gpu, 0
        self._steps = steps or (lambda p, a, b, c: c.copy_(product(p, a, b)),)
        self._at_call = at_call or (lambda stream: None)

    def bind(self, problem, a, b, c):
        def call(stream):
            self.calls += 1
            self._at_call(stream)
            self.gpu.put(stream, *(lambda step=step: step(problem, a, b, c) for step in self._steps))

        return call


@pytest.fixture(autouse=True)
def known_gpu(monkeypatch):
    monkeypatch.setattr(rules, "gpu_of_device", lambda index: H200)


def check(gpu, entry, problem=PROBLEM):
    context = ProofContext(entry, problem, "cpu", ProofTrials())
    context.torch_stream = torch.cuda.Stream()
    context.stream, context.wait, context.before = context.torch_stream.cuda_stream, gpu.wait, dict(gpu.state)
    rules.check_rules(context)


def broken(gpu, entry, problem=PROBLEM):
    with pytest.raises(GateFailed) as failure:
        check(gpu, entry, problem)
    return failure.value.status, failure.value.detail


@pytest.mark.parametrize("problem", [PROBLEM, SQUARE, Problem(16, 8, 8), Problem(8, 16, 16, "NN")], ids=lambda p: p.key)
def test_a_kernel_that_keeps_the_rules_passes(gpu, problem):
    gpu.nodes = ["MEMSET", "KERNEL"]
    check(gpu, Queued(gpu), problem)


def test_two_calls_that_share_scratch_differ_on_two_streams(gpu):
    shared = {}
    entry = Queued(
        gpu,
        lambda p, a, b, c: shared.update(c=product(p, a, b)),
        lambda p, a, b, c: c.copy_(shared["c"]),
    )
    assert broken(gpu, entry) == (Status.WRONG, "results differ when two calls run concurrently on two streams")


@pytest.mark.parametrize("index", [0, 1])
def test_each_of_the_two_streams_is_looked_at(gpu, index):
    """Wrong on one of them, and only behind the plugs of both."""

    def step(p, a, b, c):
        c.copy_(product(p, a, b) + (gpu.plugs[-2:] == 2 * [rules._PLUG_OF_TWO] and c.data_ptr() == mine[index]))

    entry = Queued(gpu, step)
    mine = []
    bind = entry.bind
    entry.bind = lambda p, a, b, c: mine.append(c.data_ptr()) or bind(p, a, b, c)
    assert broken(gpu, entry)[0] is Status.WRONG


@pytest.mark.parametrize("roots", [0, 2, 3])
def test_a_graph_has_one_beginning(gpu, roots):
    gpu.roots = roots
    status, detail = broken(gpu, Queued(gpu))
    assert status is Status.RULE_BROKEN and f"{roots} root nodes" in detail


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": []}, "it enqueues nothing on the given stream"),
        ({"nodes": ["KERNEL", "HOST"]}, "its graph contains a node of type HOST"),
        ({"node_window": 1}, "a kernel sets an access policy window (persisting L2)"),
        ({"window": 1}, "it set an access policy window on the stream"),
    ],
)
def test_what_a_stream_and_a_graph_may_not_hold(gpu, change, said):
    vars(gpu).update(change)
    assert broken(gpu, Queued(gpu)) == (Status.RULE_BROKEN, said)


def test_work_outside_of_its_stream_is_seen_when_inputs_come_late(gpu):
    entry = Queued(gpu)
    bind = entry.bind

    def at_once(problem, a, b, c):
        late = bind(problem, a, b, c)

        def call(stream):
            late(stream)
            queue = gpu.streams[stream].steps
            queue.pop()()

        return call

    entry.bind = at_once
    assert broken(gpu, entry) == (Status.RULE_BROKEN, "it does not respect the order of the given stream")


@pytest.mark.parametrize("operand", ["A", "B"])
def test_an_operand_that_is_read_before_its_turn_is_seen(gpu, operand):

    class Reads(Queued):
        def bind(self, problem, a, b, c):
            def call(stream):
                x, y = (a.clone(), b) if operand == "A" else (a, b.clone())
                gpu.put(stream, lambda: c.copy_(product(problem, x, y)))

            return call

    assert broken(gpu, Reads(gpu))[1] == "it does not respect the order of the given stream"


def test_early_loads_of_b_are_held_to_the_order_of_a(gpu):
    """The promise that B is constant lets B be read at once, and nothing else."""

    class Early(Queued):
        config = SimpleNamespace(early=True)

        def bind(self, problem, a, b, c):
            def call(stream):
                x, y = (a.clone(), b) if self.reads == "A" else (a, b.clone())
                gpu.put(stream, lambda: c.copy_(product(problem, x, y)))

            return call

    early, original = Early(gpu), rules.why_illegal
    try:
        rules.why_illegal = lambda problem, config, gpu: None
        early.reads = "B"
        check(gpu, early)
        check(gpu, early, SQUARE)
        early.reads = "A"
        assert broken(gpu, early)[1] == "it does not respect the order of the given stream"
    finally:
        rules.why_illegal = original


def test_a_call_that_waits_for_the_gpu_is_refused_after_three_longer_plugs(gpu):
    entry = Queued(gpu, at_call=lambda stream: gpu.wait())
    assert broken(gpu, entry) == (Status.RULE_BROKEN, "the call waits for the GPU")
    assert gpu.plugs == list(rules._PLUG_CYCLES) and gpu.plugs == sorted(set(gpu.plugs))


def test_a_host_that_was_held_up_once_is_no_waiting_call(gpu):
    calls = []

    def held_up(stream):
        if gpu.plugs and not calls:
            calls.append(1)
            gpu.wait()

    check(gpu, Queued(gpu, at_call=held_up))
    assert calls and gpu.plugs[:2] == list(rules._PLUG_CYCLES[:2])


def test_a_graph_that_remembers_its_first_result_is_broken(gpu):
    kept = {}
    entry = Queued(gpu, lambda p, a, b, c: c.copy_(kept[0] if 0 in kept else product(p, a, b)))
    original = gpu.capture

    def capture(calls, stream):
        graph = original(calls, stream)
        steps, first = graph.steps, []

        def once():
            if first:
                return
            first.append(1)
            for step in steps:
                step()

        graph.steps = [once]
        return graph

    rules.capture_graph = capture
    assert broken(gpu, entry) == (Status.RULE_BROKEN, "its captured graph does not compute the product")


@pytest.mark.parametrize("error", [DeviceError("no capture", "one", "do"), RuntimeError("no capture")])
def test_what_cannot_be_captured_is_broken(gpu, error, monkeypatch):
    def refuses(calls, stream):
        raise error

    monkeypatch.setattr(rules, "capture_graph", refuses)
    status, detail = broken(gpu, Queued(gpu))
    assert status is Status.RULE_BROKEN and detail.startswith("it cannot be captured in a CUDA graph (no capture")


SIDE_EFFECTS = {
    "a call allocates torch memory (4 tensors in 4 calls)": {"allocated": 1},
    "a call starts threads (": {"threads": 1},
    "every four calls reduce free GPU memory (last by 2048 bytes)": {"free": -512},
}


@pytest.mark.parametrize("said", SIDE_EFFECTS)
def test_a_call_has_no_side_effects(gpu, said):
    def grows(stream):
        for name, by in SIDE_EFFECTS[said].items():
            setattr(gpu, name, getattr(gpu, name) + by)

    status, detail = broken(gpu, Queued(gpu, at_call=grows))
    assert status is Status.RULE_BROKEN and detail.startswith(said)


def test_memory_that_another_process_takes_once_or_twice_is_no_offence(gpu):
    entry = Queued(gpu)
    taken = iter([0] * 5 + [512, 512])
    entry._at_call = lambda stream: setattr(gpu, "free", gpu.free - next(taken, 0))
    check(gpu, entry)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("started a thread of Python", 1, "it started a thread of Python (3 -> 4)"),
        ("started a thread of Python", -1, None),
        ("changed the persisting L2 size", 1, "it changed the persisting L2 size (0 -> 1)"),
        ("changed the persisting L2 size", -1, "it changed the persisting L2 size (0 -> -1)"),
    ],
)
def test_the_process_is_as_it_was_before_the_candidate(gpu, name, change, said):
    done = []

    def changes(stream):
        if not done:
            done.append(1)
            gpu.state[name] += change

    entry = Queued(gpu, at_call=changes)
    if said is None:
        check(gpu, entry)
    else:
        assert broken(gpu, entry) == (Status.RULE_BROKEN, said)


@pytest.mark.parametrize("operand", ["A", "B", "C"])
def test_a_launch_that_overlaps_its_predecessor_wrongly_is_seen(gpu, operand):
    """It reads an operand, or writes C, before the launch in front of it on the stream has ended."""
    last = {}

    class Overlaps(Queued):
        def bind(self, problem, a, b, c):
            def call(stream):
                queue = gpu.streams[stream].steps
                step = lambda: c.copy_(product(problem, x if operand == "A" else a, y if operand == "B" else b))  # noqa: E731
                before = last.get("c")
                x, y = a, b
                back_to_back = bool(queue) and queue[-1] is last.get("step")
                if back_to_back and operand == "A" and a is before:
                    x = a.clone()
                if back_to_back and operand == "B" and b is before:
                    y = b.clone()
                if back_to_back and operand == "C" and any(t is c for t in last["inputs"]):
                    previous = queue.pop()
                    queue.extend((step, previous))
                queue.append(step)
                last.update(step=step, c=c, inputs=(a, b))

            return call

    assert broken(gpu, Overlaps(gpu), SQUARE) == (
        Status.RULE_BROKEN, "dependent back-to-back calls overlap incorrectly"
    )  # fmt: skip


@pytest.mark.parametrize("number", [4, 6])
def test_the_end_of_either_pair_of_a_chain_is_looked_at(gpu, number):
    """Right but for one of the calls, where it stands behind another: of a chain the second and the fourth are read."""

    class Behind(Queued):
        bound = 0

        def bind(self, problem, a, b, c):
            self.bound += 1
            mine = self.bound == number

            def call(stream):
                off = mine and bool(gpu.streams[stream].steps)
                gpu.put(stream, lambda: c.copy_(product(problem, a, b) + off))

            return call

    assert broken(gpu, Behind(gpu), SQUARE)[1] == "dependent back-to-back calls overlap incorrectly"


def test_threads_of_the_process_are_counted(monkeypatch):
    before, end = rules._threads(), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert rules._threads() == before + 1
    finally:
        end.set()
        thread.join()


def test_threads_that_end_meanwhile_are_no_offence(gpu):
    def end_one(stream):
        gpu.threads = 5 if entry.calls < 4 else 4  # between the two looks

    entry = Queued(gpu, at_call=end_one)
    check(gpu, entry)
    assert entry.calls > 4


def test_memory_that_others_take_later_is_not_held_against_a_kernel(gpu, monkeypatch):
    looks = iter([1000, 1000, *range(999, 0, -1)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(looks), 10**9))
    check(gpu, Queued(gpu))


def test_a_graph_and_its_executable_are_given_back(gpu, monkeypatch):
    cu, freed = rules.driver(), []
    for name in ("cuGraphExecDestroy", "cuGraphDestroy"):
        monkeypatch.setattr(cu, name, lambda *given, name=name: freed.append(name), raising=False)
    monkeypatch.setattr(rules, "driver", lambda: cu)
    check(gpu, Queued(gpu))
    assert freed == ["cuGraphExecDestroy", "cuGraphDestroy"]


def test_free_memory_must_shrink_with_each_four_calls_to_be_the_candidates(gpu, monkeypatch):
    looks, calls = [], []

    def shrinking(device):
        looks.append(device)
        return 1000 - len(looks), 10**9

    monkeypatch.setattr(torch.cuda, "mem_get_info", shrinking)
    context = SimpleNamespace(device="cpu", calls=[calls.append], stream=0, wait=lambda: None)
    with pytest.raises(GateFailed, match="last by 1 bytes"):
        rules._no_device_memory(context, 1000)
    assert len(looks) == 10 and len(calls) == 40


def test_a_chain_is_scaled_so_that_it_neither_grows_nor_fades(gpu):
    seen = []
    entry = Queued(gpu, lambda p, a, b, c: (seen.append(a.float().std().item()), c.copy_(product(p, a, b))))
    check(gpu, entry, SQUARE)
    assert min(seen) > 0.05 and max(seen) < 2.0
