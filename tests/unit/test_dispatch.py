"""Which product goes to a kernel and which to torch: decided here without a GPU, on fakes."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outblas import device_state, dispatch
from outblas.allowed import launch_of_option, option_of
from outblas.config import Launch
from outblas.decide import Decision, Operand, decide
from outblas.dispatch import DeviceState, explain, matmul
from outblas.errors import CompileError, DeviceError, TensorError, UsageError
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.library import Choice, Library, Row
from outblas.overlap import overlap
from outblas.problem import Problem
from outblas.roofline import H200, Gpu
from outblas.source import kernel_kind

PLAIN, DEPENDENT = Sm90WgmmaConfig(64, 64), Sm90WgmmaConfig(64, 64, pdl=True)
SCALAR = Sm80MmaConfig(64, 64, vec=1)
TUNED = Problem(64, 128, 256)
LIBRARY = Library(
    "h200",
    (
        Row(TUNED, "lt_auto", "", "cuda:0", Choice(PLAIN, 1.2, 1.1, 1.3), Choice(DEPENDENT, 1.4, 1.3, 1.5)),
        Row(Problem(64, 128, 256, "NN", "bf16"), "torch", plain=Choice(SCALAR, 1.2, 1.1, 1.3)),
        Row(Problem(128, 128, 256), "lt_auto"),
        Row(Problem(63, 127, 255), "lt_auto", plain=Choice(PLAIN, 1.2, 1.1, 1.3)),
        Row(Problem(64, 1, 256, "NN"), "lt_auto", plain=Choice(SCALAR, 1.2, 1.1, 1.3)),
    ),
)


def rows(m: int, n: int, dtype: str = "fp16", offset: int = 0) -> Operand:
    return Operand((m, n), (n, 1), dtype, "cuda:0", offset)


def transposed(operand: Operand) -> Operand:
    return operand._replace(shape=operand.shape[::-1], strides=operand.strides[::-1])


A, WEIGHT = rows(64, 256), transposed(rows(128, 256))


def choose(
    a: Operand = A, b: Operand = WEIGHT, out: Operand | None = None, gpu: Gpu | None = H200, launch: Launch = "plain"
) -> Decision:
    return decide(a, b, out, gpu=gpu, library=LIBRARY, launch=launch)


def test_a_tuned_problem_takes_its_kernel_and_says_why() -> None:
    found = choose()
    assert (found.config, found.problem) == (PLAIN, TUNED)
    assert "1.200 times lt_auto (1.100 to 1.300)" in found.reason and "cuda:0" in found.reason


def test_pdl_only_when_opted_in() -> None:
    assert choose(launch="plain").config == PLAIN
    assert choose(launch="pdl").config == DEPENDENT


def test_the_layout_is_read_off_the_strides() -> None:
    found = choose(rows(64, 256, "bf16"), rows(256, 128, "bf16"))
    assert found.config == SCALAR and found.problem == Problem(64, 128, 256, "NN", "bf16")
    # The same shapes, stored the other way round, are another problem.
    assert choose(rows(64, 256, "bf16"), transposed(rows(128, 256, "bf16"))).config is None
    assert choose(A, rows(256, 128)).config is None


def test_a_single_column_is_both_layouts() -> None:
    column = Operand((256, 1), (1, 1), "fp16", "cuda:0")
    found = choose(A, column)
    assert found.config == SCALAR and found.problem == Problem(64, 1, 256, "NN")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"a": rows(65, 256)}, "65_128_256_TN_fp16_fp32 is not in the library of h200"),
        ({"a": rows(128, 256)}, "no kernel was proven faster than lt_auto"),
        ({"a": rows(63, 255), "b": transposed(rows(127, 255))}, "multiples of 16 bytes"),
        ({"a": Operand((2, 64, 256), (16384, 256, 1), "fp16", "cuda:0")}, "3 and 2 dimensions"),
        ({"a": rows(64, 255)}, "do not match"),
        ({"a": rows(0, 256)}, "zero"),
        ({"a": rows(64, 0), "b": transposed(rows(128, 0))}, "zero"),
        ({"a": rows(64, 256, "bf16")}, "dtypes bf16 and fp16"),
        ({"a": rows(64, 256, "torch.float32"), "b": transposed(rows(128, 256, "torch.float32"))}, "torch.float32"),
        ({"a": A._replace(strides=(512, 1))}, r"a has strides \(512, 1\)"),
        ({"b": WEIGHT._replace(strides=(1, 512))}, "neither contiguous nor the transpose"),
        ({"a": A._replace(offset=2)}, "not aligned to 16 bytes"),
        ({"b": WEIGHT._replace(offset=8)}, "not aligned to 16 bytes"),
        ({"out": rows(64, 128, offset=4)}, "not aligned to 16 bytes"),
        ({"out": rows(64, 127)}, r"out is \(64, 127\)"),
        ({"out": rows(64, 128, "bf16")}, "of bf16"),
        ({"out": transposed(rows(128, 64))}, "out has strides"),
        ({"a": rows(2**20, 2**12), "b": transposed(rows(128, 2**12))}, "4294967296 elements"),
        ({"gpu": None}, "not sm_90"),
        ({"gpu": Gpu("a100", 80, 108, 166912, 1, 300.0, 1.5, 4.0)}, "not sm_90"),
    ],
)
def test_all_else_is_torchs(changed: dict[str, Any], why: str) -> None:
    found = choose(**changed)
    assert found.config is None and found.problem is None
    assert re.search(why, found.reason), found.reason


def test_a_kernel_of_scalar_loads_takes_any_alignment() -> None:
    assert choose(rows(64, 256, "bf16", 2), rows(256, 128, "bf16", 6)).config == SCALAR


class FakeTensor:
    """An address, and its transpose."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def t(self) -> FakeTensor:
        return self


