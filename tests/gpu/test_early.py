"""Early loads of B: A of a call is C of the call before, weights are constant; and kernels with no such promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.config import KernelConfig, config_name  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Layout, Problem  # noqa: E402
from outblas.core.roofline import architecture  # noqa: E402
from outblas.dispatch import device_registry, native_table  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.judge.gates import prove  # noqa: E402
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig  # noqa: E402
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.kernels.source import make_source  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.driver import capture_graph, check, driver  # noqa: E402
from outblas.runtime.kernel_loader import load_kernel  # noqa: E402
from outblas.runtime.launch import load  # noqa: E402
from outblas.runtime.nvrtc import compile_source  # noqa: E402
from support.gpus.known import H200  # noqa: E402

pytestmark = pytest.mark.gpu

#: One to three CTAs on an SM, so that a successor's stand beside the predecessor's, and one that fills it.
CONFIGS: dict[str, KernelConfig] = {
    "wgmma": Sm90WgmmaConfig(64, 32, stages=6, store="direct"),
    "wgmma_tma": Sm90WgmmaConfig(64, 64, 128, 3),
    "wgmma_full": Sm90WgmmaConfig(64, 64, stages=12),
    "wgmma_more_stages_than_k": Sm90WgmmaConfig(64, 16, 128, 10, store="direct"),
    "wgmma_multicast": Sm90WgmmaConfig(64, 64, stages=4, cluster_m=2, l2="stream_b"),
    "wgmma_multicast_4": Sm90WgmmaConfig(64, 64, stages=4, cluster_m=2, cluster_n=2),
    "wgmma_split": Sm90WgmmaConfig(64, 64, stages=4, split_k=2, store="direct"),
    "wgmma_multicast_split": Sm90WgmmaConfig(64, 32, stages=6, cluster_n=2, split_k=2, store="direct"),
    "wgmma_workspace": Sm90WgmmaConfig(64, 64, stages=4, split_k=3, store="direct", split_kind="workspace"),
    "wgmma_pingpong": Sm90WgmmaConfig(64, 64, stages=5, consumers=2, schedule="pingpong", persistent=True),
    "wgmma_stagger": Sm90WgmmaConfig(128, 64, stages=4, consumers=2, schedule="stagger", persistent=True),
    "mma": Sm80MmaConfig(32, 32, 64, 4),
    "mma_warps_split": Sm80MmaConfig(16, 16, 128, 4, 1, 1, 8, split_k=2),
    "mma_one_stage": Sm80MmaConfig(32, 32, 64, 1),
    "pipelined": Sm80PipelinedConfig(64, 64, 64, 4),
    "pipelined_more_stages_than_k": Sm80PipelinedConfig(32, 64, 64, 6, 1, 2),
    "pipelined_walk": Sm80PipelinedConfig(64, 64, 32, 4, persistent=True),
    "pipelined_split": Sm80PipelinedConfig(64, 64, 32, 4, split_k=3),
    "direct": Sm80DirectConfig(32, 32, 2, 2, unroll=2),
    "direct_warps": Sm80DirectConfig(16, 16, wk=8, unroll=2),
    "gemv": Sm80GemvConfig(8, 64, 1, 8, 2),
    "gemv_split": Sm80GemvConfig(16, 64, 1, 8, 2, split_k=2),
    "gemv_one_step": Sm80GemvConfig(16, 64, 1, 4, 1),
    "gemv_shared": Sm80GemvConfig(16, 64, 1, 8, 2, "shared"),
    "gemv_shared_split": Sm80GemvConfig(8, 64, 1, 4, 3, "shared", 4),
}
LAYOUTS: tuple[Layout, ...] = ("TN", "NN")
RUNS, LENGTH, WEIGHTS = 50, 12, 4


@pytest.fixture(autouse=True)
def hopper() -> None:
    if gpu_of_device(0).arch != 90:
        pytest.skip("programmatic dependent launch is Hopper's")
    torch.cuda.init()


def kernel(problem: Problem, config: KernelConfig) -> Any:
    return load(compile_source(make_source(problem, config), architecture(gpu_of_device(0))), config)


def early(config: KernelConfig) -> KernelConfig:
    return replace(config, pdl=True, early=True)


def bits(tensor: Any) -> Any:
    return tensor.view(torch.int16).clone()


class Chain:
    """LENGTH products, the result of each an operand of the next, in three buffers that take turns."""

    def __init__(self, problem: Problem, as_b: bool = False) -> None:
        p, generator = problem, torch.Generator("cuda").manual_seed(3)

        def normal(shape: tuple[int, int]) -> Any:
            # Results stay of order one, and no sum is nearly that of another order.
            return (torch.randn(shape, device="cuda", generator=generator) * p.k**-0.5).half()

        assert (p.m, p.n) == (p.b_shape if as_b else (p.m, p.k))
        self.problem, self.as_b = problem, as_b
        self.constant = [normal((p.m, p.k) if as_b else p.b_shape) for _ in range(WEIGHTS)]
        self.starts = [normal((p.m, p.n)) for _ in range(2)]
        self.buffers = [torch.empty((p.m, p.n), device="cuda", dtype=torch.float16) for _ in range(3)]

    def calls(self, loaded: Any) -> list[Any]:
        operands = []
        for i in range(LENGTH):
            made, constant = self.buffers[i % 3], self.constant[i % WEIGHTS]
            operands.append((*((constant, made) if self.as_b else (made, constant)), self.buffers[(i + 1) % 3]))
        return list(loaded.bind_many(self.problem, operands))

    def begin(self, start: Any) -> None:
        for buffer in self.buffers:
            buffer.fill_(torch.nan)  # a value that is read too early shows
        self.buffers[0].copy_(start)
        torch.cuda.synchronize()

    def result(self) -> Any:
        torch.cuda.synchronize()
        return bits(self.buffers[LENGTH % 3])

    def one_by_one(self, calls: list[Any], stream: Any) -> list[Any]:
        """Results of both starts when every call waits for the one before."""
        found = []
        for start in self.starts:
            self.begin(start)
            for call in calls:
                call(stream.cuda_stream)
                torch.cuda.synchronize()
            found.append(self.result())
        assert all(torch.isfinite(f.view(torch.float16)).all() for f in found) and not torch.equal(*found)
        return found


def check_chain(chain: Chain, config: KernelConfig) -> None:
    """RUNS runs in a graph and on a stream, bitwise the same kernel's without PDL, one call after the other."""
    stream, cu = torch.cuda.Stream(), driver()
    plain = replace(config, pdl=False, early=False)
    expected = chain.one_by_one(chain.calls(kernel(chain.problem, plain)), stream)
    calls = chain.calls(kernel(chain.problem, config))
    graph = capture_graph(calls, stream.cuda_stream)
    executable = check("cuGraphInstantiate", cu.cuGraphInstantiate(graph, 0))
    try:
        for run in range(RUNS):
            chain.begin(chain.starts[run % 2])
            check("cuGraphLaunch", cu.cuGraphLaunch(executable, stream.cuda_stream))
            assert torch.equal(chain.result(), expected[run % 2]), f"graph, run {run}"
        for run in range(RUNS):
            chain.begin(chain.starts[run % 2])
            for call in calls:
                call(stream.cuda_stream)
            assert torch.equal(chain.result(), expected[run % 2]), f"stream, run {run}"
    finally:
        cu.cuGraphExecDestroy(executable)
        cu.cuGraphDestroy(graph)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", [4096, 1032])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_chain_through_a_is_bitwise_the_plain_kernels(name: str, side: int, layout: Layout) -> None:
    """Whole and ragged tiles; more stages than K, tiles for a part of the CTAs, several tiles each."""
    config = early(CONFIGS[name])
    m = config.bm if isinstance(config, Sm80GemvConfig) else 200 if side < 4096 else 64
    problem = Problem(m, side, side, layout)
    assert why_illegal(problem, config, H200) is None
    check_chain(Chain(problem), config)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_without_the_promise_b_may_be_what_the_predecessor_writes(name: str, layout: Layout) -> None:
    config = replace(CONFIGS[name], pdl=True)
    m = config.bm if isinstance(config, Sm80GemvConfig) else 520
    problem = Problem(m, 520 if layout == "TN" else 2048, m, layout)
    if layout == "TN" and m != 520:
        pytest.skip("C of at most 16 rows is no B of TN")
    if why_illegal(problem, config, H200) is not None:
        pytest.skip("K of at most 16 is not split")
    check_chain(Chain(problem, as_b=True), config)


