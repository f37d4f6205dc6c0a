"""``outblas.linear`` with ``batch_invariant``: its bias is one that torch's ``linear`` takes. On a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import outblas  # noqa: E402
from outblas.core.errors import TensorError  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402

W = numbers(16, 8, seed=1)


@pytest.mark.parametrize("x", [numbers(3, 8), numbers(8), numbers(2, 3, 8)], ids=["matrix", "vector", "batch"])
@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 16), (1,), (), (2, 3, 16), (8,)], ids=str)
def test_a_bias_counts_as_in_torch(served: Served, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    bias = numbers(*shape, seed=2)
    try:
        wanted = F.linear(x, W, bias)
    except RuntimeError:
        with pytest.raises(TensorError, match="bias has"):
            outblas.linear(x, W, bias, batch_invariant=True)
        return
    found = outblas.linear(x, W, bias, batch_invariant=True)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_of_another_dtype_is_refused_as_by_torch(served: Served, dtype: torch.dtype) -> None:
    x, bias = numbers(3, 8), numbers(16, seed=2).to(dtype)
    for call in (lambda: F.linear(x, W, bias), lambda: outblas.linear(x, W, bias, batch_invariant=True)):
        with pytest.raises(RuntimeError):
            call()
