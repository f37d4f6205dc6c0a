"""sm80_gemv_mma on ragged shapes: small integers, so that every sum is exact in whatever order it is made."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch

from outblas.compile import compile_source
from outblas.config import Sm80GemvConfig
from outblas.launch import load
from outblas.operands import torch_dtype
from outblas.problem import Problem
from outblas.source import make_source
from outblas.space import gpu_of_device, why_illegal
from outblas.worker import architecture

pytestmark = pytest.mark.gpu

CONFIGS = {
    "registers_8": Sm80GemvConfig(8, 16, 1, 8, 4),
    "registers_16": Sm80GemvConfig(16, 64, 2, 4, 2, prefetch=128),
    "registers_wide": Sm80GemvConfig(8, 64, 1, 8, 2),
    "registers_odd_unroll": Sm80GemvConfig(16, 64, 1, 5, 1),
    "registers_split": Sm80GemvConfig(8, 64, 1, 4, 2, split_k=4),
    "registers_split_pdl": Sm80GemvConfig(16, 64, 1, 4, 2, split_k=3, pdl=True),
    "shared_8": Sm80GemvConfig(8, 32, 1, 4, 4, "shared"),
    "shared_16": Sm80GemvConfig(16, 128, 2, 4, 2, "shared"),
    "shared_odd_unroll": Sm80GemvConfig(8, 64, 1, 8, 3, "shared", prefetch=128),
    "shared_one_warp": Sm80GemvConfig(16, 64, 1, 1, 2, "shared"),
    "shared_split_pdl": Sm80GemvConfig(16, 128, 2, 2, 2, "shared", 8, pdl=True),
}
#: N, K: one chunk, ragged rows, ragged steps, K shorter than the warps can share, many CTAs.
EXTENTS = [
    (8, 8),
    (64, 64),
    (72, 200),
    (136, 1032),
    (1000, 4104),
    (77, 328),
    (333, 136),
    (4096, 4096),
    (9 * 1024 + 8, 264),
]


@pytest.fixture(autouse=True)
def capable() -> None:
    if gpu_of_device(0).arch < 80:
        pytest.skip("mma.m16n8k16 needs sm_80")


def kernel(problem: Problem, config: Sm80GemvConfig) -> Any:
    torch.cuda.init()
    gpu = gpu_of_device(0)
    return load(compile_source(make_source(problem, config), architecture(gpu)), config)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("name", CONFIGS)
def test_small_integers_are_multiplied_exactly(name: str, layout: str, dtype: str) -> None:
    config, gpu, loaded, ran = CONFIGS[name], gpu_of_device(0), None, 0
    generator = torch.Generator(device="cuda").manual_seed(5)
    for m in (m for m in range(1, 17) if m <= config.bm):
        for n, k in EXTENTS:
            problem = Problem(m, n, k, layout, dtype)  # type: ignore[arg-type]
            if why_illegal(problem, config, gpu) is not None:
                continue
            loaded = loaded or kernel(problem, config)
            kind = torch_dtype(problem)
            # Entries of -1, 0, 1, most of them 0, so that bf16 holds the sums too.
            a, b = (
                torch.randint(-1, 2, s, generator=generator, device="cuda").to(kind)
                * (torch.rand(s, generator=generator, device="cuda") < 0.15)
                for s in ((m, k), problem.b_shape)
            )
            c = torch.full((m + 1, n), torch.nan, dtype=kind, device="cuda")  # a row more: nothing is stored there
            loaded.bind(problem, a, b, c[:m])(torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
            right = b.double().t() if layout == "TN" else b.double()
            wanted = a.double() @ right
            assert wanted.abs().max() <= 256, "the test's sums must be exact in bf16"
            assert torch.equal(c[:m].double(), wanted), problem.key
            assert torch.isnan(c[m:]).all(), f"{problem.key}: stored past M"
            ran += 1
    rows_fit = layout == "TN" or config.bn // config.wn >= 64
    if why_illegal(Problem(1, 64, 8192, layout), config, gpu) is None:  # type: ignore[arg-type]
        assert ran >= 8 and rows_fit


@pytest.mark.parametrize("name", ["registers_8", "shared_8", "registers_split", "shared_split_pdl"])
def test_infinities_stay_in_their_row_and_column(name: str) -> None:
    """Rows past N and tokens past M are padded inside the kernel: the padding must not spread a NaN."""
    config = CONFIGS[name]
    m, n, k = 3, 77, 1032
    problem = Problem(m, n, k)
    a = torch.ones(m, k, device="cuda", dtype=torch.float16)
    b = torch.ones(n, k, device="cuda", dtype=torch.float16)
    a[1, 5], b[0, k - 1] = torch.inf, torch.inf
    c = torch.zeros(m, n, device="cuda", dtype=torch.float16)
    kernel(problem, config).bind(problem, a, b, c)(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    expected = torch.full((m, n), float(k), device="cuda", dtype=torch.float16)
    expected[1], expected[:, 0] = torch.inf, torch.inf
    assert torch.equal(c, expected)
