"""The proof on a real GPU, and the margin of the bound's constant."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.baselines import CublasGemm  # noqa: E402
from outblas.judge.gates import CellProver, prove  # noqa: E402
from outblas.judge.gpu_clock import GpuClock  # noqa: E402
from outblas.judge.reference import ERROR_C  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.proof_shapes import proof_shapes  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.runtime.launch import load  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.helpers import needed_c  # noqa: E402

pytestmark = pytest.mark.gpu
KINDS = [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16")]
CONFIGS = [
    Sm90WgmmaConfig(64, 64),
    Sm90WgmmaConfig(64, 64, split_k=2, store="direct", pdl=True),
    Sm90WgmmaConfig(128, 128, consumers=2),
    Sm80MmaConfig(64, 64),
    Sm80MmaConfig(64, 64, vec=1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.family}-{c.bm}x{c.bn}-{CONFIGS.index(c)}")
@pytest.mark.parametrize(
    ("layout", "dtype", "acc"), [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16")]
)
def test_our_families_pass_every_gate(config, layout, dtype, acc):
    problem = Problem(64, 64, 64, layout, dtype, acc)
    kernel = load(compile_source(make_source(problem, config)), config)
    shapes = proof_shapes(problem, config, H200)
    assert shapes
    for shape in shapes:
        verdict = prove(kernel, shape)
        assert (verdict.status, verdict.detail) == (Status.PASSED, ""), shape.key
        assert verdict.gates[-1] == "rules"


@pytest.mark.parametrize("k", [64, 1024, 16384])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_cublas_itself_needs_less_than_the_bound_allows(dtype, k):
    """Large M and N, where cuBLAS does not split K (its half-precision partial sums are another matter)."""
    problem = Problem(2048, 2048, k, "TN", dtype)
    with GpuClock(problem, gpu=H200) as bench:
        a, b, c = bench.operands(0)
        CublasGemm().bind(problem, a, b, c)(bench.stream)
        bench.synchronize()
        assert needed_c(problem, a, b, c) < ERROR_C / 2


def test_a_cell_is_proved_on_the_timed_operands():
    problem = Problem(512, 512, 512)
    config = CONFIGS[0]
    kernel = load(compile_source(make_source(problem, config)), config)
    with GpuClock(problem, gpu=H200) as bench:
        prover = CellProver(bench.data, bench.torch_stream)
        assert prover.call(kernel.bind(problem, *bench.operands(0))).status is Status.PASSED
        assert prover.call(lambda stream: None).status is Status.WRONG
        graph = bench.capture(kernel)
        assert prover.graph(graph.executable).status is Status.PASSED
        graph.free()


def test_the_largest_of_the_grid_is_checked():
    problem = Problem(16384, 16384, 16384)
    with GpuClock(problem, gpu=H200) as bench:
        prover = CellProver(bench.data, bench.torch_stream)
        verdict = prover.call(CublasGemm().bind(problem, *bench.operands(0)))
        assert verdict.status is Status.PASSED and verdict.max_err_ratio < 1