def test_a_broken_promise_shows() -> None:
    """Prove the worth of the tests above: an early kernel whose B the predecessor writes reads the old values."""
    chain, stream = Chain(Problem(520, 520, 520), as_b=True), torch.cuda.Stream()
    expected = chain.one_by_one(chain.calls(kernel(chain.problem, CONFIGS["wgmma"])), stream)[0]
    calls, right = chain.calls(kernel(chain.problem, early(CONFIGS["wgmma"]))), 0
    for _ in range(RUNS):
        chain.begin(chain.starts[0])
        for call in calls:
            call(stream.cuda_stream)
        right += torch.equal(chain.result(), expected)
    assert right < RUNS


@pytest.mark.parametrize("name", CONFIGS)
def test_the_proof_is_passed_whole(name: str) -> None:
    """Gate rules keeps B in place; N is not K here, so that the chain is of other extents."""
    config = early(CONFIGS[name])
    problem = Problem(config.bm if isinstance(config, Sm80GemvConfig) else 64, 1024, 2048)
    verdict = prove(kernel(problem, config), problem)
    assert verdict.status is Status.PASSED and "rules" in verdict.gates, verdict.detail


SQUARE = Problem(512, 512, 512)
PLAIN = Sm90WgmmaConfig(64, 64, stages=4)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceState]:
    """The dispatch with a row that has a kernel for each launch option."""
    gpu = gpu_of_device(0)
    choices = [LibraryChoice(c, 1.2, 1.1, 1.3) for c in (PLAIN, replace(PLAIN, pdl=True), early(PLAIN))]
    row = LibraryRow(SQUARE, "lt_auto", "", "test", choices[0], choices[1], weights=choices[2])
    state = DeviceState(gpu, Library(gpu.name, (row,)), load_kernel)
    monkeypatch.setattr(device_registry, "devices", {0: state})
    for name, value in (("table", None), ("why_no_table", ""), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    for variable in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS"):
        monkeypatch.delenv(variable, raising=False)
    yield state
    torch.cuda.synchronize()


def test_matmul_takes_early_loads_with_the_promise_only(library: DeviceState, monkeypatch: pytest.MonkeyPatch) -> None:
    a, weight = (torch.randn(512, 512, device="cuda").half() for _ in range(2))
    b = weight.t()

    def used(**options: Any) -> str:
        return outblas.explain(a, b, **options).split(" ")[0]

    safe = config_name(replace(PLAIN, pdl=True))
    assert used() == used(pdl=False) == config_name(PLAIN) and used(pdl=True) == safe
    assert used(weights=True) == used(weights=True, pdl=True) == config_name(early(PLAIN))
    expected = outblas.matmul(a, b)
    for options in ({}, {"pdl": True}, {"weights": True}) * 3:  # the dispatch first, the native table after
        assert torch.equal(bits(outblas.matmul(a, b, **options)), bits(expected))  # type: ignore[arg-type]
    monkeypatch.setenv("OUTBLAS_WEIGHTS", "1")
    assert used() == config_name(early(PLAIN)) and used(pdl=True) == safe and used(pdl=False) == config_name(PLAIN)
    assert used(weights=False) == safe


def test_matmul_without_the_promise_multiplies_what_the_predecessor_writes(library: DeviceState) -> None:
    """Thirty calls back to back, B of each the result of the one before: TN needs no copy between."""
    start, a = (torch.randn(512, 512, device="cuda").half() * 512**-0.5 for _ in range(2))
    buffers = [torch.empty_like(start) for _ in range(2)]

    def chain(wait: bool, **options: Any) -> Any:
        result = start
        for i in range(30):
            result = outblas.matmul(
                a, result.t(), out=buffers[i % 2].fill_(torch.nan) if wait else buffers[i % 2], **options
            )
            if wait:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return bits(result)

    expected = chain(True)
    for _ in range(20):
        assert torch.equal(chain(False, pdl=True), expected)
