"""The one legality predicate: each rule has a case that only it refuses, and what it allows compiles."""

from __future__ import annotations

import random
import runpy
from dataclasses import fields, replace
from importlib import resources
from typing import Any

import pytest

from helpers import ROOT
from outblas.config import KernelConfig, config_name
from outblas.device import gpu_of_device
from outblas.errors import DeviceError, UsageError
from outblas.geometry import geometry
from outblas.kernels.catalogue import candidates, catalogue
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.kernels.geometry_terms import MAX_CLUSTER
from outblas.kernels.legality import why_illegal
from outblas.pool import pool
from outblas.problem import Problem
from outblas.roofline import H200
from outblas.source import make_source
from outblas.suites import GRID, suite

P = Problem(4096, 4096, 4096)
NN = replace(P, layout="NN")
W = Sm90WgmmaConfig(128, 128, consumers=2)
PINGPONG = replace(W, schedule="pingpong", persistent=True)
SPLIT = replace(W, split_k=2, store="direct")
WORKSPACE = replace(SPLIT, split_kind="workspace")
SMALL = Problem(512, 512, 8192)
M = Sm80MmaConfig(64, 64)
D, DECODE = Problem(8, 4096, 4096), Problem(16, 4096, 4096)
DECODE_NN = replace(DECODE, layout="NN")
FEW = Problem(16, 4096, 4096)
G = Sm80GemvConfig(16, 64, 1, 8, 2)
T = Sm80DirectConfig(32, 16, wk=4)
A100 = replace(H200, name="a100", arch=80, smem_optin=166912)
BLACKWELL = replace(H200, name="b200", arch=100)