class FakeCall:
    def __init__(self, log: list[tuple[Any, ...]], *tensors: FakeTensor) -> None:
        self.log, self.addresses = log, [t.data_ptr() for t in tensors]
        self.operands = tensors

    def release(self) -> None:
        self.operands = ()

    def __call__(self, stream: int) -> None:
        self.log.append((*self.addresses, stream))


class FakeKernel:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log, self.bound = log, list[FakeCall]()

    def bind(self, problem: Problem, a: FakeTensor, b: FakeTensor, c: FakeTensor) -> FakeCall:
        self.bound.append(FakeCall(self.log, a, b, c))
        return self.bound[-1]


@pytest.fixture
def launches() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def kernel(launches: list[tuple[Any, ...]]) -> FakeKernel:
    return FakeKernel(launches)


def run(device: DeviceState, a: int, b: int, c: int, stream: int = 7) -> None:
    assert device.ready(TUNED, PLAIN)
    device.launch(TUNED, PLAIN, *(FakeTensor(x) for x in (a, b, c)), stream)  # type: ignore[arg-type]


def test_a_call_is_bound_once_per_set_of_addresses(kernel: FakeKernel, launches: list[tuple[Any, ...]]) -> None:
    loads: list[Problem] = []
    device = DeviceState(H200, LIBRARY, lambda problem, config: (loads.append(problem) or kernel, 0.5))
    run(device, 1, 2, 3)
    run(device, 1, 2, 3, stream=9)
    run(device, 1, 2, 4)
    assert launches == [(1, 2, 3, 7), (1, 2, 3, 9), (1, 2, 4, 7)]
    assert len(kernel.bound) == 2 and len(loads) == 1
    assert device.status()["calls_bound"] == 2 and device.status()["compile_seconds"] == 0.5


def test_bound_calls_do_not_keep_their_operands(kernel: FakeKernel) -> None:
    """Else torch's allocator could never hand out an output's memory again."""
    device = DeviceState(H200, LIBRARY, lambda problem, config: (kernel, 0.0))
    run(device, 1, 2, 3)
    assert kernel.bound[0].operands == ()


