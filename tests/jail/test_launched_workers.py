"""Set-up of jailed workers over libraries that record: the order of the jail's steps, tasks, and loaded kernels."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from outblas.core.errors import DeviceError  # noqa: E402
from outblas.core.evaluation import GateFailed, Status, Verdict  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.bench_cell import Options  # noqa: E402
from outblas.judge.operands import CANARY  # noqa: E402
from outblas.workers.handler import WorkItem  # noqa: E402
from outblas_lab.custom.free_kernel import FreeKernel  # noqa: E402
from outblas_lab.jail import (  # noqa: E402
    free_launch,
    jailed_worker,
    small_tasks,
    task_worker,
)
from outblas_lab.jail.free_launch import GuardedWorkspace, HostCall  # noqa: E402
from outblas_lab.jail.jailed_worker import JailedCell  # noqa: E402
from outblas_lab.jail.task_worker import OutOfBounds, TaskHandler  # noqa: E402
from support.free_fixture import device_text, host_text  # noqa: E402
from support.gpus.known import H200  # noqa: E402

P = Problem(16, 8, 8)
DEVICE, HOST = FreeKernel.parse(device_text()), FreeKernel.parse(host_text(""))


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
def test_a_workspace_lies_between_guards_of_64_kib(size):
    made = GuardedWorkspace(size, "cpu")
    words = made._words
    assert words.numel() == (-(-size // 256) * 256 + 2 * 65536) // 2 and made.nbytes == size
    assert made.address == words.data_ptr() + 65536
    first, behind = 32768, 32768 + -(-size // 2)
    assert not words[first:behind].any() and (words[:first] == CANARY).all() and (words[behind:] == CANARY).all()
    for place in (0, first - 1, behind, words.numel() - 1):
        words[place] = CANARY + 1
        assert made.broken(), place
        words[place] = CANARY
    assert not made.broken()


class Loaded(free_launch._Loaded):
    """A kernel that wants ``wanted`` bytes; its calls are their own arguments."""

    def __init__(self, wanted, most=1000):
        super().__init__(SimpleNamespace(kernel=DEVICE), H200, most)
        self.wanted = wanted

    def _bytes(self, problem):
        return self.wanted

    def _call(self, problem, operands, workspace):
        return problem, operands, workspace


@pytest.fixture(name="unchecked")
def unchecked_fixture(monkeypatch):
    checked = []
    monkeypatch.setattr(free_launch, "check_operands", lambda *given: checked.append(given))
    return checked


def test_a_workspace_may_be_as_large_as_the_limit(unchecked):
    tensors = tuple(torch.zeros(4) for _ in range(3))
    for wanted in (1, 1000):
        _, operands, workspace = Loaded(wanted).bind(P, *tensors)
        assert workspace.nbytes == wanted and operands == tensors
    assert Loaded(0).bind(P, *tensors)[2] is None
    for wanted in (-1, 1001):
        with pytest.raises(DeviceError, match=f"the workspace has {wanted} bytes; expected at most 1000"):
            Loaded(wanted).bind(P, *tensors)
    assert unchecked[0] == (P, *tensors)


def test_calls_of_one_stream_are_all_checked_and_share_one_workspace(unchecked):
    kernel, sets = Loaded(8), [tuple(torch.zeros(4) for _ in range(3)) for _ in range(3)]
    calls = kernel.bind_many(P, sets)
    assert len({id(workspace) for _, _, workspace in calls}) == 1 and [call[1] for call in calls] == sets
    assert unchecked == [(P, *each) for each in sets] and len(kernel._workspaces) == 1
    assert kernel.bind_many(P, []) == [] and len(kernel._workspaces) == 1
    kernel._workspaces[0]._words[0] = 0
    assert kernel.broken_workspace()
    kernel.release()
    assert not kernel.broken_workspace() and kernel.name == DEVICE.name and kernel.config == DEVICE


def test_libraries_that_a_host_kernel_needs(monkeypatch):
    def needed(asked, cudart):
        monkeypatch.setattr(free_launch, "dynamic_symbols", lambda image: (asked, []))
        return free_launch._needed(b"image", cudart)

    assert needed(["cudaLaunchKernel", "curve", "xcuTensor"], None) == []
    assert needed(["malloc", "cuTensorMapEncodeTiled"], None) == ["libcuda.so.1"]
    assert needed(["cuTensorMapEncodeTiled"], "/x/libcudart.so") == ["/x/libcudart.so", "libcuda.so.1"]


@pytest.mark.parametrize("status", [0, 1, -1])
def test_a_host_call_passes_its_stream_last_and_any_number_but_0_is_an_error(status):
    asked = []
    call = HostCall(lambda *given: asked.append(given) or status, (1, 2), ())
    if status:
        with pytest.raises(DeviceError, match=f"outblas_launch returned {status}"):
            call(99)
    else:
        assert call(99) is None
    assert asked == [(1, 2, 99)]


def test_the_form_decides_the_class_and_what_it_gets(monkeypatch):
    made = []
    monkeypatch.setattr(free_launch, "HostKernel", lambda *given: made.append(("host", *given[1:])))
    monkeypatch.setattr(free_launch, "DeviceKernel", lambda *given: made.append(("device", *given[1:])))
    for kernel in (HOST, DEVICE):
        free_launch.load(SimpleNamespace(kernel=kernel), "/own", "/cudart", H200)
        free_launch.load(SimpleNamespace(kernel=kernel), "/own", "/cudart", H200, 5)
    most = 32 << 20
    assert made[:2] == [("host", "/own", "/cudart", H200, most), ("host", "/own", "/cudart", H200, 5)]
    assert made[2:] == [("device", H200, most), ("device", H200, 5)]


@pytest.mark.parametrize("jailed", [True, False])
def test_a_worker_is_jailed_after_its_libraries_have_started(monkeypatch, jailed):
    steps = []

    class Jail:
        def __init__(self, folder, readable):
            steps.append((folder, readable))

        def __getattr__(self, name):
            return lambda: steps.append(name)

    monkeypatch.setattr(jailed_worker, "Jail", Jail)
    monkeypatch.setattr(jailed_worker, "_no_words", lambda: steps.append("silent"))
    handler = SimpleNamespace(warm=lambda: steps.append("warm"))
    cell = JailedCell("/own", "/cuda/lib/libcudart.so", jailed)
    assert jailed_worker.make_handler("options", cell, lambda options, cell: handler) is handler
    first = ("/own", ("/cuda/lib",))
    assert steps == ([first, "silent", "environment", "warm", "files", "calls"] if jailed else [first, "warm"])
    jailed_worker.make_handler("options", JailedCell("/own", None, False), lambda *_: handler)
    assert steps[-2] == ("/own", ())


def test_baselines_that_choose_or_compile_are_not_started_in_a_jail(monkeypatch):
    started = []
    monkeypatch.setattr(jailed_worker, "start_libraries", lambda *given: started.append(given))
    options = Options(3, H200, baselines=("torch", "cublas", "lt_auto", "nvmmh"))
    handler = jailed_worker.FreeHandler(options, JailedCell("/own"))
    handler.warm()
    assert started == [(3, [handler._baselines["torch"], handler._baselines["cublas"]])]


def test_a_workers_words_go_nowhere(monkeypatch):
    done = []
    system = SimpleNamespace(
        open=lambda path, flags: 9 if (path, flags) == (os.devnull, os.O_RDWR) else -1,
        dup2=lambda old, new: done.append((old, new)), close=done.append, devnull=os.devnull, O_RDWR=os.O_RDWR,
    )  # fmt: skip
    monkeypatch.setattr(jailed_worker, "os", system)
    jailed_worker._no_words()
    assert done == [(9, 0), (9, 1), (9, 2), 9]


def test_a_graph_is_destroyed_and_only_one_call_is_checked(monkeypatch):
    checked, destroyed = [], []
    monkeypatch.setattr(jailed_worker, "capture_graph", lambda calls, stream: f"{len(calls)} on {stream}")
    monkeypatch.setattr(jailed_worker, "count_programmatic_edges", lambda graph: 0)
    monkeypatch.setattr(jailed_worker, "driver", lambda: SimpleNamespace(cuGraphDestroy=destroyed.append))
    monkeypatch.setattr(jailed_worker, "check_nodes", checked.append)
    assert jailed_worker.check_launches(len, 7) is None
    assert checked == ["1 on 7"] and destroyed == ["1 on 7", "2 on 7"]

    def refuse(graph):
        raise GateFailed(Status.RULE_BROKEN, "it sets an L2 policy")

    monkeypatch.setattr(jailed_worker, "check_nodes", refuse)
    with pytest.raises(GateFailed, match="L2 policy"):
        jailed_worker.check_launches(len, 7)
    assert destroyed[2:] == ["1 on 7"]


class TaskKernel:
    """Copies A to C, and writes at the given place."""

    name = "task"

    def __init__(self, place=None, broken=False):
        self.place, self.broken, self.streams = place, broken, []

    def bind(self, problem, a, b, c):
        def call(stream):
            self.streams.append(stream)
            assert torch.isnan(c).all() or (c == 7.0).all()
            c.copy_(a)
            if self.place is not None:
                torch.as_strided(c, (1,), (1,), c.storage_offset() + self.place)[0] = 0.0

        return call

    def broken_workspace(self):
        return self.broken

    def release(self):
        pass


@pytest.fixture(name="on_host")
def on_host_fixture(monkeypatch):
    """torch without a GPU."""
    stream = SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
    monkeypatch.setattr(torch, "device", lambda kind, index: "cpu" if (kind, index) == ("cuda", 2) else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


@pytest.mark.parametrize(
    ("place", "held"),
    [(None, True), (0, True), (127, True), (-1, False), (128, False), (-4096, False), (128 + 4095, False)],
)  # fmt: skip
def test_a_task_runs_between_guards(on_host, place, held):
    import numpy as np

    problem, kernel = Problem(16, 8, 8), TaskKernel(place)
    a, b = np.ones((16, 8), np.float16), np.zeros((8, 8), np.float16)
    if not held:
        with pytest.raises(OutOfBounds, match="a guard around C"):
            task_worker.run_on_gpu(kernel, 2, problem, a, b, 7.0)
        return
    found = task_worker.run_on_gpu(kernel, 2, problem, a, b, float("nan"))
    assert found.c.shape == (16, 8) and found.c.dtype == np.float16 and kernel.streams == [77]
    assert int((found.c == 1).sum()) == 16 * 8 - (place is not None) and (found.a == a).all() and (found.b == b).all()


@pytest.fixture(name="task")
def task_fixture(monkeypatch):
    """Ask a handler of ``copy`` for a kernel; ``run`` is what its proof does."""

    def ask(kernel=DEVICE, run=None, loaded=None):
        handler = TaskHandler("copy", Options(2, H200, baselines=()), JailedCell("/own"))
        loaded = loaded or TaskKernel()
        monkeypatch.setattr(handler, "_kernel_of", lambda item: (loaded, {}))
        seen = []

        def prove(tasks, runner):
            seen.extend(tasks)
            if isinstance(run, Exception):
                raise run
            return run or Verdict(Status.PASSED, ("static",), "", 0.5)

        monkeypatch.setattr(task_worker, "prove_task", prove)
        monkeypatch.setattr("outblas.judge.faults.raise_if_context_lost", lambda error: error)
        log = []
        emit = SimpleNamespace(begin=lambda i: log.append(i), done=lambda i, value: log.append((i, *value)))
        handler([(4, WorkItem(Problem(16, 8, 8), kernel))], emit)
        begun, (index, evaluation, baselines) = log
        assert (begun, index, baselines) == (4, 4, None)
        return evaluation, [(one.m, one.k) for one in seen]

    return ask


def test_a_task_is_proved_on_its_sisters_that_the_kernel_allows(task):
    found, sisters = task()
    assert (found.status, found.detail) == (Status.LEFT_OUT, small_tasks.PROVEN)
    assert sisters == [(16, 8), (1, 8), (33, 40), (65, 17), (7, 264)]
    _, sisters = task(FreeKernel.parse(device_text(requires=["K % 8 == 0", "M > 1"])))
    assert sisters == [(16, 8), (33, 40), (7, 264)]


@pytest.mark.parametrize(
    ("keys", "status", "detail"),
    [
        ({"kernel": HOST}, Status.ILLEGAL, "the kernel has form host; tasks accept only form device"),
        ({"kernel": FreeKernel.parse(device_text(requires=["M > 16"]))}, Status.ILLEGAL, "it requires M > 16"),
        ({"run": OutOfBounds("a", "b", "c")}, Status.MEMORY_VIOLATION, "it wrote outside C"),
        ({"run": RuntimeError("CUDA error\nmore")}, Status.LAUNCH_ERROR, "CUDA error"),
        ({"run": Verdict(Status.WRONG, (), "no")}, Status.WRONG, "no"),
        ({"loaded": TaskKernel(broken=True)}, Status.MEMORY_VIOLATION, "around the workspace was overwritten"),
    ],
)  # fmt: skip
def test_a_task_that_fails_is_a_status(task, keys, status, detail):
    found, _ = task(**keys)
    assert found.status is status and found.detail.endswith(detail) and found.timing is None


def test_each_task_has_a_factory_without_baselines(monkeypatch):
    made = []
    monkeypatch.setattr(task_worker, "make_handler", lambda options, cell, of: made.append((options, of("o", "c"))))
    monkeypatch.setattr(task_worker, "TaskHandler", lambda *given: given)
    for name in small_tasks.TASK_NAMES:
        module, _, function = task_worker.task_factory(name).partition(":")
        assert module == task_worker.__name__
        getattr(task_worker, function)(Options(0, H200), JailedCell("/own"))
        assert made[-1][0].baselines == () and made[-1][1] == (name, "o", "c")
