"""Every example free kernel proved in full on ragged extents, and the deliberately wrong one found out."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

from outblas.core.errors import ToolchainMissing  # noqa: E402
from outblas.core.evaluation import Status, Verdict  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.gates import prove  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas_lab.custom.examples.example_kernels import example, example_names  # noqa: E402
from outblas_lab.custom.free_kernel import FreeKernel  # noqa: E402
from outblas_lab.jail.build import build  # noqa: E402
from outblas_lab.jail.free_launch import load  # noqa: E402

pytestmark = pytest.mark.gpu

#: No extent is whole tiles of any example; more steps of K than stages, and fewer.
RAGGED = (Problem(200, 264, 712), Problem(72, 136, 24), Problem(5, 520, 4104))
FEW_ROWS = (Problem(5, 264, 4104), Problem(17, 40, 72), Problem(64, 136, 24))
BOTH_LAYOUTS = ("naive", "shared_tiles", "mma_direct", "cp_async_stages", "cute_sm80", "cutlass_pingpong")
BAD = Path(__file__).parents[1] / "support" / "free_kernels"


def proved(kernel: FreeKernel, problem: Problem, folder: Path) -> Verdict:
    """These are our own texts: they are loaded here, not in a jail. Skips where a compiler is missing."""
    gpu = gpu_of_device(0)
    if gpu.arch != 90:
        pytest.skip("the kernels are Hopper's")
    assert kernel.launch.why_not(problem, gpu) is None
    try:
        loaded = load(build(kernel, problem, gpu), folder, None, gpu)
    except ToolchainMissing as error:
        pytest.skip(str(error))
    verdict = prove(loaded, problem, None, "full")
    assert verdict.status is not Status.PASSED or not loaded.broken_workspace()
    return verdict


@pytest.mark.parametrize("name", example_names())
def test_it_is_right(name: str, tmp_path: Path) -> None:
    for problem in FEW_ROWS if name == "few_rows" else RAGGED:
        verdict = proved(example(name), problem, tmp_path)
        assert verdict.status is Status.PASSED, f"{problem.key}: {verdict}"


@pytest.mark.parametrize("name", example_names())
def test_it_is_right_in_bf16(name: str, tmp_path: Path) -> None:
    problem = Problem(40 if name == "few_rows" else 200, 264, 328, dtype="bf16")
    verdict = proved(example(name), problem, tmp_path)
    assert verdict.status is Status.PASSED, verdict


@pytest.mark.parametrize("name", BOTH_LAYOUTS)
def test_it_is_right_in_nn(name: str, tmp_path: Path) -> None:
    verdict = proved(example(name), Problem(200, 264, 328, "NN"), tmp_path)
    assert verdict.status is Status.PASSED, verdict


def test_many_tiles_of_a_persistent_kernel_and_many_parts_of_k(tmp_path: Path) -> None:
    for name, problem in (("wgmma_persistent", Problem(2056, 2312, 328)), ("split_k", Problem(72, 136, 4104))):
        verdict = proved(example(name), problem, tmp_path)
        assert verdict.status is Status.PASSED, f"{name}: {verdict}"


def test_the_deliberately_wrong_one_is_found_and_the_slow_one_is_right(tmp_path: Path) -> None:
    wrong = FreeKernel.parse((BAD / "wrong_index.cu").read_text())
    assert proved(wrong, Problem(64, 64, 64), tmp_path).status is Status.WRONG
    slow = FreeKernel.parse((BAD / "slow.cu").read_text())
    assert proved(slow, Problem(33, 40, 72), tmp_path).status is Status.PASSED