def test_bound_calls_are_limited_and_the_least_recent_goes(monkeypatch: pytest.MonkeyPatch, kernel: FakeKernel) -> None:
    monkeypatch.setattr(device_state, "KEPT_CALLS", 2)
    device = DeviceState(H200, LIBRARY, lambda problem, config: (kernel, 0.0))
    for c in (3, 4, 3, 5, 3):
        run(device, 1, 2, c)
    assert device.status()["calls_bound"] == 2 and len(kernel.bound) == 3
    run(device, 1, 2, 4)
    assert len(kernel.bound) == 4


@pytest.mark.parametrize("error", [CompileError("spills", "none", "x"), DeviceError("cannot load", "a driver", "x")])
def test_a_kernel_that_cannot_be_had_is_tried_once_and_told(error: Exception) -> None:
    tries: list[Problem] = []

    def loader(problem: Problem, config: Any) -> Any:
        tries.append(problem)
        raise error

    device = DeviceState(H200, LIBRARY, loader)
    with pytest.warns(RuntimeWarning, match="outblas uses torch.matmul"):
        assert not device.ready(TUNED, PLAIN)
    assert not device.ready(TUNED, PLAIN)
    assert len(tries) == 1
    assert str(error) in device.failed[kernel_kind(TUNED, PLAIN)] and len(device.status()["failures"]) == 1


def test_nothing_is_loaded_while_a_graph_is_captured(kernel: FakeKernel) -> None:
    device = DeviceState(H200, LIBRARY, lambda problem, config: (kernel, 0.0))
    assert not device.ready(TUNED, PLAIN, capturing=lambda: True)
    assert not device.failed and device.status()["kernels_loaded"] == 0
    assert device.ready(TUNED, PLAIN) and device.ready(TUNED, PLAIN, capturing=lambda: True)


def test_one_kernel_serves_every_size_of_its_kind(kernel: FakeKernel) -> None:
    loads: list[Problem] = []
    device = DeviceState(H200, LIBRARY, lambda problem, config: (loads.append(problem) or kernel, 0.0))
    for problem in (TUNED, Problem(8, 16, 24), Problem(8, 16, 24, "NN"), Problem(8, 16, 24, dtype="bf16")):
        assert device.ready(problem, PLAIN)
    assert loads == [TUNED, Problem(8, 16, 24, "NN"), Problem(8, 16, 24, dtype="bf16")]


def test_threads_never_share_a_call_in_flight(launches: list[tuple[Any, ...]]) -> None:
    """A call holds its stream between the two steps of a launch; each must see its own."""

    class SlowCall(FakeCall):
        stream = 0

        def __call__(self, stream: int) -> None:
            self.stream = stream
            threading.Event().wait(0.001)
            self.log.append((stream, self.stream))

    class SlowKernel(FakeKernel):
        def bind(self, problem: Problem, *tensors: FakeTensor) -> FakeCall:
            return SlowCall(self.log, *tensors)

    device = DeviceState(H200, LIBRARY, lambda problem, config: (SlowKernel(launches), 0.0))
    with ThreadPoolExecutor(16) as threads:  # raises here what a thread raises
        list(threads.map(lambda stream: run(device, 1, 2, 3, stream), range(16)))
    assert sorted(launches) == [(stream, stream) for stream in range(16)]


def finishes(work: Any) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_signals_handler_may_multiply_amid_all_that_a_lock_is_held_for(
    monkeypatch: pytest.MonkeyPatch, launches: list[tuple[Any, ...]]
) -> None:
    """Handlers run in the thread that holds the lock, at any step: here at each of those that call out."""
    handled: list[str] = []

    def handle(step: str) -> None:
        if step not in handled:
            handled.append(step)
            device.decide(A, WEIGHT, None, False)
            run(device, 1, 2, 3, stream=9)

    class Interrupted(FakeKernel):
        def bind(self, problem: Problem, *tensors: FakeTensor) -> FakeCall:
            handle("bind")
            return super().bind(problem, *tensors)

    def load(problem: Problem, config: Any) -> Any:
        handle("load")
        return Interrupted(launches), 0.0

    decision = Decision(None, None, "no")
    monkeypatch.setattr(device_state, "decide", lambda *_, **__: handle("decide") or decision)
    device = DeviceState(H200, LIBRARY, load)
    assert finishes(lambda: (device.decide(A, WEIGHT, None, False), run(device, 4, 5, 6)))
    assert sorted(handled) == ["bind", "decide", "load"] and launches[-1] == (4, 5, 6, 7)
    assert device.status()["kernels_loaded"] == 1 and (1, 2, 3, 9) in launches


