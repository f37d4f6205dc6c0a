"""Representatives of all families, proved in full (all gates) on awkward and plain problems of every kind."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.errors import ConfigError, TensorError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge.gates import prove  # noqa: E402
from outblas.judge.operands import Operands, torch_dtype  # noqa: E402
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig  # noqa: E402
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig  # noqa: E402
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.kernels.proof_shapes import proof_shapes  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.launch import load  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402

pytestmark = pytest.mark.gpu

KINDS = [
    ("TN", "fp16", "fp32"),
    ("NN", "fp16", "fp32"),
    ("TN", "bf16", "fp32"),
    ("NN", "bf16", "fp32"),
    ("TN", "fp16", "fp16"),
    ("NN", "fp16", "fp16"),
]
CONFIGS: dict[str, KernelConfig] = {
    "wgmma_tile": Sm90WgmmaConfig(128, 128, stages=4, consumers=2),
    "wgmma_pdl": Sm90WgmmaConfig(64, 64, stages=6, pdl=True),
    "wgmma_narrow_direct": Sm90WgmmaConfig(64, 16, 128, store="direct"),
    "wgmma_bk128": Sm90WgmmaConfig(64, 96, 128, stages=3),
    "wgmma_wide": Sm90WgmmaConfig(128, 256, stages=3, consumers=2),
    "wgmma_three_consumers": Sm90WgmmaConfig(192, 128, stages=4, consumers=3),
    "wgmma_two_blocks": Sm90WgmmaConfig(64, 64, stages=4, min_blocks=2),
    "wgmma_split2": Sm90WgmmaConfig(128, 128, stages=3, consumers=2, split_k=2, store="direct"),
    "wgmma_split3": Sm90WgmmaConfig(64, 64, stages=4, split_k=3, store="direct"),
    "wgmma_split16_pdl": Sm90WgmmaConfig(64, 32, stages=3, split_k=16, store="direct", pdl=True),
    "wgmma_cluster_2x1": Sm90WgmmaConfig(128, 128, stages=4, consumers=2, cluster_m=2),
    "wgmma_cluster_1x2": Sm90WgmmaConfig(64, 128, stages=4, cluster_n=2, raster="n"),
    "wgmma_cluster_2x2": Sm90WgmmaConfig(128, 64, stages=4, consumers=2, cluster_m=2, cluster_n=2, group=3),
    "wgmma_split_cluster": Sm90WgmmaConfig(64, 64, stages=3, cluster_m=2, split_k=2, store="direct"),
    "wgmma_persistent": Sm90WgmmaConfig(128, 256, stages=3, consumers=2, persistent=True, raster="n"),
    "wgmma_persistent_cluster": Sm90WgmmaConfig(128, 192, stages=3, consumers=2, cluster_m=2, persistent=True),
    "wgmma_pingpong": Sm90WgmmaConfig(64, 256, stages=4, consumers=2, schedule="pingpong", persistent=True),
    "wgmma_pingpong_cluster": Sm90WgmmaConfig(
        128, 128, stages=4, consumers=2, schedule="pingpong", cluster_n=2, persistent=True, pdl=True
    ),
    "wgmma_stagger": Sm90WgmmaConfig(256, 128, stages=4, consumers=2, schedule="stagger", persistent=True),
    "wgmma_stagger_cluster": Sm90WgmmaConfig(
        128, 256, stages=4, consumers=2, schedule="stagger", cluster_m=2, persistent=True, raster="n", pdl=True
    ),
    "wgmma_stagger_one_tile": Sm90WgmmaConfig(128, 64, stages=8, consumers=2, schedule="stagger"),
    # More stages than most representatives have K tiles: some are given back without having been filled.
    "wgmma_multicast_deep": Sm90WgmmaConfig(64, 64, stages=9, cluster_m=2, cluster_n=2, group=3),
    "wgmma_multicast_deep_persistent": Sm90WgmmaConfig(64, 32, stages=12, cluster_m=4, persistent=True, raster="n"),
    "wgmma_multicast_deep_split": Sm90WgmmaConfig(64, 32, stages=8, cluster_n=2, split_k=2, store="direct"),
    "wgmma_workspace": Sm90WgmmaConfig(64, 64, stages=6, split_k=4, store="direct", split_kind="workspace"),
    "wgmma_workspace_2x1_pdl": Sm90WgmmaConfig(
        128, 128, stages=5, consumers=2, cluster_m=2, split_k=3, store="direct", pdl=True, split_kind="workspace"
    ),
    "wgmma_multicast_deep_workspace": Sm90WgmmaConfig(
        64, 32, stages=8, cluster_n=2, split_k=2, raster="n", store="direct", split_kind="workspace"
    ),
    "wgmma_multicast_hints": Sm90WgmmaConfig(128, 64, stages=4, consumers=2, cluster_m=2, l2="stream_ac"),
    "wgmma_hints": Sm90WgmmaConfig(64, 128, stages=4, l2="stream_bc"),
    "wgmma_shift": Sm90WgmmaConfig(128, 96, stages=4, consumers=2, shift=True),
    "wgmma_shift_walk_cluster": Sm90WgmmaConfig(
        128, 128, stages=4, consumers=2, schedule="pingpong", cluster_m=2, persistent=True, shift=True
    ),
    "wgmma_shift_split": Sm90WgmmaConfig(64, 64, stages=4, cluster_n=2, split_k=2, store="direct", shift=True),
    "wgmma_shift_workspace": Sm90WgmmaConfig(
        64, 80, stages=4, split_k=3, store="direct", split_kind="workspace", shift=True
    ),
    "wgmma_few_rows": Sm90WgmmaConfig(64, 32, 128, stages=9, a_rows=16),
    "wgmma_few_rows_read_past_the_ring": Sm90WgmmaConfig(64, 16, stages=4, store="direct", a_rows=8),
    "wgmma_few_rows_split": Sm90WgmmaConfig(64, 48, stages=6, split_k=3, store="direct", a_rows=40),
    "wgmma_few_rows_workspace": Sm90WgmmaConfig(
        64, 64, 128, stages=4, split_k=3, store="direct", split_kind="workspace", a_rows=32
    ),
    "wgmma_few_rows_walk": Sm90WgmmaConfig(64, 64, stages=8, persistent=True, l2="stream_b", a_rows=56),
    "wgmma_few_rows_multicast": Sm90WgmmaConfig(64, 64, stages=6, cluster_n=2, a_rows=32),
    "wgmma_few_rows_pingpong": Sm90WgmmaConfig(
        64, 64, stages=6, consumers=2, schedule="pingpong", persistent=True, a_rows=24
    ),
    "wgmma_fitted_rows": Sm90WgmmaConfig(64, 32, 128, stages=9, a_rows=15),
    "wgmma_fitted_rows_early": Sm90WgmmaConfig(64, 16, stages=6, store="direct", a_rows=7, pdl=True, early=True),
    "wgmma_fitted_rows_split": Sm90WgmmaConfig(64, 48, stages=6, split_k=3, store="direct", a_rows=39),
    "wgmma_fitted_rows_workspace": Sm90WgmmaConfig(
        64, 64, 128, stages=4, split_k=3, store="direct", split_kind="workspace", a_rows=31
    ),
    "wgmma_fitted_rows_walk": Sm90WgmmaConfig(64, 64, stages=8, persistent=True, l2="stream_b", a_rows=63),
    "wgmma_fitted_rows_pingpong": Sm90WgmmaConfig(
        64, 64, stages=6, consumers=2, schedule="pingpong", persistent=True, a_rows=23
    ),
    "mma_tile": Sm80MmaConfig(64, 64),
    "mma_pdl": Sm80MmaConfig(32, 32, 64, 6, 2, 2, 2, pdl=True),
    "mma_warps_over_k": Sm80MmaConfig(16, 16, 128, 4, 1, 1, 8),
    "mma_split": Sm80MmaConfig(16, 32, 64, 4, 1, 1, 4, split_k=4),
    "mma_large": Sm80MmaConfig(128, 128, 64, 3, 2, 4),
    "mma_one_stage": Sm80MmaConfig(64, 64, 64, 1, 2, 4),
    "mma_quads": Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=4),
    "mma_pairs": Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=2),
    "mma_scalar": Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=1),
    "mma_scalar_split": Sm80MmaConfig(16, 16, 64, 4, 1, 1, 4, split_k=2, vec=1, pdl=True),
    "direct_one_warp": Sm80DirectConfig(16, 8),
    "direct_wide": Sm80DirectConfig(64, 64, 2, 2, 1, 2),
    "direct_tall": Sm80DirectConfig(64, 8, 1, 1, 2, 1),
    "direct_warps_over_k": Sm80DirectConfig(16, 16, 1, 1, 8, 4),
    "direct_uneven_pdl": Sm80DirectConfig(32, 32, 1, 2, 3, 3, pdl=True),
    "direct_sixteen_warps": Sm80DirectConfig(16, 32, 1, 1, 16, 1),
    "oddrows_tile": Sm90OddrowsConfig(128, 128, consumers=2),
    "oddrows_largest": Sm90OddrowsConfig(128, 256, stages=4, consumers=2),
    "oddrows_tall": Sm90OddrowsConfig(256, 128, stages=4, consumers=2),
    "oddrows_deep": Sm90OddrowsConfig(128, 128, 128, 3, consumers=2),
    "oddrows_three_spans": Sm90OddrowsConfig(64, 192, stages=5),
    "oddrows_two_blocks": Sm90OddrowsConfig(128, 64, stages=5),
    "oddrows_three_ctas": Sm90OddrowsConfig(64, 64, stages=4, min_blocks=3, pdl=True),
    "oddrows_split": Sm90OddrowsConfig(128, 128, stages=4, consumers=2, split_k=3),
    "oddrows_split_pdl": Sm90OddrowsConfig(64, 64, stages=4, split_k=7, pdl=True, early=True),
    "oddrows_few_rows": Sm90OddrowsConfig(64, 64, stages=8, a_rows=16),
    "oddrows_fewest_rows_split": Sm90OddrowsConfig(64, 128, 128, 4, split_k=4, a_rows=8),
    "pipelined_tile": Sm80PipelinedConfig(128, 128),
    "pipelined_largest": Sm80PipelinedConfig(256, 128, 64, 3, 4, 2),
    "pipelined_wide": Sm80PipelinedConfig(128, 256, 32, 3, 2, 4),
    "pipelined_shallow": Sm80PipelinedConfig(128, 64, 16, 6),
    "pipelined_two_stages": Sm80PipelinedConfig(64, 128, 64, 2),
    "pipelined_two_stages_of_one_step": Sm80PipelinedConfig(64, 64, 16, 2),
    "pipelined_odd_96": Sm80PipelinedConfig(128, 96, 64, 3),
    "pipelined_odd_160": Sm80PipelinedConfig(128, 160, 32, 4, 4, 2),
    "pipelined_odd_192": Sm80PipelinedConfig(64, 192, 32, 4, 2, 4, group=3),
    "pipelined_odd_warps": Sm80PipelinedConfig(96, 144, 64, 3, 2, 3),
    "pipelined_one_warp": Sm80PipelinedConfig(16, 48, 64, 4, 1, 1),
    "pipelined_sixteen_warps": Sm80PipelinedConfig(128, 128, 32, 4, 4, 4, min_blocks=1),
    "pipelined_two_ctas": Sm80PipelinedConfig(64, 64, 32, 4, min_blocks=2, pdl=True),
    "pipelined_walk": Sm80PipelinedConfig(128, 128, 32, 4, persistent=True),
    "pipelined_walk_two_ctas": Sm80PipelinedConfig(64, 96, 32, 6, persistent=True, min_blocks=2, pdl=True),
    "pipelined_walk_largest": Sm80PipelinedConfig(256, 128, 32, 4, 4, 2, persistent=True, group=2),
    "pipelined_split": Sm80PipelinedConfig(128, 128, 32, 4, split_k=3),
    "pipelined_split_largest": Sm80PipelinedConfig(256, 128, 32, 3, 4, 2, split_k=2, pdl=True),
    "pipelined_split_narrow": Sm80PipelinedConfig(16, 64, 64, 4, 1, 4, split_k=12),
    "pipelined_quads": Sm80PipelinedConfig(64, 96, 32, 4, vec=4),
    "pipelined_pairs_walk": Sm80PipelinedConfig(64, 64, 64, 3, vec=2, persistent=True),
    "pipelined_scalar": Sm80PipelinedConfig(128, 96, 32, 3, vec=1),
    "pipelined_scalar_split": Sm80PipelinedConfig(32, 64, 16, 4, 1, 2, split_k=2, vec=1, pdl=True),
    "mma_even": Sm80MmaConfig(16, 16, 256, 4, 1, 1, 8, pdl=True, even=True),
    "direct_even": Sm80DirectConfig(32, 32, 1, 2, 3, 3, pdl=True, even=True),
    "gemv_registers": Sm80GemvConfig(8, 64, 1, 8, 2),
    "gemv_narrow": Sm80GemvConfig(8, 16, 1, 4, 4),
    "gemv_shared": Sm80GemvConfig(16, 128, 2, 4, 2, "shared"),
    "gemv_split": Sm80GemvConfig(16, 64, 1, 4, 2, split_k=4),
    "gemv_shared_split_pdl": Sm80GemvConfig(8, 64, 1, 8, 2, "shared", 8, pdl=True),
}


def rows(config: KernelConfig, many: int) -> int:
    """M of a problem that the config can serve."""
    if isinstance(config, Sm80GemvConfig):
        return config.bm
    return getattr(config, "a_rows", 0) or many


@pytest.fixture(autouse=True)
def capable() -> None:
    if gpu_of_device(0).arch != 90:
        pytest.skip("these kernels are Hopper's")


def kernel(problem: Problem, config: KernelConfig) -> Any:
    torch.cuda.init()
    return load(compile_source(make_source(problem, config)), config)


@pytest.mark.parametrize("kind", KINDS, ids="_".join)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_gate_on_every_representative(name: str, kind: tuple[str, str, str]) -> None:
    config, gpu = CONFIGS[name], gpu_of_device(0)
    any_size = Problem(rows(config, 1024), 1024, 4096, *kind)  # type: ignore[arg-type]
    reason = why_illegal(any_size, config, gpu)
    if reason:
        pytest.skip(f"not legal: {reason}")
    problems = proof_shapes(any_size, config, gpu)
    assert len(problems) >= 2
    loaded = kernel(any_size, config)
    for problem in problems:
        verdict = prove(loaded, problem)
        assert verdict.status is Status.PASSED, f"{problem.key}: {verdict.detail}"


@pytest.mark.parametrize("name", CONFIGS)
def test_two_runs_are_bitwise_equal(name: str) -> None:
    """Also over two operand sets at other addresses, on another stream, with other work beside it."""
    config = CONFIGS[name]
    problem = Problem(rows(config, 1000), 1032, 4104)
    loaded = kernel(problem, config)
    data = Operands(problem, 2, "cuda:0")
    data.fill_normal(3)
    data.set_inputs(1, *data[0][:2])
    calls = [loaded.bind(problem, *data[i]) for i in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    first = None
    for _ in range(5):
        for index in range(2):
            data.poison(index)
        torch.cuda.synchronize()
        for call, stream in zip(calls, streams, strict=True):
            call(stream.cuda_stream)
        torch.cuda.synchronize()
        bits = [data[i][2].view(torch.int16).clone() for i in range(2)]
        first = bits[0] if first is None else first
        assert all(torch.equal(first, b) for b in bits)


@pytest.mark.parametrize("split_k", [3, 4, 8])
@pytest.mark.parametrize("bm, bn, consumers", [(64, 48, 1), (64, 32, 1), (128, 192, 2), (256, 64, 2)])
def test_a_sum_has_the_same_bits_in_both_tiles_that_have_it(bm: int, bn: int, consumers: int, split_k: int) -> None:
    """With ``shift``, tiles at the edges overlap: C as a part of a larger C, where none does, has the same bits."""
    config = Sm90WgmmaConfig(bm, bn, 64, 3, consumers, split_k=split_k, store="direct", shift=True)
    whole = Problem(3 * bm, 3 * bn, 4096)
    part = Problem(3 * bm - 24, 3 * bn - 16, 4096)
    generator = torch.Generator(device="cuda").manual_seed(2)
    a = torch.randn(whole.m, whole.k, generator=generator, device="cuda").half()
    b = torch.randn(whole.n, whole.k, generator=generator, device="cuda").half()
    results = []
    for problem in (whole, part):
        c = torch.full((problem.m, problem.n), torch.nan, dtype=torch.float16, device="cuda")
        call = kernel(problem, config).bind(problem, a[: problem.m], b[: problem.n], c)
        call(torch.cuda.current_stream().cuda_stream)
        results.append(c)
    torch.cuda.synchronize()
    assert torch.equal(results[0][: part.m, : part.n], results[1])


@pytest.mark.parametrize("name", [name for name in CONFIGS if "multicast_deep" in name])
def test_multicast_ends_well_whatever_was_filled(name: str) -> None:
    """Every CTA waits for exactly the peers of its loads, for K up to a little more than the ring's stages.

    Small integers make every sum exact.
    """
    config = CONFIGS[name]
    assert isinstance(config, Sm90WgmmaConfig)
    generator, loaded = torch.Generator(device="cuda").manual_seed(1), None
    for tiles in range(config.split_k, config.split_k * (config.stages + 2) + 1):
        problem = Problem(9 * config.bm + 5, 5 * config.bn + 8, config.bk * tiles - 8 * (tiles % 3))
        loaded = loaded or kernel(problem, config)
        a, b = (
            torch.randint(-2, 3, s, generator=generator, device="cuda").half()
            for s in ((problem.m, problem.k), problem.b_shape)
        )
        c = torch.empty(problem.m, problem.n, dtype=torch.float16, device="cuda")
        call = loaded.bind(problem, a, b, c)
        for _ in range(20):
            c.fill_(torch.nan)
            for _ in range(8):
                call(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert torch.equal(c.double(), a.double() @ b.double().t()), problem.key


@pytest.mark.parametrize("name", ["wgmma_tile", "direct_one_warp"])
@pytest.mark.parametrize("offset", [2, 8])
def test_misaligned_operands_are_refused(offset: int, name: str) -> None:
    problem, config = Problem(64, 64, 64), CONFIGS[name]
    flat = torch.zeros(64 * 64 + 64, dtype=torch.float16, device="cuda:0")
    good = [torch.zeros(64, 64, dtype=torch.float16, device="cuda:0") for _ in range(2)]
    bad = flat[offset // 2 : offset // 2 + 64 * 64].view(64, 64)
    loaded = kernel(problem, config)
    for operands in ((bad, *good), (good[0], bad, good[1]), (*good, bad)):
        with pytest.raises(TensorError, match=f"starts {offset} bytes past a multiple of 16"):
            loaded.bind(problem, *operands)


def test_scalar_loads_take_any_address() -> None:
    problem, config = Problem(63, 64, 65), CONFIGS["mma_scalar"]
    shapes = ((63, 65), (64, 65), (63, 64))
    a, b, c = (torch.randn(r * s + 1, device="cuda:0").half()[1:].view(r, s) for r, s in shapes)
    kernel(problem, config).bind(problem, a, b, c)(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert torch.allclose(c.double(), a.double() @ b.double().t(), rtol=2e-3, atol=2e-2)


def test_an_illegal_config_is_refused_when_it_is_bound() -> None:
    problem, config = Problem(64, 64, 64), CONFIGS["wgmma_split2"]
    tensors = [torch.zeros(64, 64, dtype=torch_dtype(problem), device="cuda:0") for _ in range(3)]
    with pytest.raises(ConfigError, match="split_k 2 exceeds the 1 K tiles"):
        kernel(problem, config).bind(problem, *tensors)
