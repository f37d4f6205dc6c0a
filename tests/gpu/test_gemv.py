"""sm80_gemv_mma on ragged shapes: small integers, so that every sum is exact in whatever order it is made."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

from outblas.core.problem import Problem  # noqa: E402
from outblas.core.roofline import architecture  # noqa: E402
from outblas.judge.operands import torch_dtype  # noqa: E402
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.launch import load  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402

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
    "walk": Sm80GemvConfig(8, 16, 1, 8, 4, persistent=True),
    "walk_16_pdl": Sm80GemvConfig(16, 64, 1, 4, 2, pdl=True, persistent=True, l2="stream_b"),
    "walk_side_by_side": Sm80GemvConfig(16, 128, 2, 2, 1, persistent=True, kept_k=512),
    "walk_kept": Sm80GemvConfig(8, 16, 1, 16, 4, pdl=True, early=True, persistent=True, kept_k=8192),
    "warm": Sm80GemvConfig(8, 16, 1, 8, 4, pdl=True, early=True, warm_k=1000),
    "warm_split": Sm80GemvConfig(16, 64, 1, 4, 2, "shared", 3, pdl=True, early=True, warm_k=2048),
    "walk_warm": Sm80GemvConfig(8, 32, 1, 4, 2, pdl=True, early=True, persistent=True, kept_k=4112, warm_k=512),
    "walk_kept_16": Sm80GemvConfig(16, 16, 1, 4, 4, pdl=True, persistent=True, l2="stream_b", kept_k=2048),
    "walk_shared": Sm80GemvConfig(8, 16, 1, 8, 4, "shared", pdl=True, early=True, persistent=True),
    "walk_shared_kept": Sm80GemvConfig(16, 64, 1, 4, 3, "shared", persistent=True, kept_k=1024),
    "walk_shared_one_warp": Sm80GemvConfig(8, 64, 1, 1, 4, "shared", persistent=True),
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
#: Several tiles per CTA of a walk, some a tile more than others, the last one ragged; K of one step to several rounds.
WALKS = [(16 * 5000 + 8, 72), (64 * 700 + 24, 1032), (16 * 3000, 2048), (64 * 1700 - 8, 8), (16 * 1000 + 8, 8184)]


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


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.persistent])
def test_walks_over_several_tiles_give_every_tile_its_own_sums(name: str, layout: str, dtype: str) -> None:
    """Whole outputs against torch's, twice into the same C: what a tile leaves behind must not show in the next one."""
    config, gpu, ran = CONFIGS[name], gpu_of_device(0), 0
    for n, k in WALKS:
        problem = Problem(config.bm - 1, n, k, layout, dtype)  # type: ignore[arg-type]
        if why_illegal(problem, config, gpu) is not None:
            continue
        generator = torch.Generator(device="cuda").manual_seed(n)
        kind = torch_dtype(problem)
        a, b = (
            torch.randint(-1, 2, s, generator=generator, device="cuda").to(kind)
            * (torch.rand(s, generator=generator, device="cuda") < 0.1)
            for s in ((problem.m, k), problem.b_shape)
        )
        c = torch.full((problem.m, n), torch.nan, dtype=kind, device="cuda")
        call = kernel(problem, config).bind(problem, a, b, c)
        wanted = a.float() @ (b.float().t() if layout == "TN" else b.float())  # exact: small integers
        assert wanted.abs().max() <= 256, "the test's sums must be exact in bf16"
        for _ in range(2):
            c.fill_(torch.nan)
            torch.cuda.synchronize()  # early kernels want B at rest
            call(torch.cuda.current_stream().cuda_stream)
            torch.cuda.synchronize()
            assert torch.equal(c.float(), wanted), problem.key
        ran += 1
    rows_fit = layout == "TN" or config.bn // config.wn >= 64
    assert bool(ran) == rows_fit


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("name", ["walk_16_pdl", "walk_shared_one_warp"])
def test_a_grid_holds_no_more_ctas_than_are_resident(name: str, layout: str) -> None:
    """A walk gains nothing from CTAs that wait for others to end: the driver has to agree with geometry.gemv_blocks."""
    from outblas.kernels.families.sm80_gemv_mma import gemv_blocks_per_sm
    from outblas.kernels.geometry import geometry
    from outblas.runtime.driver import check, driver

    config, problem = CONFIGS[name], Problem(8, 64 * 1000, 1024, layout)  # type: ignore[arg-type]
    loaded, shape = kernel(problem, config), geometry(problem, config)
    loaded.bind(problem, *(torch.zeros(s, device="cuda", dtype=torch.float16) for s in (
        (8, 1024), problem.b_shape, (8, 64 * 1000)
    )))  # fmt: skip
    found = check(
        "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(loaded._function, shape.threads, shape.smem_bytes),
    )
    if gpu_of_device(0).arch == 90:
        assert found >= gemv_blocks_per_sm(problem, config)


@pytest.mark.parametrize(
    "name", ["registers_8", "shared_8", "registers_split", "shared_split_pdl", "walk", "walk_shared"]
)
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
