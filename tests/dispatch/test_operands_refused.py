"""Operands that a kernel must not be given, and what a launch must ask for: limits of which a mistake goes unseen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import decide, device_registry, product  # noqa: E402
from outblas.dispatch.capture.torch_mode import ProductMode  # noqa: E402
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.runtime import launch  # noqa: E402
from support.dispatch_fixture import rows  # noqa: E402
from support.gpus.known import H200  # noqa: E402


@pytest.mark.parametrize(
    ("config", "need"),
    [
        (Sm90WgmmaConfig(64, 64), 16), (Sm80MmaConfig(64, 64, vec=8), 16), (Sm80MmaConfig(64, 64, vec=4), 8),
        (Sm80MmaConfig(64, 64, vec=2), 4), (Sm80MmaConfig(64, 64, vec=1), 2), (Sm80DirectConfig(1, 1), 16),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@pytest.mark.parametrize("offset", [0, 2, 4, 6, 8, 10, 12, 14])
def test_a_kernel_is_given_operands_that_begin_where_its_loads_may(config: Any, need: int, offset: int) -> None:
    for place in range(3):
        operands = [rows(64, 64) for _ in range(3)]
        operands[place] = rows(64, 64, offset=offset)
        found = decide._by_kernel(config, Problem(64, 64, 64), tuple(operands), "measured")
        assert (found.config is None) == (offset % need != 0)
        assert offset % need == 0 or f"not aligned to {need} bytes" in found.reason


@pytest.mark.parametrize(("m", "legal"), [(1, True), (15, True), (16, True), (17, False), (64, False)])
def test_a_kernel_that_loads_few_rows_is_illegal_for_one_row_more(m: int, legal: bool) -> None:
    reason = why_illegal(Problem(m, 4096, 4096), Sm90WgmmaConfig(64, 64, l2="stream_b", a_rows=16), H200)
    assert (reason is None) == legal
    assert legal or f"M = {m} exceeds the 16 rows" in str(reason)


@pytest.mark.parametrize(("cluster", "asked"), [(1, False), (8, False), (9, True), (16, True)])
def test_clusters_of_more_than_eight_ask_for_the_kernels_consent(
    monkeypatch: pytest.MonkeyPatch, cluster: int, asked: bool
) -> None:
    names = ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED")
    attributes = SimpleNamespace(CUfunction_attribute=SimpleNamespace(**{name: name for name in names}))
    monkeypatch.setattr(launch, "driver", lambda: attributes)
    kernel: Any = launch.LoadedKernel.__new__(launch.LoadedKernel)
    given: dict[str, int] = {}
    kernel._set = lambda attribute, value: given.update({attribute: value})
    kernel._set_attributes(70000, cluster)
    assert given == {names[0]: 70000, **({names[1]: 1} if asked else {})}


def test_a_product_of_two_devices_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(product, "decide_and_run", lambda *given, by_class: asked.append(given))
    monkeypatch.setattr(product.native_table, "table", None)
    here, there = torch.ones(16, 16).half(), torch.ones(16, 16, device="meta").half()
    for a, b in ((here, there), (there, here), (there, there)):
        assert product.run_below_autograd(a, b) is None
    assert not asked
    product.run_below_autograd(here, here)
    assert len(asked) == 1


def test_a_product_without_numbers_is_not_captured() -> None:
    seen: list[Any] = []
    with ProductMode(seen.append):
        torch.mm(torch.ones(8, 8, device="meta").half(), torch.ones(8, 8, device="meta").half())
        assert not seen
        torch.mm(torch.ones(8, 8).half(), torch.ones(8, 8).half())
    assert len(seen) == 1
