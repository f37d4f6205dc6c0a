"""Calls that the native table launches, and calls that it leaves to the dispatch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outblas.core.config import LAUNCHES
from outblas.core.errors import DeviceError, TensorError
from outblas.dispatch import matmul
from outblas.dispatch.call_option import CallOption, call_option
from support.native_fixture import (  # noqa: F401
    BOXES,
    MAPPED,
    POINTERS,
    FakeCuda,
    Host,
    K,
    M,
    N,
    built_fixture,
    cuda_fixture,
    host_fixture,
    learn,
    needs_compiler,
    open_with_fixture,
    operands,
    prepared,
    table_fixture,
    torch,
)

pytestmark = needs_compiler


# -- launching -------------------------------------------------------------------------------------------


def test_a_call_is_answered_once_it_was_learned(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    assert table.matmul(a, b, out, False) is None
    assert learn(table, a, b, out, prepared())
    assert table.matmul(a, b, out, False) is out and len(cuda) == 1
    assert (table.counts()["remembered"], table.counts()["launches"]) == (1, 1)


def test_the_launch_is_the_one_that_was_prepared(table: Any, cuda: FakeCuda, host: Host) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    host.stream = (1 << 63) + 9
    table.matmul(a, b, out, False)
    made = cuda[0]
    assert (made.function, made.stream, made.shared_bytes, made.attribute_count) == (MAPPED, (1 << 63) + 9, 4096, 0)
    assert [*made.grid, *made.block, *made.extents] == [3, 2, 1, 160, 1, 1, M, N, K]
    assert made.addresses[2] == out.data_ptr()
    for words, tensor, (rows, cols, box_rows, box_cols, kind, swizzle, promotion) in zip(
        made.maps, (a, b, out), BOXES, strict=True
    ):
        expected = [
            tensor.data_ptr(),
            2,
            cols,
            rows,
            2 * cols,
            box_cols,
            box_rows,
            1,
            1,
            kind,
            0,
            swizzle,
            promotion,
            0,
        ]
        assert list(words)[:15] == [*expected, 0]  # the last: how far from a multiple of 64 bytes it was encoded


def test_a_kernel_of_addresses_gets_them(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared(POINTERS))
    table.matmul(a, b, out, False)
    assert list(cuda[0].addresses) == [t.data_ptr() for t in (a, b, out)] and list(cuda[0].extents) == [M, N, K]
    assert cuda.encoded == 0


def test_the_records_are_those_of_cuda(table: Any, cuda: FakeCuda) -> None:
    """Against the structures of cuda.bindings, byte by byte."""
    driver = pytest.importorskip("cuda.bindings.driver")
    a, b, out = operands()
    learn(table, a, b, out, prepared(cluster=4, dependent=True))
    table.matmul(a, b, out, False)
    made, identities = cuda[0], driver.CUlaunchAttributeID
    cluster, dependent = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    cluster.id = identities.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 4, 1, 1
    dependent.id = identities.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    dependent.value.programmaticStreamSerializationAllowed = 1
    assert made.attribute_count == 2
    for mine, theirs in zip(made.attributes, (cluster, dependent), strict=True):
        assert bytes(mine) == ctypes.string_at(int(theirs.getPtr()), 72)


def map_slot(address: int, serial: int, operand: int) -> int:
    """Return the slot of an operand's map, of which a later map in the same slot takes the place (csrc/table.c)."""
    mixed = (address + (24 * serial + operand) * 0x100000001B3) % 2**64
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15 % 2**64
    return (mixed ^ mixed >> 29) % 4096


def operands_of_own_slots() -> tuple[Any, Any, Any, Any]:
    """Return A, B, C and another C of which no two maps share a slot, in the first and second entry of a table."""
    kept = []  # memory that is given back would be drawn again
    while True:
        a, b, out = operands()
        kept.append((a, b, out, torch.empty_like(out)))
        places = [(one.data_ptr(), min(i, 2)) for i, one in enumerate(kept[-1])]
        if all(len({map_slot(at, serial, i) for at, i in places}) == 4 for serial in (1, 2)):
            return kept[-1]