def test_a_signals_handler_may_multiply_while_a_device_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[DeviceState] = []

    def new_device(index: int) -> DeviceState:
        state = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
        made.append(state)
        if len(made) == 1:
            dispatch._device(index)  # the handler's, which is done first
        return state

    monkeypatch.setattr(dispatch, "_devices", {})
    monkeypatch.setattr(dispatch, "_new_device", new_device)
    assert finishes(lambda: dispatch._device(0)) and len(made) == 2
    assert dispatch._device(0) is made[1], "what the handler used is not replaced"


def test_what_a_handler_has_pushed_out_is_no_error() -> None:
    kept: Any = OrderedDict({"a": 1, "b": 2})
    device_state._touch(kept, "a")
    device_state._touch(kept, "gone")
    assert list(kept) == ["b", "a"]


def test_decisions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Operand] = []
    monkeypatch.setattr(device_state, "decide", lambda a, *_, **__: asked.append(a) or Decision(None, None, "no"))
    device = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
    for operand in (A, A, A._replace(offset=2)):
        device.decide(operand, WEIGHT, None, False)
    device.decide(A, WEIGHT, None, True)
    assert len(asked) == 3


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_cpu_tensors_are_torchs(torch: Any) -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    assert torch.equal(matmul(a, b), torch.matmul(a, b))
    out = torch.empty(5, 3)
    assert matmul(a, b, out=out) is out and torch.equal(out, a @ b)
    assert torch.equal(matmul(a[None], b), (a @ b)[None])
    assert matmul(torch.empty(0, 7), b).shape == (0, 3)
    assert torch.equal(matmul(torch.empty(2, 0), torch.empty(0, 3)), torch.zeros(2, 3))
    assert explain(a, b) == "torch.matmul: the tensors are on cpu"


def test_shapes_that_do_not_match_are_torchs_error(torch: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        matmul(torch.empty(2, 3), torch.empty(4, 5))
    with pytest.raises(TypeError):
        matmul([[1.0]], torch.empty(1, 1))  # type: ignore[arg-type]


def test_different_devices_are_refused(torch: Any) -> None:
    with pytest.raises(TensorError, match="b is on meta, a on cpu; expected one device"):
        matmul(torch.empty(2, 3), torch.empty(3, 2, device="meta"))
    with pytest.raises(TensorError, match="out is on meta"):
        explain(torch.empty(2, 3), torch.empty(3, 2), out=torch.empty(2, 2, device="meta"))


def test_an_output_that_overlaps_an_input_is_refused(torch: Any) -> None:
    buffer = torch.zeros(64)
    a, b = buffer[:16].view(4, 4), torch.eye(4)
    for out in (a, a.t(), buffer[15:31].view(4, 4)):
        with pytest.raises(TensorError, match="out shares memory with a"):
            matmul(a, b, out=out)
    with pytest.raises(TensorError, match="out shares memory with b"):
        matmul(b, a, out=a)
    matmul(a, b, out=buffer[16:32].view(4, 4))


def test_overlap_is_exact_for_blocks_of_one_matrix(torch: Any) -> None:
    """Against the sets of element addresses themselves."""
    whole = torch.empty(6, 12, dtype=torch.float16)
    flat = whole.view(-1)
    views = [whole[r : r + h, c : c + w] for r in (0, 2, 3) for h in (1, 3) for c in (0, 4, 7) for w in (2, 4, 5)]

    def addresses(t: Any) -> set[int]:
        index = torch.arange(flat.numel()).view(6, 12).as_strided(t.shape, t.stride(), t.storage_offset())
        return set(index.flatten().tolist())

    for x in views:
        for y in views:
            assert overlap(x, y) == bool(addresses(x) & addresses(y)), (x.storage_offset(), y.storage_offset())
            assert overlap(x.t(), y) == overlap(x, y)
    assert not overlap(whole[:0], whole) and overlap(whole[:, ::2], whole[:, 1::2])  # cautious where entangled


def test_gradients_are_kept(torch: Any) -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2)
    matmul(a, b).sum().backward()
    assert torch.equal(a.grad, b.sum(1).expand(3, 4))
    assert "gradient" in explain(a, b)
    with torch.no_grad():
        assert "gradient" not in explain(a, b)


