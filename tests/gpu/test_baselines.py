"""Every baseline computes the same product, on the given stream, and can be captured."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from outblas.core import rivals  # noqa: E402
from outblas.core.errors import OutblasError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import baselines  # noqa: E402
from outblas.judge.gpu_clock import GpuClock  # noqa: E402
from outblas.judge.operands import torch_dtype  # noqa: E402
from outblas.judge.reference import fp64_product  # noqa: E402
from support.gpus.known import H200  # noqa: E402

pytestmark = pytest.mark.gpu
KINDS = [("fp16", "fp32"), ("bf16", "fp32"), ("fp16", "fp16")]
SHAPES = [(64, 4096, 64), (256, 256, 512), (127, 1001, 333), (1, 8, 8)]


@pytest.fixture(scope="module")
def made():
    return baselines.make_baselines(0)


def close(problem, a, b, c):
    exact = fp64_product(problem, a, b)
    step = {"fp16": 2.0**-8, "bf16": 2.0**-6}[problem.dtype] if problem.acc == "fp32" else 2.0**-5
    return bool(((c.double() - exact).abs() <= step * (exact.abs() + problem.k**0.5)).all())


@pytest.mark.parametrize("name", rivals.RIVALS)
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize(("dtype", "acc"), KINDS)
@pytest.mark.parametrize("mnk", SHAPES)
def test_the_product_is_right(made, name, layout, dtype, acc, mnk):
    problem = Problem(*mnk, layout, dtype, acc)
    torch.manual_seed(0)
    a = torch.randn((problem.m, problem.k), device="cuda").to(torch_dtype(problem))
    b = torch.randn(problem.b_shape, device="cuda").to(torch_dtype(problem))
    c = torch.full((problem.m, problem.n), float("nan"), dtype=a.dtype, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    made[name].bind(problem, a, b, c)(stream.cuda_stream)
    torch.cuda.synchronize()
    assert close(problem, a, b, c)
    assert made[name].detail(problem)


@pytest.mark.parametrize("name", rivals.BASELINE_NAMES)
def test_it_can_be_captured_and_replayed(made, name):
    problem = Problem(256, 256, 512)
    with GpuClock(problem, gpu=H200) as bench:
        try:
            graph = bench.capture(made[name])
        except OutblasError as error:
            if name != "nvmmh":
                raise
            pytest.skip(str(error))
        for index in range(bench.sets):
            bench.data.poison(index)
        torch.cuda.synchronize()
        assert all(us > 0 for us in bench.round([graph], [0]))
        for index in range(bench.sets):
            assert close(problem, *bench.operands(index))
        graph.free()


def test_auto_is_chosen_once_among_what_the_heuristic_returns(made):
    problem = Problem(512, 512, 512)
    with GpuClock(problem, gpu=H200) as bench:
        made["lt_auto"].prepare(bench)
        detail = made["lt_auto"].detail(problem)
        made["lt_auto"].prepare(bench)
    index, count = detail.split()[0].removeprefix("index=").split("/")
    assert 0 <= int(index) < int(count) <= rivals.AUTO_REQUEST
    assert "tile=" in detail and made["lt_auto"].detail(problem) == detail
