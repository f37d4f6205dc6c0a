"""The kernel of a fused product that the dispatch leaves to torch: predicted, and only where it pays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("numpy", reason="predictions are of numpy")

from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import kernel_choice  # noqa: E402
from outblas.dispatch.decide import Operand, problem_of_layer  # noqa: E402
from outblas.dispatch.kernel_choice import kernel_to_fuse, saved_us  # noqa: E402
from outblas.kernels.epilogue import Epilogue, why_not_fused  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from support.gpus.known import H200  # noqa: E402

GATED = Epilogue(activation="silu", gated=True)
RESIDUAL = Epilogue(residual=True)
P = Problem(500, 28672, 4096, "TN", "bf16")
KERNEL = Sm90WgmmaConfig(128, 128, stages=4, consumers=2)
SWAPPED = Sm90WgmmaConfig(64, 32, stages=4, swap=True)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[LibraryChoice]:
    """The predictions, those with the highest lower bound first; a test fills them in."""
    found: list[LibraryChoice] = []
    monkeypatch.setattr(kernel_choice, "predicted_kernels", lambda *given, **how: tuple(found))
    return found


def choice(config: Any, low: float) -> LibraryChoice:
    return LibraryChoice(config, low + 0.01, low, low + 0.02)


def none_failed(config: Any) -> bool:
    return False


def chosen(problem: Problem, epilogue: Epilogue) -> Any:
    return kernel_to_fuse(problem, epilogue, H200, Library("h200", ()), "plain", "", none_failed)


def test_a_kernel_that_loses_less_than_the_epilogue_saves_is_fused(offered: list[LibraryChoice]) -> None:
    offered.append(choice(KERNEL, 0.97))
    found = chosen(P, GATED)
    assert found.config == KERNEL and found.problem == P
    assert "surely 0.97" in found.reason and "saves about" in found.reason


def test_a_kernel_that_loses_more_is_not(offered: list[LibraryChoice]) -> None:
    offered.append(choice(KERNEL, 0.7))
    assert chosen(P, GATED) is None


def test_a_kernel_without_that_epilogue_is_passed_over(offered: list[LibraryChoice]) -> None:
    offered += [choice(SWAPPED, 1.3), choice(KERNEL, 1.0)]
    assert why_not_fused(P, SWAPPED, GATED) is not None
    assert chosen(P, GATED).config == KERNEL
    offered.pop()
    assert chosen(P, GATED) is None


def test_a_kernel_that_did_not_compile_is_passed_over(offered: list[LibraryChoice]) -> None:
    other = Sm90WgmmaConfig(64, 128, stages=4)
    offered += [choice(KERNEL, 1.1), choice(other, 1.05)]
    library = Library("h200", ())
    found = kernel_to_fuse(P, GATED, H200, library, "plain", "", lambda config: config == KERNEL)
    assert found is not None and found.config == other
    assert kernel_to_fuse(P, GATED, H200, library, "plain", "", lambda config: True) is None


@pytest.mark.parametrize(("low", "gains"), [(0.97, True), (0.7, False)])
def test_a_measured_kernel_goes_before_predicted_ones(low: float, gains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "predicted_kernels", lambda *given, **how: pytest.fail("predicted"))
    library = Library("h200", (LibraryRow(P, "lt_auto", nearest=choice(KERNEL, low)),))
    found = kernel_to_fuse(P, GATED, H200, library, "plain", "", none_failed)
    assert (found is not None) == gains
    assert found is None or (found.config == KERNEL and "times lt_auto by measurement, surely 0.97" in found.reason)


def test_a_measured_kernel_without_that_epilogue_is_passed_over(offered: list[LibraryChoice]) -> None:
    library = Library("h200", (LibraryRow(P, "lt_auto", nearest=choice(SWAPPED, 1.0)),))
    assert kernel_to_fuse(P, GATED, H200, library, "plain", "", none_failed) is None
    offered.append(choice(KERNEL, 1.0))
    found = kernel_to_fuse(P, GATED, H200, library, "plain", "", none_failed)
    assert found is not None and found.config == KERNEL and "torch.matmul by prediction" in found.reason


def test_a_bias_saves_nothing_so_the_kernel_must_win_alone(offered: list[LibraryChoice]) -> None:
    bias = Epilogue(bias=True)
    assert saved_us(P, bias, H200) == 0
    offered.append(choice(KERNEL, 1.0))
    assert chosen(P, bias) is None
    offered[0] = choice(KERNEL, 1.02)
    assert chosen(P, bias).config == KERNEL


def test_a_saving_counts_kernels_and_their_traffic() -> None:
    small, large = (saved_us(replace(P, m=m), RESIDUAL, H200) for m in (1, 8192))
    assert 1.5 < small < 2 and large > 100
    assert saved_us(P, GATED, H200) == pytest.approx(2 * saved_us(P, RESIDUAL, H200))
    both = Epilogue(activation="gelu", residual=True)
    assert saved_us(P, both, H200) == saved_us(P, GATED, H200)


def test_the_packaged_predictions_have_a_legal_kernel_for_each_step() -> None:
    library = Library.packaged("h200")
    for m in (1, 13, 100, 500):
        problem = replace(P, m=m)
        found = kernel_to_fuse(problem, GATED, H200, library, "plain", "", none_failed)
        assert found is not None and found.config is not None
        assert why_illegal(problem, found.config, H200) is None and not found.config.pdl


def test_a_gpu_without_predictions_has_none() -> None:
    unknown = replace(H200, name="nothing", arch=120)
    assert kernel_to_fuse(P, GATED, unknown, Library("nothing", ()), "plain", "", none_failed) is None


@pytest.mark.parametrize("n", [1, 28672])
def test_narrow_products_and_those_without_numpy_stay_with_torch(n: int, monkeypatch: pytest.MonkeyPatch) -> None:

    def missing(*given: Any, **how: Any) -> Any:
        assert n > 1, "not asked for"
        raise ImportError("no module named numpy")

    monkeypatch.setattr(kernel_choice, "predicted_kernels", missing)
    assert chosen(replace(P, n=n), RESIDUAL) is None


A, B = Operand((8, 64), (64, 1), "bf16", "cuda:0"), Operand((64, 32), (1, 64), "bf16", "cuda:0")


def test_the_problem_of_a_linear_layer() -> None:
    assert problem_of_layer(A, B) == Problem(8, 32, 64, "TN", "bf16")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (replace_operand, B)
        for replace_operand in (A._replace(offset=2), A._replace(strides=(1, 8)), A._replace(dtype="float32"))
    ]
    + [(A, B._replace(offset=8)), (A, B._replace(strides=(32, 1))), (A, B._replace(shape=(63, 32)))],
)
def test_no_problem_of_a_linear_layer(a: Operand, b: Operand) -> None:
    assert problem_of_layer(a, b) is None