RULES: list[tuple[Problem, KernelConfig, Any, str]] = [
    (P, W, A100, "wgmma needs sm_90, not sm_80"),
    (P, W, BLACKWELL, "wgmma needs sm_90, not sm_100"),
    (replace(P, k=4100), W, H200, "rows are not multiples of 16 bytes"),
    (replace(P, n=4100), W, H200, "rows are not multiples of 16 bytes"),
    (P, replace(W, consumers=4, bm=256), H200, "consumers must be 1, 2 or 3"),
    (P, replace(W, consumers=0), H200, "must be"),
    (P, replace(W, cluster_n=0), H200, "extents must be positive"),
    (P, replace(W, cluster_m=0), H200, "extents must be positive"),
    (P, replace(W, bk=0), H200, "must be"),
    (P, replace(W, bm=96), H200, "bm must be"),
    (P, replace(W, bm=320), H200, "bm must be"),
    (P, replace(W, bn=12), H200, "bn must be a multiple of 8"),
    (P, replace(W, bn=264), H200, "bn must be a multiple of 8"),
    (P, replace(W, bk=32), H200, "bk must be 64 or 128"),
    (P, replace(W, stages=1), H200, "stages must be 2 to 16"),
    (P, replace(W, stages=17, bn=8), H200, "stages must be 2 to 16"),
    (P, replace(W, bm=192), H200, "consumers do not divide"),
    (P, replace(PINGPONG, consumers=1), H200, "pingpong needs 2 consumers and persistent"),
    (P, replace(PINGPONG, persistent=False), H200, "pingpong needs 2 consumers and persistent"),
    (P, replace(W, schedule="stagger", consumers=1), H200, "stagger needs 2 consumers"),
    (P, replace(W, schedule="stagger", consumers=3, bm=192), H200, "stagger needs 2 consumers"),
    (P, replace(W, split_k=0), H200, "extents must be positive"),
    (P, replace(W, group=0), H200, "extents must be positive"),
    (P, replace(W, cluster_m=4, cluster_n=8), H200, "at most 16 CTAs"),
    (P, replace(SPLIT, cluster_m=4, split_k=8), H200, "at most 16 CTAs"),
    (P, replace(SPLIT, store="tma"), H200, "split_k stores directly"),
    (P, replace(SPLIT, persistent=True), H200, "split_k stores directly"),
    (P, replace(W, cluster_n=3), H200, "cluster_n does not slice the rows of A"),
    (FEW, Sm90WgmmaConfig(64, 64, a_rows=24, cluster_n=2), H200, "cluster_n does not slice the rows of A"),
    (FEW, Sm90WgmmaConfig(64, 64, a_rows=20), H200, "cluster_n does not slice the rows of A"),
    (FEW, Sm90WgmmaConfig(128, 64, a_rows=32), H200, "a_rows must be 0, or 8 to 56 with bm 64"),
    (FEW, Sm90WgmmaConfig(64, 64, a_rows=64), H200, "a_rows must be 0, or 8 to 56 with bm 64"),
    (FEW, Sm90WgmmaConfig(64, 64, a_rows=8), H200, "M = 16 exceeds the 8 rows of A that are loaded"),
    (P, replace(W, cluster_m=3), H200, "cluster_m does not slice bn"),
    (NN, replace(W, cluster_m=3), H200, "cluster_m does not slice bk"),
    (NN, replace(W, bn=24), H200, "NN needs bn a multiple of 16"),
    (P, replace(W, min_blocks=0), H200, "must be"),
    (P, replace(W, min_blocks=5), H200, "min_blocks must be 1 to 4"),
    (P, replace(W, min_blocks=2), H200, "min_blocks above 1 needs one consumer"),
    (P, Sm90WgmmaConfig(256, 256, stages=2, consumers=2), H200, "the budget is"),
    (P, Sm90WgmmaConfig(64, 256, stages=2, min_blocks=4), H200, "the budget is"),
    (replace(P, k=64), SPLIT, H200, "split_k 2 exceeds the 1 K tiles"),
    (Problem(2**22, 8, 8), replace(W, bm=64, consumers=1, raster="n"), H200, "CTAs exceeds 65535 along y or z"),
    (P, replace(W, stages=8), H200, "bytes of shared memory exceed 232448"),
    (P, Sm90WgmmaConfig(64, 64, stages=8, min_blocks=2), H200, "bytes of shared memory exceed"),
    (P, replace(M, bm=0), H200, "extents must be positive"),
    (P, M, replace(H200, arch=75), "needs sm_80, not sm_75"),
    (P, replace(M, wm=3), H200, "wm does not divide"),
    (P, replace(M, wn=3), H200, "wn does not divide"),
    (P, replace(M, wk=3), H200, "wk does not divide"),
    (SMALL, replace(WORKSPACE, split_k=1), H200, "a workspace is for split_k 2 to 32"),
    (SMALL, replace(WORKSPACE, split_k=33), H200, "a workspace is for split_k 2 to 32"),
    (SMALL, replace(WORKSPACE, persistent=True), H200, "split_k stores directly and is not persistent"),
    (P, WORKSPACE, H200, "a workspace of 134283264 bytes exceeds 64 MiB"),
    (replace(SMALL, k=1024), replace(WORKSPACE, split_k=32), H200, "split_k 32 exceeds the 16 K tiles"),
    (P, replace(M, bk=96), H200, "bk must be 32, 64, 128 or 256"),
    (P, replace(M, bk=256, stages=1, wk=8), H200, "at most 16 warps"),
    (P, replace(M, stages=9), H200, "stages must be 1 to 8"),
    (P, replace(M, vec=3), H200, "vec must be 1, 2, 4 or 8"),
    (replace(P, k=4100), M, H200, "rows are not multiples of vec = 8"),
    (replace(NN, n=4098), replace(M, vec=4), H200, "rows are not multiples of vec = 4"),
    (P, replace(M, split_k=17), H200, "at most 16 CTAs"),
    (P, replace(M, split_k=2), A100, "cluster split-K needs sm_90"),
    (P, replace(M, pdl=True), A100, "programmatic dependent launch needs sm_90"),
    (NN, replace(M, bn=96, wn=2), H200, "NN needs bn a power of two"),
    (P, Sm80MmaConfig(128, 256, wm=1, wn=4), H200, "accumulator registers are too many"),
    (replace(P, k=64), replace(M, split_k=2), H200, "split_k 2 exceeds the 1 K tiles"),
    (P, replace(M, bm=128, bn=128, bk=128, wn=4, stages=4), H200, "bytes of shared memory exceed"),
    (D, replace(G, bm=0), H200, "extents must be positive"),
    (D, replace(G, unroll=0), H200, "extents must be positive"),
    (D, G, replace(H200, arch=75), "needs sm_80, not sm_75"),
    (replace(D, acc="fp16"), G, H200, "sums are kept in fp32, not fp16"),
    (D, replace(G, bm=24), H200, "bm must be 8 or 16"),
    (replace(D, m=17), G, H200, "M = 17 exceeds the 16 tokens"),
    (DECODE, replace(G, bm=8), H200, "M = 16 exceeds the 8 tokens"),
    (replace(D, k=4100), G, H200, "rows are not multiples of vec = 8"),
    (replace(DECODE_NN, n=4100), G, H200, "rows are not multiples of vec = 8"),
    (D, replace(G, wn=3), H200, "wn does not divide bn"),
    (D, replace(G, bn=48), H200, "TN needs bn / wn of 16, 32, 64 or 128"),
    (DECODE_NN, replace(G, bn=32), H200, "NN needs bn / wn of 64 or 128"),
    (D, replace(G, wn=4, wk=8), H200, "at most 16 warps"),
    (D, replace(G, bn=16, unroll=9, ring="shared"), H200, "unroll must be 1 to 8"),
    (D, replace(G, prefetch=64), H200, "prefetch must be 128 or 256"),
    (D, replace(G, split_k=17), H200, "at most 16 CTAs"),
    (D, replace(G, split_k=2), A100, "cluster split-K needs sm_90"),
    (D, replace(G, pdl=True), A100, "programmatic dependent launch needs sm_90"),
    (D, replace(G, unroll=4), H200, "registers of operands and sums"),
    (D, replace(G, bn=32, wk=16, ring="shared", unroll=4), H200, "bytes of shared memory exceed"),
    (replace(D, k=64), replace(G, split_k=2), H200, "split_k 2 exceeds the 1 K tiles"),
    (D, replace(G, split_k=2, persistent=True), H200, "split_k is not persistent"),
    (D, replace(G, l2="stream_c"), H200, "stream_c is not for this family"),
    (D, replace(G, ring="shared", l2="stream_b"), H200, "stream_b needs the ring in registers"),
    (D, replace(G, kept_k=4096), H200, "kept_k needs persistent"),
    (D, replace(G, warm_k=4096), H200, "warm_k needs early"),
    (D, replace(G, pdl=True, early=True, warm_k=12), H200, "warm_k must be a multiple of 8"),
    (DECODE_NN, replace(G, pdl=True, early=True, warm_k=64), H200, "warm_k needs K-major weights"),
    (D, replace(G, persistent=True, kept_k=-1), H200, "kept_k must be 0 to"),
    (replace(D, k=4104), replace(G, persistent=True, kept_k=4096), H200, "K = 4104 exceeds the kept_k"),
    (replace(D, k=8192), replace(G, bm=16, persistent=True, kept_k=16384), H200, "bytes of shared memory exceed"),
    (P, replace(T, bn=0), H200, "extents must be positive"),
    (P, replace(T, unroll=0), H200, "extents must be positive"),
    (P, T, replace(H200, arch=75), "needs sm_80, not sm_75"),
    (replace(P, k=4100), T, H200, "rows are not multiples of 16 bytes"),
    (replace(NN, n=4100), T, H200, "rows are not multiples of 16 bytes"),
    (replace(P, n=4100), T, H200, "rows are not multiples of 16 bytes"),  # C's
    (P, replace(T, bm=48), H200, "bm / wm must be 16, 32 or 64"),
    (P, replace(T, bm=40), H200, "bm / wm must be 16, 32 or 64"),
    (P, replace(T, bm=8), H200, "bm / wm must be 16, 32 or 64"),
    (P, replace(T, bn=24), H200, "bn / wn must be 8, 16 or 32"),
    (P, replace(T, bn=64, unroll=1), H200, "bn / wn must be 8, 16 or 32"),
    (P, replace(T, bn=8, wn=2), H200, "bn / wn must be 8, 16 or 32"),
    (P, replace(T, wk=17), H200, "at most 16 warps"),
    (P, replace(T, bm=64, bn=32, wm=2, wn=2, wk=5), H200, "at most 16 warps"),
    (P, replace(T, bm=16, bn=8, unroll=9), H200, "unroll must be 1 to 8"),
    (P, replace(T, pdl=True), A100, "programmatic dependent launch needs sm_90"),
    (P, replace(T, even=True), H200, "even needs pdl"),
    (P, replace(M, even=True), H200, "even needs pdl"),
    (
        D,
        replace(T, pdl=True, even=True),
        replace(BLACKWELL, smem_optin=101376),
        "115712 bytes of shared memory exceed 101376",
    ),
    (P, replace(T, unroll=8), H200, "registers of operands and sums: the budget is 195"),
    (P, replace(T, bm=16, wk=16, unroll=4), H200, "the budget is 68 for 512 threads"),
    (Problem(8, 8 * 65536, 8), replace(T, bn=8), H200, "CTAs exceeds 65535 along y or z"),
    (
        P,
        replace(T, bm=64, bn=64, wm=2, wn=2, wk=4, unroll=1),
        replace(A100, smem_optin=65535),
        "bytes of shared memory",
    ),
]


