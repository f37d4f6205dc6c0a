"""The replacement of torch's kernels, on the CPU, also beside another package's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.dispatch import aten_override  # noqa: E402
from outblas.dispatch.aten_override import Override  # noqa: E402
from outblas.dispatch.enable import Switch  # noqa: E402
from support.native_fixture import built_fixture, switch_of_cpu  # noqa: F401  # noqa: E402
from support.served_fixture import Served, numbers, served_fixture  # noqa: F401  # noqa: E402


@pytest.fixture(params=["native", "python"])
def on(served: Served, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Switch]:
    made = switch_of_cpu(monkeypatch, request)
    yield made
    assert made._override.kernels.startswith("C++" if request.param == "native" else "Python")
    assert not made._users
    made.disable()


def test_it_is_removed_once_and_only_after_it_was_installed() -> None:
    override = Override("CPU")
    override.remove()
    override.install()
    try:
        product = torch.ones(2, 3) @ torch.ones(3, 2)
    finally:
        override.remove()
    counted = override.counts()
    assert torch.equal(product, torch.full((2, 2), 3.0)) and counted["ours"] == 0 and counted["torchs"] >= 1
    override.remove()
    torch.ones(2, 3) @ torch.ones(3, 2)
    assert override.counts() == counted, "torch's own kernels run again"


@pytest.fixture(params=["override taken", "override refused"])
def strict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch up to 2.12 raises an error for a second kernel from Python; later ones replace the first in silence."""
    if request.param == "override taken":
        return
    impl = torch.library.Library.impl

    def refusing(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", *, with_keyset: bool = False) -> None:
        impl(self, op_name, fn, dispatch_key, with_keyset=with_keyset, allow_override=False)

    monkeypatch.setattr(torch.library.Library, "impl", refusing)


def seven(*operands: Any, **factors: Any) -> Any:
    a, b = operands[-2:]
    return a.new_full((*a.shape[:-1], b.shape[-1]), 7)


@pytest.mark.parametrize("name", ["mm", "bmm", "addmm", "baddbmm"])
def test_another_packages_kernel_is_left_alone(name: str, strict: None, on: Switch, served: Served) -> None:
    needs = {} if name in ("mm", "bmm") else {"batch_invariant": True}
    x, w = numbers(3, 8), numbers(8, 5)
    operands = (x, w) if name in ("mm", "addmm") else (x[None], w[None])
    operands = (torch.zeros(5, dtype=x.dtype), *operands) if needs else operands
    wanted = getattr(torch, name)(*operands)
    theirs = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.impl(name, seven, "CPU")
    for turn in (outblas.enable, lambda **needs: outblas.use(**needs).__enter__()):
        with pytest.warns(RuntimeWarning, match=rf"^outblas has no effect: .*aten::{name} for CPU .*$") as told:
            assert turn(**needs) is False
        assert len(told) == 1 and __file__ in str(told[0].message) and not outblas.enabled()
        assert getattr(torch, name)(*operands).eq(7).all() and not served.ran
    theirs._destroy()
    assert torch.equal(getattr(torch, name)(*operands), wanted)
    assert outblas.enable(**needs) and outblas.enable(batch_invariant=True)
    assert torch.equal(torch.mm(x, w), (x.double() @ w.double()).half()) and served.ran


def test_a_guarantee_that_would_drop_another_packages_kernel_leaves_the_weaker_on(on: Switch, served: Served) -> None:
    theirs = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.impl("addmm", seven, "CPU")
    with outblas.use() as entered:
        assert entered
        with pytest.warns(RuntimeWarning, match="aten::addmm"), outblas.use(batch_invariant=True) as stronger:
            assert not stronger
        torch.mm(numbers(3, 8), numbers(8, 5))
        assert outblas.enabled() and len(served.ran) == 1
    theirs._destroy()


def test_newer_kernels_of_torch_itself_are_replaced(
    on: Switch, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.13 registers a Triton kernel for aten::bmm on CUDA from Python."""
    monkeypatch.setattr(aten_override, "TORCH_FOLDER", os.path.dirname(__file__))
    newer = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        newer.impl("bmm", seven, "CPU")
    assert outblas.enable()
    assert not torch.bmm(numbers(1, 3, 8), numbers(1, 8, 5)).eq(7).all() and len(served.ran) == 1
    outblas.disable()
    newer._destroy()
