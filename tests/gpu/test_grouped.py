"""Grouped kernels on a GPU: every group against fp64, and nothing written outside it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from outblas.kernels.grouped.grouped_kernel import GroupedConfig, make_source
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.runtime.grouped_launch import GroupedKernel
from outblas.runtime.nvrtc import compile_source

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CANARY = 777.0
CONFIGS = (
    GroupedConfig(8, 64, 128, 5, min_blocks=2, stream=True),
    GroupedConfig(48, 128, 64, 6),
    GroupedConfig(128, 128, 64, 5, 2, pingpong=True),
    GroupedConfig(64, 128, 64, 6, 2, cluster=2),
    GroupedConfig(256, 128, 64, 4, 2, cluster=2),
    GroupedConfig(160, 128, 64, 4, 2, pingpong=True, cluster=2, pdl=True),
)
GATED = (GroupedConfig(16, 128, 64, 6), GroupedConfig(128, 256, 64, 4, 2), GroupedConfig(64, 256, 64, 4, 2, cluster=2))
#: Rows of each group: empty ones, single rows, tails, and one group that has all.
SIZES = ([0, 1, 7, 129, 0, 300, 64, 8], [0, 0, 513, 0, 0, 0, 0, 0], [0] * 8, [1] * 8, [128] * 8)


class Operands:
    """Random operands of a problem, and a canary in each row of C."""

    def __init__(self, problem: GroupedProblem, sizes: list[int], spare: int = 5, seed: int = 0) -> None:
        made = torch.Generator("cuda").manual_seed(seed)
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[problem.dtype]
        rows = sum(sizes) + spare

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, generator=made, device="cuda").to(dtype)

        shape = (problem.n, problem.k) if problem.layout == "TN" else (problem.k, problem.n)
        self.problem = problem
        self.a, self.w = normal(rows, problem.k), normal(problem.groups, *shape)
        self.bias = normal(problem.groups, problem.n) if problem.bias else None
        self.ends = torch.tensor([*itertools.accumulate(sizes)], dtype=torch.int32, device="cuda")
        self.c = torch.full((rows, problem.columns), CANARY, dtype=dtype, device="cuda")

    def run(self, kernel: GroupedKernel) -> None:
        kernel.bind(self.a, self.w, self.ends, self.c, self.bias)(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()

    def check(self, ends: list[int]) -> None:
        """Compare each group's rows with fp64; rows of no group still hold the canary."""
        begin = 0
        for group, end in enumerate(ends):
            a = self.a[begin:end].double()
            w = self.w[group].double().T if self.problem.layout == "TN" else self.w[group].double()
            wanted, size = a @ w, a.abs() @ w.abs()
            if self.bias is not None:
                wanted, size = wanted + self.bias[group].double(), size + self.bias[group].double().abs()
            if self.problem.gated:
                gate, up = wanted.chunk(2, 1)
                wanted = gate / (1 + (-gate).exp()) * up
                size = size[:, : up.shape[1]] * (1 + up.abs()) + size[:, up.shape[1] :] * (1 + gate.abs())
            unit = torch.finfo(self.c.dtype).eps
            allowed = wanted.abs() * unit + size * 2.0**-22 * self.problem.k**0.5 + unit / 64
            wrong = ((self.c[begin:end].double() - wanted).abs() > allowed).sum().item()
            assert wrong == 0, f"group {group} of rows {begin} to {end}: {wrong} elements"
            begin = end
        assert (self.c[begin:] == CANARY).all(), "rows of no group were written"


def kernel_of(problem: GroupedProblem, config: GroupedConfig) -> GroupedKernel:
    return GroupedKernel(compile_source(make_source(problem, config)), problem, config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("layout", "dtype", "bias"), [("TN", "bf16", False), ("NN", "fp16", True)])
def test_every_group_is_right(config: GroupedConfig, layout: Any, dtype: Any, bias: bool) -> None:
    for n, k in ((256, 512), (200, 136), (1536, 2048)):
        problem = GroupedProblem(8, n, k, layout, dtype, bias=bias)
        kernel = kernel_of(problem, config)
        for seed, sizes in enumerate(SIZES):
            operands = Operands(problem, sizes, seed=seed)
            operands.run(kernel)
            operands.check([*itertools.accumulate(sizes)])


@pytest.mark.parametrize("config", GATED, ids=str)
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_a_gate_is_right(config: GroupedConfig, layout: Any) -> None:
    for n, k in ((512, 512), (400, 136), (1536, 2048)):
        problem = GroupedProblem(8, n, k, layout, gated=True, bias=layout == "NN")
        kernel = kernel_of(problem, config)
        for seed, sizes in enumerate(SIZES):
            operands = Operands(problem, sizes, seed=seed)
            operands.run(kernel)
            operands.check([*itertools.accumulate(sizes)])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ends_that_run_backwards_or_past_the_last_row_are_clamped(config: GroupedConfig) -> None:
    problem = GroupedProblem(33, 256, 256)
    kernel, draw = kernel_of(problem, config), random.Random(3)
    for seed in range(6):
        operands = Operands(problem, [300], spare=0, seed=seed)
        given = [draw.randrange(-10, 320) for _ in range(problem.groups)]
        operands.ends = torch.tensor(given, dtype=torch.int32, device="cuda")
        operands.run(kernel)
        clamped = list(itertools.accumulate((min(max(end, 0), 300) for end in given), max))
        operands.check(clamped)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_is_not_a_number_stays_in_its_group(config: GroupedConfig) -> None:
    problem, sizes = GroupedProblem(8, 256, 256), [3, 20, 0, 130, 7, 64, 1, 8]
    kernel, operands = kernel_of(problem, config), Operands(problem, sizes)
    operands.w[3], operands.a[sum(sizes[:1]) : sum(sizes[:2])] = float("nan"), float("nan")
    operands.run(kernel)
    begin = 0
    for group, size in enumerate(sizes):
        assert operands.c[begin : begin + size].isnan().any().item() == (group in (1, 3)), group
        begin += size


def test_a_graph_follows_new_ends() -> None:
    problem, config = GroupedProblem(8, 512, 512), CONFIGS[0]
    kernel, operands = kernel_of(problem, config), Operands(problem, [20] * 8, spare=0)
    call = kernel.bind(operands.a, operands.w, operands.ends, operands.c)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(torch.cuda.current_stream().cuda_stream)
    for sizes in ([20] * 8, [160, *[0] * 7], [0, 33, 1, 0, 90, 6, 30, 0]):
        operands.ends.copy_(torch.tensor([*itertools.accumulate(sizes)], dtype=torch.int32))
        operands.c.fill_(CANARY)
        graph.replay()
        torch.cuda.synchronize()
        operands.check([*itertools.accumulate(sizes)])


def test_the_same_bits_whatever_the_other_groups_are() -> None:
    problem, config = GroupedProblem(8, 512, 512), GroupedConfig(64, 128, 64, 6, 2)
    kernel = kernel_of(problem, config)
    alone, together = Operands(problem, [0, 0, 40, 0, 0, 0, 0, 0]), Operands(problem, [5, 90, 40, 3, 0, 200, 1, 8])
    together.w.copy_(alone.w)
    together.a[95:135] = alone.a[:40]
    alone.run(kernel)
    together.run(kernel)
    assert torch.equal(alone.c[:40], together.c[95:135])