def test_maps_are_encoded_once_per_address(table: Any, cuda: FakeCuda) -> None:
    a, b, out, other = operands_of_own_slots()
    learn(table, a, b, out, prepared())
    for _ in range(3):
        table.matmul(a, b, out, False)
    assert cuda.encoded == 3
    assert table.matmul(a, b, other, False) is other and cuda.encoded == 4
    assert cuda[-1].maps[2][0] == cuda[-1].addresses[2] == other.data_ptr()
    # Another kernel's maps are never taken for this one's, also after all was forgotten.
    table.forget()
    learn(table, a, b, out, prepared(maps=(BOXES[0], BOXES[1], (M, N, 64, 16, 6, 1, 2))))
    table.matmul(a, b, out, False)
    assert cuda.encoded == 7 and cuda[-1].maps[2][5] == 16


def test_an_output_is_allocated_where_none_is_given(table: Any, cuda: FakeCuda, host: Host) -> None:
    a, b, out = operands()
    learn(table, a, b, None, prepared())
    made = [table.matmul(a, b, None, False) for _ in range(3)]
    assert len({t.data_ptr() for t in made}) == 3
    for index, tensor in enumerate(made):
        assert (tensor.shape, tensor.stride(), tensor.dtype) == ((M, N), (N, 1), torch.float16)
        assert cuda[index].addresses[2] == tensor.data_ptr()
    assert table.matmul(a, b, out, False) is None  # another call
    host.device = 1  # torch would allocate elsewhere
    assert table.matmul(a, b, None, False) is None and len(cuda) == 3


def test_the_output_is_known_to_be_written(table: Any) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    before = out._version
    table.matmul(a, b, out, False)
    assert out._version == before + 1
    with torch.inference_mode():
        frozen = torch.zeros_like(out)
        assert table.matmul(a, b, frozen, False) is frozen  # has no version to count
        assert table.matmul(a, b, out, False) is out and out._version == before + 2


