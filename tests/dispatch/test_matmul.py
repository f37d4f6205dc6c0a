"""The choice between a kernel and torch, without a GPU, on fakes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from outblas.core.config import Launch
from outblas.core.errors import DeviceError, TensorError, UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.dispatch import device_registry
from outblas.dispatch import matmul as dispatch
from outblas.dispatch.call_option import OPTIONS, call_option, launch_code
from outblas.dispatch.decide import Decision, Operand, decide
from outblas.dispatch.linear import linear
from outblas.dispatch.matmul import explain, matmul
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.runtime.launch import may_overlap
from support.dispatch_fixture import (
    DEPENDENT,
    LIBRARY,
    PLAIN,
    SCALAR,
    TUNED,
    WEIGHT,
    A,
    rows,
    transposed,
)
from support.gpus.known import H200


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
        ({"gpu": None}, "older than sm_80"),
        ({"gpu": replace(H200, name="a100", arch=75)}, "older than sm_80"),
    ],
)
def test_all_else_is_torchs(changed: dict[str, Any], why: str) -> None:
    found = choose(**changed)
    assert found.config is None and found.problem is None
    assert re.search(why, found.reason), found.reason


def test_a_kernel_of_scalar_loads_takes_any_alignment() -> None:
    assert choose(rows(64, 256, "bf16", 2), rows(256, 128, "bf16", 6)).config == SCALAR


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


@pytest.mark.parametrize("grad", [False, True])
def test_operands_on_different_devices_go_to_torch(torch: Any, grad: bool) -> None:
    """torch takes a tensor without data beside a real one, and raises its own error for an output elsewhere."""
    a = torch.ones(2, 3, dtype=torch.float16, requires_grad=grad)
    b = torch.ones(3, 2, dtype=torch.float16, device="meta")
    for x, y in ((a, b), (b.t(), a.t())):
        theirs = torch.matmul(x, y)
        for call in (matmul, dispatch.mm, lambda p, q: linear(p, q.t())):
            result = call(x, y)
            assert (result.device, result.shape) == (theirs.device, theirs.shape), call
        assert explain(x, y) == "torch.matmul: the operands are on different devices"
    with pytest.raises(RuntimeError, match="cross-device copies are not allowed"):
        matmul(a.detach(), a.detach().t(), out=torch.empty(2, 2, dtype=torch.float16, device="meta"))


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
            assert may_overlap(x, y) == bool(addresses(x) & addresses(y)), (x.storage_offset(), y.storage_offset())
            assert may_overlap(x.t(), y) == may_overlap(x, y)
    assert not may_overlap(whole[:0], whole) and may_overlap(whole[:, ::2], whole[:, 1::2])  # cautious where entangled


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
        with torch._C._DisableTorchDispatch():
            assert "mode" not in explain(a, b), "Inductor times products like this while it compiles"
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
        code = launch_code(pdl, weights)
        assert code is None or OPTIONS[code] == call_option(pdl, weights), "the short way for the native table"
        return call_option(pdl, weights).launch

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
    with pytest.raises(UsageError, match="weights=True conflicts with pdl=False"):
        call_option(False, True)
    with pytest.raises(UsageError, match="weights=True conflicts with pdl=False"):
        launch_code(False, True)
    assert launch_code(9, False) == 1, "any truth is True: 2 would promise constant weights"  # type: ignore[arg-type]


def test_a_true_number_allows_pdl_and_promises_no_more(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("outblas.dispatch.matmul.native_table.table_matmul", None)
    monkeypatch.setattr("outblas.dispatch.matmul.run_matmul", lambda a, b, out, option: seen.append(option) or a)
    a = torch.ones(2, 2)
    for pdl in (2, 9, 0, None):
        matmul(a, a, pdl=pdl)
    assert seen == [OPTIONS[1], OPTIONS[1], OPTIONS[0], None]


def test_status_is_empty_before_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "devices", {})  # a thread of an earlier test may have asked late
    assert dispatch.status() == {}


def test_another_library_can_be_used(monkeypatch, tmp_path):

    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(device_registry, "devices", {})
    problem, config = Problem(64, 64, 64), Sm80MmaConfig(16, 16, wm=1, wn=1)
    mine = Library("h200", (LibraryRow(problem, plain=LibraryChoice(config, 1.1, 1.05, 1.2)),))
    mine.save(tmp_path / "mine.json")
    dispatch.use_library(tmp_path / "mine.json")
    assert device_registry.device_state(0).library.lookup(problem).choice("plain").config == config
    dispatch.use_library(None)
    assert len(device_registry.device_state(0).library.rows) == len(Library.packaged("h200", missing_ok=True).rows)
    with pytest.raises(UsageError, match="the library is for GPU other"):
        dispatch.use_library(Library("other", mine.rows))

    def none(index):
        raise DeviceError("no CUDA device 0", "a GPU", "run outblas doctor")

    monkeypatch.setattr(device_registry, "gpu_of_device", none)
    with pytest.raises(DeviceError):
        dispatch.use_library(mine)