@pytest.mark.parametrize(("problem", "config", "gpu", "reason"), RULES)
def test_each_rule_refuses_its_case(problem: Problem, config: KernelConfig, gpu: Any, reason: str) -> None:
    found = why_illegal(problem, config, gpu)
    assert found is not None and reason in found, found


@pytest.mark.parametrize(
    "config", [W, replace(W, schedule="stagger"), PINGPONG, SPLIT, T, M, replace(M, vec=1), replace(M, split_k=4)]
)
@pytest.mark.parametrize("problem", [P, NN, replace(P, acc="fp16"), replace(NN, dtype="bf16"), Problem(1, 8, 4096)])
def test_what_the_rules_start_from_is_legal(problem: Problem, config: KernelConfig) -> None:
    assert why_illegal(problem, config) is None


@pytest.mark.parametrize("config", [G, replace(G, split_k=8, pdl=True), replace(G, ring="shared")])
@pytest.mark.parametrize("problem", [D, DECODE, DECODE_NN, replace(DECODE_NN, dtype="bf16"), Problem(1, 8, 4096)])
def test_the_gemv_family_serves_few_tokens(problem: Problem, config: KernelConfig) -> None:
    assert why_illegal(problem, config) is None


def test_the_direct_family_serves_older_gpus_and_any_m_and_k() -> None:
    for problem in (Problem(1, 8, 8), Problem(1, 8, 8, "NN", "bf16"), Problem(7, 24, 40, acc="fp16"), P, NN):
        for gpu in (H200, A100, BLACKWELL):
            assert why_illegal(problem, T, gpu) is None
    assert why_illegal(P, replace(T, pdl=True), BLACKWELL) is None


