"""outblas.matmul, mm and linear beside torch's: equal values, shapes, strides, errors, gradients on random operands."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

import torch  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import outblas  # noqa: E402
from outblas.core.errors import TensorError  # noqa: E402
from outblas.dispatch import matmul  # noqa: E402
from outblas.dispatch.product_operands import fold, leading_dims_collapse  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

EXTENTS = st.sampled_from([0, 1, 1, 2, 3, 5, 8])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float16, torch.float32, torch.float64])
SHARED = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def tensors(draw: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A tensor of a shape, stored in any order of its axes, with gaps, offset, or repeated along an axis."""
    order = draw(st.permutations(range(len(shape))))
    order = list(range(len(shape))) if draw(st.booleans()) else order
    pads = [draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in shape]
    offset = draw(st.sampled_from([0, 0, 1, 8]))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis] + pads[axis], 1)
    if shape and draw(st.integers(0, 9)) == 0:
        strides[draw(st.integers(0, len(shape) - 1))] = 0
    memory = numbers(offset + step + 1, dtype=dtype, seed=draw(st.integers(0, 99)))
    return memory.as_strided(shape, strides, offset)


@st.composite
def pairs(draw: Any) -> tuple[Any, Any]:
    """Operands of 1 to 4 dimensions which mostly fit."""
    m, n, k = (draw(EXTENTS) for _ in range(3))
    batch = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)))
    other = draw(st.sampled_from([batch, (1,) * len(batch), (2,)]))
    kinds = st.integers(0, 2)
    a_shape = [(k,), (m, k), (*batch, m, k)][draw(kinds)]
    b_shape = [(k,), (k, n), (*other, k, n)][draw(kinds)]
    if draw(st.integers(0, 19)) == 0:
        b_shape = (b_shape[0] + 1, *b_shape[1:])
    dtype = draw(DTYPES)
    return draw(tensors(a_shape, dtype)), draw(
        tensors(b_shape, draw(DTYPES) if draw(st.integers(0, 19)) == 0 else dtype)
    )


def answer(call: Any) -> Any:
    """Return the result of a call, or its error."""
    try:
        return call()
    except Exception as error:
        return error


def assert_same(ours: Any, torchs: Any) -> None:
    if isinstance(torchs, Exception):
        assert isinstance(ours, type(torchs)), (ours, torchs)
        return
    assert not isinstance(ours, Exception), ours
    assert (ours.shape, ours.dtype, ours.stride(), ours.requires_grad) == (
        torchs.shape, torchs.dtype, torchs.stride(), torchs.requires_grad,
    )  # fmt: skip
    assert ours.is_contiguous() == torchs.is_contiguous() and not ours._is_view()
    assert torch.equal(ours, torchs)


@SHARED
@given(pair=pairs())
def test_matmul_and_mm_are_torchs(pair: tuple[Any, Any], served: Served) -> None:
    a, b = pair
    assert_same(answer(lambda: outblas.matmul(a, b)), answer(lambda: torch.matmul(a, b)))
    assert_same(answer(lambda: outblas.mm(a, b)), answer(lambda: torch.mm(a, b)))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@SHARED
@given(pair=pairs(), data=st.data())
def test_an_output_is_written_as_torch_does(pair: tuple[Any, Any], data: Any, served: Served) -> None:
    a, b = pair
    expected = answer(lambda: torch.matmul(a, b))
    if isinstance(expected, Exception) or expected.numel() == 0:
        return
    out = data.draw(tensors(tuple(expected.shape), expected.dtype))
    if 0 in out.stride():
        return
    theirs = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
    refused = isinstance(answer(lambda: torch.matmul(a, b, out=theirs)), Exception)
    version = out._version
    if refused:
        assert isinstance(answer(lambda: outblas.matmul(a, b, out=out)), Exception)
    else:
        assert outblas.matmul(a, b, out=out) is out and out._version > version
        assert out.shape == theirs.shape and torch.equal(out, theirs)


@st.composite
def layers(draw: Any) -> tuple[Any, Any, Any]:
    k, n = draw(EXTENTS), draw(EXTENTS)
    batch = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 5]), max_size=3)))
    dtype = draw(DTYPES)
    w_shape = draw(st.sampled_from([(n, k), (n, k), (n, k), (n, k), (k,), (n, k + 1), (1, n, k)]))
    bias = draw(st.sampled_from([None, None, (n,), (n,), (1, n), (n + 2,)]))
    return (
        draw(tensors((*batch, k), dtype)),
        draw(tensors(w_shape, dtype)),
        None if bias is None else draw(tensors(bias, dtype)),
    )


@SHARED
@given(layer=layers())
def test_linear_is_torchs(layer: tuple[Any, Any, Any], served: Served) -> None:
    torchs = answer(lambda: torch.nn.functional.linear(*layer))
    ours = answer(lambda: outblas.linear(*layer))
    if isinstance(torchs, Exception):
        assert isinstance(ours, type(torchs)), (ours, torchs)
    else:
        assert ours.shape == torchs.shape and ours.stride() == torchs.stride() and torch.equal(ours, torchs)