def test_an_inference_tensor_is_written_in_inference_mode_only(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    with torch.inference_mode():
        frozen, x = torch.zeros_like(out), torch.zeros_like(a)
        assert learn(table, a, b, frozen, prepared())
        assert table.matmul(a, b, frozen, False) is frozen
    for call in (table.matmul, table.ours):
        assert call(a, b, frozen, False) is None and call(x, b, out, False) is out
    assert len(cuda) == 3 and not learn(table, a, b, frozen, prepared())


def test_operands_with_names_are_left_to_torch(open_with: Callable[..., Any], cuda: FakeCuda) -> None:
    """Fake the names of torch up to 2.12."""
    a, b, out = operands()
    named: list[Any] = []
    hooks = {"has_names": lambda tensor: any(tensor is each for each in named), "state": None}
    own = open_with(**hooks)
    learn(own, a, b, out, prepared())
    for tensor in (a, b, out):
        named[:] = [tensor]
        assert own.matmul(a, b, out, False) is None and own.ours(a, b, out, False) is None
        assert not learn(own, a, b, out, prepared())
    named.clear()
    assert own.matmul(a, b, out, False) is out and len(cuda) == 1


@pytest.mark.skipif(not hasattr(torch.Tensor, "has_names"), reason="this torch has no named tensors")
def test_torchs_own_word_for_names_is_asked(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, None, prepared())
    assert table.matmul(a.refine_names("m", "k"), b, None, False) is None and len(cuda) == 0


def test_an_older_torch_is_asked_for_inference_first(open_with: Callable[..., Any], cuda: FakeCuda) -> None:
    """In that torch the increment of a version raises for tensors of inference mode."""

    def increment(tensors: Any) -> None:
        if any(t.is_inference() for t in tensors):
            raise RuntimeError("Inference tensors do not track version counter.")
        torch._C._increment_version(tensors)

    hooks = {"spares_inference": False, "increment_version": increment, "state": None}
    own = open_with(**hooks)
    a, b, out = operands()
    learn(own, a, b, out, prepared())
    with torch.inference_mode():
        frozen = torch.zeros_like(out)
        assert own.matmul(a, b, frozen, False) is frozen
    assert own.matmul(a, b, out, False) is out and out._version == 1


def test_parameters_are_operands(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    weight = torch.nn.Parameter(torch.zeros(M, K, dtype=torch.float16), requires_grad=False)
    assert table.matmul(weight, b, out, False) is out and len(cuda) == 1


@pytest.mark.parametrize("call", ["launch", "encode"])
def test_a_refusal_of_the_driver_is_an_error(table: Any, cuda: FakeCuda, call: str) -> None:
    pytest.importorskip("cuda.bindings.driver")
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    cuda.set("fake_status" if call == "launch" else "fake_encode_status", 1)
    name = {"launch": "cuLaunchKernelEx", "encode": "cuTensorMapEncodeTiled"}[call]
    for _ in range(2):  # a map that was refused is not kept
        with pytest.raises(DeviceError, match=rf"{name} failed with CUDA_ERROR_INVALID_VALUE \(1\)"):
            table.matmul(a, b, out, False)
    cuda.library.fake_reset()
    assert table.matmul(a, b, out, False) is out and out._version == 1
    assert table.counts()["launches"] == 1


# -- keys ------------------------------------------------------------------------------------------------


def _variations() -> Iterator[tuple[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]]]:
    half = torch.float16
    yield "shape", lambda a, b, c: (torch.zeros(M + 1, K, dtype=half), b, torch.zeros(M + 1, N, dtype=half))
    yield "layout", lambda a, b, c: (a, b.contiguous(), c)
    yield "strides", lambda a, b, c: (torch.zeros(M, 2 * K, dtype=half)[:, :K], b, c)
    yield "dtype", lambda a, b, c: (a.bfloat16(), b.bfloat16(), c.bfloat16())
    yield "alignment", lambda a, b, c: (torch.zeros(M * K + 1, dtype=half)[1:].view(M, K), b, c)
    yield "alignment of out", lambda a, b, c: (a, b, torch.zeros(M * N + 4, dtype=half)[4:].view(M, N))
    yield "device", lambda a, b, c: (a.to("meta"), b.to("meta"), c.to("meta"))
    yield "one device", lambda a, b, c: (a, b.to("meta"), c)
    yield "dimensions", lambda a, b, c: (a[None], b, c)
    yield "no out", lambda a, b, c: (a, b, None)
    yield "no tensor", lambda a, b, c: ([[1.0]], b, c)
    yield "subclass", lambda a, b, c: (a.as_subclass(type("Mine", (torch.Tensor,), {})), b, c)
    yield "negated", lambda a, b, c: (a, torch._neg_view(b), c)
    yield "zero tensor", lambda a, b, c: (torch._efficientzerotensor((M, K), dtype=half), b, c)
    yield "sparse", lambda a, b, c: (a.to_sparse(), b, c)
    yield "nested", lambda a, b, c: (torch.nested.nested_tensor([a[0], a[1]]), b, c)
    yield "gradient", lambda a, b, c: (a.clone().requires_grad_(), b, c)
    yield "parameter", lambda a, b, c: (torch.nn.Parameter(a), b, c)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("what", "change"), list(_variations()), ids=lambda x: x if isinstance(x, str) else "")
def test_another_kind_of_call_is_not_answered(table: Any, cuda: FakeCuda, what: str, change: Any) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    assert table.matmul(*change(a, b, out), False) is None
    assert len(cuda) == 0
    assert table.matmul(a, b, out, False) is out


def test_what_is_no_call_for_the_table_is_not_learned(table: Any) -> None:
    a, b, out = operands()
    assert not learn(table, a[None], b, out, prepared())
    assert not learn(table, a.float(), b, out)  # spans are in elements of one size
    assert not learn(table, a.clone().requires_grad_(), b, out)
    assert table.counts()["remembered"] == 0