def test_what_torch_must_see_is_left_to_it(torch: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Special(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    a, b = torch.randn(3, 4), torch.randn(4, 2)
    assert "plain" in explain(a.as_subclass(Special), b)
    assert isinstance(matmul(a.as_subclass(Special), b), Special)
    assert "sparse" in explain(a.to_sparse(), b)
    with Watch():
        assert "mode" in explain(a, b)
    with torch.autograd.forward_ad.dual_level():
        assert "forward" in explain(a, b)
    batched = torch.func.vmap(lambda x: matmul(x, b))(torch.stack([a, a]))
    assert batched.shape == (2, 3, 2)
    product = torch.randn(4, 3, dtype=torch.complex64).conj().imag[:, :3]
    assert product.is_neg() and torch.equal(matmul(a, product), a @ product)


def test_traces_hold_torchs_own_product(torch: Any) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    compiled = torch.compile(lambda x, y: matmul(x, y), backend="eager", fullgraph=True)
    assert torch.equal(compiled(a, b), a @ b)


def test_launch_options_are_opted_into_by_argument_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def allowed(pdl: bool | None, weights: bool | None) -> Launch:
        return launch_of_option(pdl if weights is None else option_of(pdl, weights))

    asked = [(None, None), (True, None), (False, None), (None, True), (True, True), (None, False), (True, False)]
    named: dict[str, list[Launch]] = {
        "": ["plain", "pdl", "plain", "weights", "weights", "plain", "pdl"],
        "OUTBLAS_PDL": ["pdl", "pdl", "plain", "weights", "weights", "pdl", "pdl"],
        # An explicit pdl stays safe for any predecessor, and an explicit no to the promise is a no.
        "OUTBLAS_WEIGHTS": ["weights", "pdl", "plain", "weights", "weights", "pdl", "pdl"],
    }
    for variable, expected in named.items():
        for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS"):
            monkeypatch.delenv(name, raising=False)
        if variable:
            monkeypatch.setenv(variable, "1")
        assert [allowed(*each) for each in asked] == expected, variable
    with pytest.raises(UsageError, match="weights=True with pdl=False"):
        option_of(False, True)


def test_status_is_empty_before_the_first_gpu() -> None:
    assert dispatch.status() == {}


def test_another_library_can_be_used(monkeypatch, tmp_path):

    monkeypatch.setattr(dispatch, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(dispatch, "_devices", {})
    problem, config = Problem(64, 64, 64), Sm80MmaConfig(16, 16, wm=1, wn=1)
    mine = Library("h200", (Row(problem, plain=Choice(config, 1.1, 1.05, 1.2)),))
    mine.save(tmp_path / "mine.json")
    dispatch.use_library(tmp_path / "mine.json")
    assert dispatch._device(0).library.lookup(problem).choice("plain").config == config
    dispatch.use_library(None)
    assert len(dispatch._device(0).library.rows) == len(Library.packaged("h200", missing_ok=True).rows)
    with pytest.raises(UsageError, match="a library of other"):
        dispatch.use_library(Library("other", mine.rows))

    def none(index):
        raise DeviceError("no CUDA device 0", "a GPU", "run outblas doctor")

    monkeypatch.setattr(dispatch, "gpu_of_device", none)
    with pytest.raises(DeviceError):
        dispatch.use_library(mine)