@SHARED
@given(pair=pairs(), data=st.data())
def test_gradients_are_those_of_fp64(pair: tuple[Any, Any], data: Any, served: Served) -> None:
    wants = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    ours = [t.detach().requires_grad_(wanted) for t, wanted in zip(pair, wants, strict=True)]
    torchs = [t.detach().double().requires_grad_(wanted) for t, wanted in zip(pair, wants, strict=True)]
    expected = answer(lambda: torch.matmul(*torchs))
    if isinstance(expected, Exception) or pair[0].dtype != pair[1].dtype:
        assert isinstance(answer(lambda: outblas.matmul(*ours)), Exception)
        return
    result = outblas.matmul(*ours)
    assert result.requires_grad and torch.equal(result.double(), expected)
    grad = numbers(*expected.shape, dtype=torch.float64, seed=7)
    expected.backward(grad)
    result.backward(grad.to(result.dtype))
    for mine, theirs in zip(ours, torchs, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            assert mine.grad.shape == mine.shape and torch.equal(mine.grad.double(), theirs.grad)


# -- which way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "problem"),
    [
        ((2, 3, 5), (5, 4), (6, 4, 5)),
        ((2, 1, 3, 5), (5, 4), (6, 4, 5)),
        ((5,), (5, 4), (1, 4, 5)),
        ((3, 5), (5,), (3, 1, 5)),
        ((2, 3, 5), (5,), (6, 1, 5)),
        ((2, 3, 5), (1, 5, 4), (6, 4, 5)),
        ((1, 3, 5), (1, 5, 4), (3, 4, 5)),
        ((3, 5), (5, 4), (3, 4, 5)),
    ],
)
def test_what_is_one_product_by_views_is_ours(a: Any, b: Any, problem: Any, served: Served) -> None:
    x, y = numbers(*a), numbers(*b, seed=1)
    assert_same(outblas.matmul(x, y), torch.matmul(x, y))
    assert [(p.m, p.n, p.k) for p in served.ran] == [problem]
    assert "sm80_mma" in outblas.explain(x, y) and "\n" not in outblas.explain(x, y)
    assert ("as one product" in outblas.explain(x, y)) == (len(a) != 2 or len(b) != 2)
    shape = torch.matmul(x, y).shape
    out = torch.empty(shape, dtype=x.dtype)
    if 1 not in (len(a), len(b)):
        assert outblas.matmul(x, y, out=out) is out and torch.equal(out, torch.matmul(x, y)) and len(served.ran) == 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5,), (5,)),
        ((2, 3, 5), (2, 5, 4)),
        ((3, 5), (2, 5, 4)),
        ((3, 5), (1, 5, 4)),
        ((5,), (2, 5, 4)),
        ((3, 0), (0, 4)),
    ],
)
def test_true_batches_and_the_rest_are_torchs(a: Any, b: Any, served: Served) -> None:
    x, y = numbers(*a), numbers(*b, seed=1)
    assert_same(outblas.matmul(x, y), torch.matmul(x, y))
    assert not served.ran and outblas.explain(x, y).startswith("torch.matmul: ")


def test_nothing_is_copied_to_fold(served: Served) -> None:
    x, y = numbers(2, 3, 8)[..., :5], numbers(5, 4)
    folded = fold(x.transpose(0, 1), y)
    assert folded is None and "without a copy" in outblas.explain(x.transpose(0, 1), y)
    contiguous = numbers(2, 3, 5)
    folded = fold(contiguous, y)
    assert folded is not None and folded.a.data_ptr() == contiguous.data_ptr() and folded.b is y


def test_rows_lie_below_each_other_where_a_view_says_so() -> None:
    """Against torch's own view, which refuses a copy."""
    whole = torch.zeros(4, 6, 8, 10)
    cuts = [slice(None), slice(0, 1), slice(1, 3), slice(0, None, 2)]
    for order in itertools.permutations(range(3)):
        for cut in itertools.product(cuts, repeat=3):
            t = whole[cut].permute(*order, 3)
            try:
                t.view(-1, t.shape[-1])
                viewable = True
            except RuntimeError:
                viewable = False
            assert leading_dims_collapse(tuple(t.shape), t.stride()) == viewable, (t.shape, t.stride())


def test_both_gradients_are_decided_by_the_strides_of_operands_as_they_are(served: Served) -> None:
    x, w = numbers(6, 5, grad=True), numbers(4, 5, seed=1, grad=True)
    outblas.matmul(x, w.t()).backward(numbers(6, 4, seed=2))
    assert [p.key for p in served.ran[:2]] == ["6_4_5_TN_fp16_fp32", "6_5_4_NN_fp16_fp32"]
    assert len(served.ran) == 2, "the weight's gradient is of an A stored by columns, which the library has not"
    assert x.grad.stride() == (5, 1) and w.grad.stride() == (5, 1)
    assert "its gradients are decided in the same way" in outblas.explain(x, w.t())