def test_few_tokens_are_offered_gemv_kernels_of_their_size_and_many_tokens_none() -> None:
    for m, bm in ((1, 8), (8, 8), (9, 16), (16, 16)):
        for layout in ("TN", "NN"):
            offered = candidates(Problem(m, 4096, 4096, layout))  # type: ignore[arg-type]
            found = [c for c in offered if isinstance(c, Sm80GemvConfig)]
            assert len(found) >= 16 and {c.bm for c in found} == {bm} and {c.pdl for c in found} == {False, True}
            assert len(set(offered)) == len(offered)
    assert not any(isinstance(c, Sm80GemvConfig) for c in candidates(Problem(17, 4096, 4096)))
    old = [c for c in candidates(Problem(4, 4096, 4096), A100) if isinstance(c, Sm80GemvConfig)]
    assert old and not any(c.pdl or c.split_k > 1 for c in old)


def test_scalar_loads_serve_every_extent_on_every_gpu() -> None:
    """Whatever the alignment, something is legal."""
    scalar = replace(M, vec=1)
    for problem in (Problem(1, 1, 1), Problem(127, 1001, 333), Problem(3, 5, 7, "NN", "bf16")):
        for gpu in (H200, A100, BLACKWELL):
            assert why_illegal(problem, scalar, gpu) is None


def test_every_pool_config_is_legal_somewhere() -> None:
    large = Problem(8192, 8192, 16384)
    for config in pool():
        problem = large
        if isinstance(config, Sm80GemvConfig):
            problem = replace(large, m=config.bm, k=config.kept_k or large.k)
        problem = replace(large, m=512, n=512) if getattr(config, "split_kind", "") == "workspace" else problem
        kinds = [replace(problem, acc=acc) for acc in ("fp32", "fp16")] + [replace(problem, layout="NN")]
        reasons = {why_illegal(kind, config) for kind in kinds}
        assert None in reasons, (config_name(config), reasons)


def test_the_pool_has_all_families_no_duplicates_and_no_launch_options() -> None:
    assert len(set(pool())) == len(pool()) >= 128
    assert {c.family for c in pool()} == set(FAMILIES)
    assert not any(c.pdl for c in pool())


