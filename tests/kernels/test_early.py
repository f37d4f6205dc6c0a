"""Early loads of B: what the machine code reads before it waits for the predecessor, and where the knob is legal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings")

from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.problem import Layout, Problem  # noqa: E402
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig  # noqa: E402
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig, gemv_loads_per_step  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig  # noqa: E402
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.runtime.cubin import Cubin  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402
from outblas.runtime.sass import check_static  # noqa: E402
from support.disassembly import Together, cases  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.helpers import half_of_pairs  # noqa: E402

pytestmark = pytest.mark.long
LAYOUTS: tuple[Layout, ...] = ("TN", "NN")
CONFIGS: dict[str, KernelConfig] = {
    "wgmma": Sm90WgmmaConfig(64, 64, stages=6),
    "wgmma_deep_stages": Sm90WgmmaConfig(64, 64, 128, 3, store="direct"),
    "wgmma_pingpong": Sm90WgmmaConfig(64, 128, 64, 5, 2, "pingpong", persistent=True),
    "wgmma_cluster": Sm90WgmmaConfig(64, 64, stages=4, cluster_m=2, l2="stream_b"),
    "wgmma_split": Sm90WgmmaConfig(64, 64, stages=4, split_k=2, store="direct"),
    "wgmma_workspace": Sm90WgmmaConfig(64, 64, stages=4, split_k=3, store="direct", split_kind="workspace"),
    "mma": Sm80MmaConfig(16, 16, 128, 4, 1, 1, 8),
    "mma_split": Sm80MmaConfig(16, 32, 64, 3, 1, 1, 4, split_k=2),
    "mma_one_stage": Sm80MmaConfig(32, 32, 64, 1),
    "mma_pairs": Sm80MmaConfig(32, 32, 64, 3, vec=2),
    "oddrows": Sm90OddrowsConfig(64, 128),
    "pipelined": Sm80PipelinedConfig(64, 64, 64, 4),
    "pipelined_walk": Sm80PipelinedConfig(64, 96, 32, 3, persistent=True),
    "pipelined_split": Sm80PipelinedConfig(64, 64, 32, 4, split_k=3),
    "direct": Sm80DirectConfig(16, 8, wk=4),
    "direct_tile": Sm80DirectConfig(32, 32, 2, 2, unroll=2),
    "gemv": Sm80GemvConfig(8, 64, 1, 8, 2),
    "gemv_split": Sm80GemvConfig(16, 64, 1, 8, 1, split_k=2),
    "gemv_shared": Sm80GemvConfig(16, 64, 1, 8, 2, "shared"),
    "gemv_walk": Sm80GemvConfig(8, 64, 1, 4, 2, persistent=True),
    "gemv_walk_kept": Sm80GemvConfig(8, 64, 1, 4, 2, persistent=True, kept_k=4096),
    "gemv_walk_shared": Sm80GemvConfig(16, 64, 1, 8, 2, "shared", persistent=True, kept_k=0),
}
#: Opcodes that read the operands; what writes C or a workspace; the wait for the predecessor.
READS, WRITES, WAIT = ("LDG", "LDGSTS", "UTMALDG"), ("STG", "UTMASTG", "ATOMG", "RED"), "ACQBULK"


Kernel = tuple[Problem, KernelConfig]


def build(kernel: Kernel) -> Cubin:
    problem, config = kernel
    assert why_illegal(problem, config, H200) is None
    source = make_source(problem, config)
    cubin = compile_source(source, "sm_90a", cache=None)
    assert check_static(cubin.facts, source, cubin) is None
    return cubin


@pytest.fixture(scope="module")
def opcodes(request: pytest.FixtureRequest) -> Callable[[Kernel], list[str]]:
    """Opcodes of a kernel; those of all selected tests are disassembled at once."""
    waiting = [early_and_late(**case) for case in cases(request, "test_only_weights_are_read_before_the_wait")]
    warming = [
        cold_and_warmed(**case) for case in cases(request, "test_l2_is_warmed_before_the_wait_and_by_nobody_else")
    ]
    together = Together(build, [kernel for pair in (*waiting, *warming) for kernel in pair])
    return lambda kernel: together[kernel][1].opcodes


def early_and_late(name: str, layout: Layout) -> tuple[Kernel, Kernel]:
    config, problem = replace(CONFIGS[name], pdl=True), Problem(8, 1024, 4096, layout)
    if isinstance(config, Sm80GemvConfig):
        problem = replace(problem, m=config.bm)
    return (problem, replace(config, early=True)), (problem, config)


def cold_and_warmed(name: str) -> tuple[Kernel, Kernel]:
    early = replace(CONFIGS[name], pdl=True, early=True)
    assert isinstance(early, Sm80GemvConfig)
    problem = Problem(early.bm, 1024, 4096)
    return (problem, early), (problem, replace(early, warm_k=2048))


def count(code: list[str], kinds: tuple[str, ...]) -> int:
    return sum(text.split(".")[0] in kinds for text in code)


def early_loads(problem: Problem, c: KernelConfig) -> int:
    """Instructions that load B before the wait: all of a first fill of the ring, or the loop over its stages."""
    if isinstance(c, Sm90WgmmaConfig):
        return c.bk // 64 if problem.layout == "TN" else max(1, c.bn // 64)
    if isinstance(c, Sm90OddrowsConfig):
        return 8 * c.bk // 64 * (1 if problem.layout == "TN" else c.bn // 64)
    if isinstance(c, Sm80GemvConfig):
        return c.unroll * gemv_loads_per_step(problem, c)[0]
    if isinstance(c, Sm80DirectConfig):
        return c.unroll * (c.bn // c.wn // 8 if problem.layout == "TN" else 4)
    threads = 32 * c.wm * c.wn * getattr(c, "wk", 1)
    return max(1, c.stages - 1) * -(-c.bn * c.bk // c.vec // threads)


def start(code: list[str]) -> list[str]:
    """Return the code up to the loading warp's last wait. (A split over a workspace has another wait before its
    stores.)
    """
    return code[: len(code) - 1 - code[::-1].index(WAIT)]


@pytest.mark.parametrize(("name", "layout"), half_of_pairs(CONFIGS, LAYOUTS))
def test_only_weights_are_read_before_the_wait(
    opcodes: Callable[[Kernel], list[str]], name: str, layout: Layout
) -> None:
    """B is loaded before the wait, A is not; without the knob neither is."""
    early_kernel, (problem, config) = early_and_late(name, layout)
    workspace = isinstance(config, Sm90WgmmaConfig) and config.split_kind == "workspace"
    early, late = opcodes(early_kernel), opcodes((problem, config))
    edges = isinstance(config, Sm90OddrowsConfig) and layout == "NN"  # consumers read B, too
    assert early.count(WAIT) == (2 if workspace else 1) and late.count(WAIT) == (2 if workspace or edges else 1)
    # The producer of wgmma stands behind the consumers, whose reads are of a workspace, or of B behind their own wait.
    own = count(start(late), READS)
    assert own == (count(late, ("LDG",)) if workspace or edges else 0)
    if edges:
        assert count(late[: late.index(WAIT)], READS) == 0
    assert count(start(early), READS) - own == early_loads(problem, config)
    if not isinstance(config, Sm90WgmmaConfig | Sm90OddrowsConfig):
        assert count(start(early), WRITES) == 0


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("gemv")])
def test_l2_is_warmed_before_the_wait_and_by_nobody_else(opcodes: Callable[[Kernel], list[str]], name: str) -> None:
    (problem, early), warming = cold_and_warmed(name)
    assert isinstance(early, Sm80GemvConfig)
    cold, warmed = opcodes((problem, early)), opcodes(warming)
    assert count(cold, ("UBLKPF",)) == 0
    assert count(warmed, ("UBLKPF",)) == count(start(warmed), ("UBLKPF",)) == early.bn // early.wn // 8
    assert count(start(warmed), READS) == count(start(cold), READS)
    assert "early" in str(why_illegal(problem, replace(CONFIGS[name], warm_k=2048), H200))


@pytest.mark.parametrize("name", CONFIGS)
def test_early_needs_pdl(name: str) -> None:
    problem = Problem(8, 1024, 4096)
    assert why_illegal(problem, replace(CONFIGS[name], pdl=True, early=True), H200) is None
    assert why_illegal(problem, replace(CONFIGS[name], early=True), H200) == "early needs pdl"


def test_scalar_loads_are_never_early() -> None:
    narrow = Sm80MmaConfig(32, 32, vec=1, pdl=True)
    assert why_illegal(Problem(7, 33, 63), narrow, H200) is None
    assert "vec" in str(why_illegal(Problem(7, 33, 63), replace(narrow, early=True), H200))