def test_gradients_have_the_strides_of_torchs(served: Served) -> None:
    for flip_a, flip_b in itertools.product([False, True], repeat=2):
        strides = []
        for product in (torch.matmul, outblas.matmul):
            a = (numbers(5, 3).t() if flip_a else numbers(3, 5)).requires_grad_()
            b = (numbers(4, 5).t() if flip_b else numbers(5, 4)).requires_grad_()
            grads = torch.autograd.grad(product(a, b), (a, b), numbers(3, 4, seed=3))
            strides.append([g.stride() for g in grads])
        assert strides[0] == strides[1]


def test_a_linear_layer_with_a_bias_is_torchs_and_its_gradients_are_ours(served: Served) -> None:
    x, w, bias = numbers(2, 3, 5, grad=True), numbers(4, 5, seed=1, grad=True), numbers(4, seed=2, grad=True)
    result = outblas.linear(x, w, bias)
    assert not served.ran and torch.equal(result, torch.nn.functional.linear(x, w, bias))
    grad = numbers(2, 3, 4, seed=3)
    found = torch.autograd.grad(result, (x, w, bias), grad)
    assert [p.key for p in served.ran] == ["6_5_4_NN_fp16_fp32"]
    expected = torch.autograd.grad(torch.nn.functional.linear(x, w, bias), (x, w, bias), grad)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert outblas.explain(x, w.t(), bias=bias).startswith("torch.addmm: ")


def test_a_linear_layer_writes_to_its_output(served: Served) -> None:
    x, w, bias = numbers(2, 3, 5), numbers(4, 5, seed=1), numbers(4, seed=2)
    for added in (None, bias):
        out = torch.empty(2, 3, 4, dtype=x.dtype)
        assert outblas.linear(x, w, added, out=out) is out
        assert torch.equal(out, torch.nn.functional.linear(x, w, added))
    assert len(served.ran) == 1
    with pytest.raises(TensorError, match="out shares memory with"):
        outblas.linear(x, w, bias, out=bias.expand(2, 3, 4))
    with pytest.raises(TensorError, match="out shares memory with a"):
        outblas.linear(x[0, :, :4], numbers(4, 4), bias, out=x[0, :, :4])


def test_a_linear_layer_with_an_output_is_traced_as_torchs(served: Served) -> None:
    x, w, bias, out = numbers(3, 8), numbers(5, 8), numbers(5), torch.empty(3, 5, dtype=torch.float16)

    def layer(x: Any, w: Any, bias: Any, out: Any) -> Any:
        return outblas.linear(x, w, bias, out=out)

    expected = torch.nn.functional.linear(x, w, bias)
    for run in (
        torch.compile(layer, backend="eager", fullgraph=True),
        make_fx(layer, tracing_mode="fake")(x, w, bias, out),
    ):
        out.zero_()
        assert torch.equal(run(x, w, bias, out), expected) and torch.equal(out, expected)
    with FakeTensorMode() as mode:
        assert outblas.linear(*(mode.from_tensor(t) for t in (x, w, bias)), out=mode.from_tensor(out)).shape == (3, 5)
    with pytest.raises(TypeError):
        outblas.linear(x, w, 1.0, out=out)
    assert not served.ran


def test_an_inference_tensor_is_written_in_inference_mode_only(served: Served) -> None:
    x, w, bias = numbers(3, 8), numbers(5, 8), numbers(5)
    with torch.inference_mode():
        out = torch.zeros(3, 5, dtype=torch.float16)
        assert torch.equal(outblas.matmul(x, w.t(), out=out), x @ w.t())
        out.zero_()
    for call in (
        lambda: outblas.matmul(x, w.t(), out=out),
        lambda: outblas.mm(x, w.t(), out=out),
        lambda: outblas.linear(x, w, out=out),
        lambda: outblas.linear(x, w, bias, out=out),
    ):
        with pytest.raises(RuntimeError, match="inference tensor outside"):
            call()
    assert "inference" in matmul.explain(x, w.t(), out=out)
    assert len(served.ran) == 1, "torch writes before it raises; nothing of ours ran"


def test_names_are_torchs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the names of torch up to 2.12."""
    x, w, named = numbers(3, 8), numbers(8, 5), numbers(8, 5)
    monkeypatch.setattr(torch.Tensor, "has_names", lambda tensor: tensor is named, raising=False)
    outblas.matmul(x, named)
    assert not served.ran and "named" in matmul.explain(x, named)
    outblas.matmul(x, w)
    assert len(served.ran) == 1


def test_errors_are_of_torchs_types(served: Served) -> None:
    square = numbers(4, 4)
    with pytest.raises(RuntimeError, match="out shares memory"):
        outblas.mm(square, square.clone(), out=square)
    for call in (outblas.mm, outblas.matmul, outblas.linear):
        with pytest.raises(TypeError):
            call([[1.0]], square)
    weight = numbers(4, 4, grad=True)
    for call in (outblas.mm, outblas.matmul):
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            call(square, weight, out=torch.empty(4, 4, dtype=torch.float16))