def random_config(rng: random.Random) -> KernelConfig:
    """A pool config with a few knobs drawn anew, mostly nonsense."""
    config = rng.choice(pool())
    values: dict[str, list[Any]] = {
        "int": [-1, 0, 1, 2, 3, 4, 8, 16, 24, 32, 64, 96, 128, 192, 256, 1000],
        "bool": [False, True],
        "Schedule": ["coop", "stagger", "pingpong"],
        "Store": ["tma", "direct"],
        "Raster": ["m", "n"],
        "Ring": ["registers", "shared"],
        "Cache": ("plain", "stream_c", "stream_b", "stream_a", "stream_bc", "stream_ac"),
        "SplitKind": ["cluster", "workspace"],
    }
    for field in rng.sample(fields(config), rng.randint(0, 3)):
        config = replace(config, **{field.name: rng.choice(values[str(field.type)])})
    return config


def test_the_predicate_answers_for_any_knobs() -> None:
    """It never raises, and what it allows keeps the hardware's limits."""
    rng = random.Random(5)
    legal = 0
    for _ in range(8000):
        layout, dtype, acc = rng.choice([("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("NN", "fp16", "fp16")])
        problem = Problem(*(rng.choice((1, 7, 64, 1000, 4096)) for _ in range(3)), layout, dtype, acc)  # type: ignore[arg-type]
        config = random_config(rng)
        reason = why_illegal(problem, config)
        assert reason is None or (isinstance(reason, str) and reason)
        if reason is None:
            legal += 1
            shape = geometry(problem, config)
            assert shape.smem_bytes <= H200.smem_optin and shape.threads <= 1024 and 1 <= shape.cluster <= MAX_CLUSTER
            assert shape.threads % 32 == 0 and shape.accumulators < 255
    assert 600 < legal < 7200  # both answers were really seen


def compiled_sample() -> list[tuple[Problem, KernelConfig]]:
    rng = random.Random(11)
    kinds = [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16")]
    found = []
    families = (Sm90WgmmaConfig, Sm90WgmmaConfig, Sm80MmaConfig, Sm80GemvConfig, Sm80DirectConfig)
    for i in range(3 * len(families) * 2):
        problem = Problem(4096, 4096, 8192, *kinds[i % 3])  # type: ignore[arg-type]
        family = families[i // 3 % len(families)]
        if family is Sm80GemvConfig:
            problem = replace(problem, m=8 + 8 * (i % 2), acc="fp32")
        legal = [c for c in pool() if isinstance(c, family) and why_illegal(problem, c) is None]
        found.append((problem, rng.choice(legal)))
    return found


@pytest.mark.parametrize(("problem", "config"), compiled_sample())
def test_what_is_legal_compiles_and_passes_the_static_gate(problem: Problem, config: KernelConfig) -> None:
    """Registers that the predicate allows do not spill."""
    pytest.importorskip("cuda.bindings")
    from outblas.compile import compile_source
    from outblas.sass import check_static

    source = make_source(problem, config)
    cubin = compile_source(source, cache=None)
    assert check_static(cubin.facts, source, cubin) is None
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.static_smem) == (0, 0, 0)


def test_what_the_sanitizer_runs_is_legal_and_of_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # what the script sets is taken back
    cases = runpy.run_path(str(ROOT / "scripts" / "sanitize.py"))["CASES"]
    assert {config.family for *_, config in cases} == set(FAMILIES)
    for name, extents, layout, dtype, acc, config in cases:
        for mnk in extents:
            assert why_illegal(Problem(*mnk, layout, dtype, acc), config) is None, name


needs_catalogue = pytest.mark.skipif(
    not resources.files("outblas").joinpath("data", "catalogues", "h200.json").is_file(), reason="no catalogue yet"
)


@needs_catalogue
def test_every_catalogue_config_is_legal_on_the_grid() -> None:
    problems = suite("grid1000")
    assert len(catalogue()) >= 128 and len(set(catalogue())) == len(catalogue())
    for config in catalogue():
        assert any(why_illegal(p, config) is None for p in reversed(problems)), config_name(config)


@needs_catalogue
def test_every_grid_problem_has_candidates_of_both_tiled_families() -> None:
    for m, n, k in ((m, n, k) for m in GRID[::4] for n in GRID[::4] for k in GRID[::4]):
        legal = [c for c in catalogue() if why_illegal(Problem(m, n, k), c) is None]
        assert {c.family for c in legal} >= {W.family, M.family} and len(legal) >= 32


def test_an_unknown_catalogue_is_refused() -> None:
    with pytest.raises(UsageError, match="no catalogue named 'a100'"):
        catalogue("a100")


def test_no_gpu_is_said_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(DeviceError, match="no CUDA device 0"):
        gpu_of_device(0)
