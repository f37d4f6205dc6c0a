"""``outblas.linear``: torch.nn.functional.linear, by our product where there is no bias to add.

No kernel of the library adds a bias. To add one to a finished product would round twice, which torch does not, and
cost a pass over it, which is more than our kernels gain: with a bias the product is torch's, and its gradients are
ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outblas import dispatch
from outblas.fold import fold, unfold
from outblas.tensors import GRADIENT, why_torchs

if TYPE_CHECKING:
    import torch


def linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ w.t() + bias`` as :func:`torch.nn.functional.linear` computes it.

    Args:
        x: (..., K) or (K). w: (N, K), or (K). bias: (N), or what torch takes; None: none is added.
            Which products may be ours: see :func:`outblas.matmul`; with a bias, those of the gradients only.
        out: (..., N), contiguous; None: allocated.

    Raises:
        TensorError: tensors on different devices, or ``out`` shares memory with an input.
        DeviceError, ToolchainMissing: as :func:`outblas.matmul`.
    """
    torch = dispatch.import_torch()
    result = None
    if isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor) and x.dim() and w.dim() == 2:
        if bias is None:
            result = _product(x, w.t(), out)
        elif out is not None:
            _check_out(torch, x, w, bias, out)
        else:
            result = _with_bias(torch, x, w, bias)
    if result is not None:
        return result
    if out is None:
        return torch.nn.functional.linear(x, w, bias)
    return torch._C._nn.linear(x, w, bias, out=out)


def _product(x: Any, w: Any, out: Any) -> Any:
    result = dispatch.known(x, w, out)
    return dispatch.served(x, w, out, None) if result is None else result


def _check_out(torch: Any, x: Any, w: Any, bias: Any, out: Any) -> None:
    """Raises TensorError as a product of ours would; not where torch is to see the call itself."""
    if torch.compiler.is_compiling():
        return
    if all(why_torchs(torch, x, other, out) in ("", GRADIENT) for other in (w, bias)):
        dispatch.check_places(x, w, out)
        dispatch.check_places(x, bias, out)


def _with_bias(torch: Any, x: Any, w: Any, bias: Any) -> Any:
    """torch.addmm with gradients that are ours; None where torch is to do it all."""
    if torch.compiler.is_compiling() or not isinstance(bias, torch.Tensor) or bias.shape != w.shape[:1]:
        return None
    if why_torchs(torch, x, w, bias) != GRADIENT or x.device.type != dispatch.DEVICE_TYPE:
        return None
    dispatch.check_places(x, w, bias)
    folded = fold(x, w.t())
    if folded is None or bias.dtype != x.dtype or not dispatch.may_be_ours(x, w):
        return None
    from outblas.autograd import BiasedProduct

    return unfold(BiasedProduct.apply(bias, folded.a, folded.b), folded.shape)
