"""The replacement of torch's kernels, on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from outblas.dispatch.aten_override import Override  # noqa: E402


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