def test_constant_weights_are_part_of_the_key_and_follow_the_environment(
    table: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, out = operands()
    for option in range(3):
        assert table.matmul(a, b, out, option) is None
        learn(table, a, b, out, prepared(MAPPED + 2 * option, dependent=option > 0), option)
    for value, unset in (("1", 2), ("0", 1)):
        monkeypatch.setenv("OUTBLAS_PDL", "1")
        monkeypatch.setenv("OUTBLAS_WEIGHTS", value)
        for option, expected in ((None, unset), (False, 0), (True, 1), (2, 2)):
            table.matmul(a, b, out, option)
            assert cuda[-1].function == MAPPED + 2 * expected, (value, option)
    assert (
        table.matmul(a, b, out, 3) is None
        and table.matmul(a, b, out, -1) is None
        and table.matmul(a, b, out, "") is None
    )


def test_pdl_is_part_of_the_key_and_follows_the_environment(
    table: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared(MAPPED), pdl=False)
    assert table.matmul(a, b, out, True) is None
    learn(table, a, b, out, prepared(MAPPED + 2, dependent=True), pdl=True)
    for value in (None, "1", "TRUE", "0", "yes", "no"):
        if value is None:
            monkeypatch.delenv("OUTBLAS_PDL", raising=False)
        else:
            monkeypatch.setenv("OUTBLAS_PDL", value)
        for pdl in (None, False, True):
            table.matmul(a, b, out, pdl)
            assert cuda[-1].function == MAPPED + 2 * LAUNCHES.index(call_option(pdl).launch), (value, pdl)


def test_another_context_is_left_to_the_dispatch(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    for context in (0, 78):  # a new thread's, another device's
        cuda.set("fake_context", context, ctypes.c_uint64)
        assert table.matmul(a, b, out, False) is None and len(cuda) == 0
    cuda.library.fake_reset()
    assert table.matmul(a, b, out, False) is out


def test_an_output_on_an_input_is_left_to_the_dispatch(table: Any, cuda: FakeCuda) -> None:
    """The dispatch raises TensorError, to the byte, on either side of either input."""
    square = 32
    flat = torch.zeros(8 * square * square, dtype=torch.float16)

    def at(start: int) -> Any:
        return flat[start : start + square * square].view(square, square)

    size, step = square * square, 8  # steps of 16 bytes keep the alignment
    a, b = at(2 * size), at(5 * size).t()
    far = at(7 * size)
    learn(table, a, b, far, prepared(POINTERS, extents=(square, square, square)))
    for base in (2 * size, 5 * size):
        for shift, free in ((-size, True), (size, True), (step - size, False), (size - step, False), (0, False)):
            out = at(base + shift)
            assert (table.matmul(a, b, out, False) is out) == free, (base, shift)
            if not free:
                with pytest.raises(TensorError, match="out shares memory"):
                    matmul.run_matmul(a, b, out, CallOption())
    assert len(cuda) == 4


def test_what_torch_must_see_is_not_answered(table: Any, cuda: FakeCuda) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    a, b, out = operands()
    learn(table, a, b, out, prepared())
    modes = [Functions, Dispatches, torch.autograd.forward_ad.dual_level, lambda: torch.autocast("cpu", torch.bfloat16)]
    for mode in modes:
        with mode():
            assert table.matmul(a, b, out, False) is None
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append(table.matmul(x, b, None, False))
        return x * 1

    learn(table, a, b, None, prepared())
    torch.func.vmap(look)(torch.stack([a, a]))
    torch.func.grad(lambda x: look(x).sum())(a)
    torch.func.functionalize(look)(a)
    torch.jit.trace(look, a, check_trace=False)
    assert seen and seen == [None] * len(seen) and len(cuda) == 0
    assert table.matmul(a, b, out, False) is out


def test_what_torch_compiles_is_not_answered(table: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling() and table.matmul(a, b, out, False) is None
    monkeypatch.undo()
    assert table.matmul(a, b, out, False) is out and len(cuda) == 1


def test_gradients_matter_only_where_they_are_recorded(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, None, prepared())
    a.requires_grad_()
    assert table.matmul(a, b, None, False) is None
    with torch.no_grad():
        assert not table.matmul(a, b, None, False).requires_grad
    assert len(cuda) == 1
