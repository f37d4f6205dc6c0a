"""outblas.matmul, mm, linear and the operator on a GPU: random operands, gradients, compiled, captured, on streams."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.dispatch.torch_op import mm  # noqa: E402
from support.everything_fixture import Counted, computed, exact, gpus_fixture, numbers  # noqa: F401  # noqa: E402

pytestmark = pytest.mark.gpu

LAYER = (256, 512, 384)  # M, N, K


def layer(seed: int = 0, dtype: Any = torch.float16, device: Any = "cuda", grad: bool = False) -> tuple[Any, Any]:
    """(x, weight)."""
    m, n, k = LAYER
    return (
        numbers(m, k, dtype=dtype, seed=seed, device=device, grad=grad),
        numbers(n, k, dtype=dtype, seed=seed + 1, device=device, grad=grad),
    )


def stored(chance: random.Random, shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """A tensor of a shape, stored in any order of its axes, with gaps, at any offset; often plainly."""
    order = list(range(len(shape)))
    pads = [0] * len(shape)
    if chance.random() < 0.5:
        chance.shuffle(order)
    if chance.random() < 0.3:
        pads = [chance.choice([0, 1, 8]) for _ in shape]
    offset = chance.choice([0, 0, 0, 1, 2, 8])
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(shape[axis] + pads[axis], 1)
    return numbers(offset + step + 1, dtype=dtype, seed=seed).as_strided(shape, strides, offset)


def test_five_thousand_random_products_are_exact(gpus: list[Counted]) -> None:
    chance = random.Random(5000)
    for case in range(5000):
        extent = [0, 1, 2, 7, 8, 16, 33, 64, 100, 128, 200, 256]
        m, n, k = (chance.choice(extent) for _ in range(3))
        batch = tuple(chance.choice([1, 2, 3]) for _ in range(chance.choice([0, 0, 1, 2])))
        dtype = chance.choice([torch.float16, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32])
        a = stored(chance, chance.choice([(m, k), (m, k), (*batch, m, k), (k,)]), dtype, case)
        b = stored(chance, chance.choice([(k, n), (k, n), (k, n), (k,), (*batch, k, n)]), dtype, case + 1)
        torchs, expected = torch.matmul(a, b), exact(a, b)
        found = outblas.matmul(a, b)
        assert (found.shape, found.stride(), found.dtype) == (torchs.shape, torchs.stride(), torchs.dtype), case
        assert torch.equal(found, expected), (case, a.shape, a.stride(), b.shape, b.stride(), dtype)
        if a.dim() == 2 == b.dim():
            out = torch.full_like(torchs, 7)
            assert outblas.mm(a, b, out=out) is out and torch.equal(out, expected), case
    assert computed(gpus) > 1000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_linear_and_its_gradients_are_exact(dtype: Any, gpus: list[Counted]) -> None:
    x, w = layer(dtype=dtype, grad=True)
    bias = numbers(w.shape[0], dtype=dtype, seed=3, grad=True)
    # Sparse gradients keep the sums within what bf16 holds exactly.
    grad = (numbers(LAYER[0], LAYER[1], dtype=dtype, seed=4) == 2).to(dtype)
    for added in (None, bias):
        wanted = [t for t in (x, w, added) if t is not None]
        before = computed(gpus)
        found = torch.autograd.grad(outblas.linear(x, w, added), wanted, grad)
        assert computed(gpus) >= before + (2 if added is None else 1), "the forward without a bias, and dgrad"
        assert torch.equal(found[0], exact(grad, w)) and torch.equal(found[1], exact(grad.t(), x))
        if added is not None:
            assert torch.equal(found[2], grad.double().sum(0).to(dtype))
    shaped = outblas.linear(x.view(4, -1, x.shape[1]), w)
    assert torch.equal(shaped.view(-1, w.shape[0]), exact(x, w.t()))


def test_torch_checks_the_operator(gpus: list[Counted]) -> None:
    x, w = numbers(16, 32, grad=True), numbers(24, 32, grad=True)
    torch.library.opcheck(mm, (x, w.t()))
    torch.library.opcheck(mm, (x.detach(), w.detach().t()))
    assert computed(gpus) > 0


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_layers_hold_the_operator(mode: str | None, gpus: list[Counted]) -> None:
    x, w = layer()
    torch._dynamo.reset()
    run = torch.compile(lambda x, w: torch.relu(outblas.linear(x, w)) + outblas.mm(x, w.t()), fullgraph=True, mode=mode)
    product = exact(x, w.t()).double()
    before = computed(gpus)
    for _ in range(4):
        found = run(x, w)
        assert torch.equal(found, (torch.relu(product) + product).half())
    assert computed(gpus) > before


def test_compiled_gradients_are_exact(gpus: list[Counted]) -> None:
    x, w = layer(grad=True)
    grad = (numbers(LAYER[0], LAYER[1], seed=4) == 2).half()
    torch._dynamo.reset()
    run = torch.compile(lambda x, w: outblas.matmul(x, w.t()), fullgraph=True)
    found = torch.autograd.grad(run(x, w), (x, w), grad)
    assert torch.equal(found[0], exact(grad, w)) and torch.equal(found[1], exact(grad.t(), x))
    assert computed(gpus) >= 2


def test_graphs_replay_what_they_captured(gpus: list[Counted]) -> None:
    x, w = layer()
    outblas.linear(x.view(2, -1, x.shape[1]), w)  # loads the kernel
    torch.cuda.synchronize()
    before = computed(gpus)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = outblas.linear(x.view(2, -1, x.shape[1]), w)
    assert computed(gpus) == before + 1
    for seed in (5, 6):
        y, v = layer(seed)
        x.copy_(y), w.copy_(v)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(c.view(-1, c.shape[-1]), exact(y, v.t()))


def test_gradients_follow_the_stream_of_the_forward(gpus: list[Counted]) -> None:
    """Inputs are made late on a side stream; nothing but stream order protects either product."""
    y, w = layer(grad=True)
    grad = (numbers(LAYER[0], LAYER[1], seed=4) == 2).half()
    outblas.linear(y, w).backward(grad)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for seed, stream in enumerate(streams):
        late, v = torch.zeros_like(y).detach(), layer(seed)[1].requires_grad_()
        source = layer(seed + 7)[0]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late.copy_(source)
            result = outblas.linear(late.requires_grad_(), v)
            result.backward(grad)
        results.append((source, v, late, result))
    torch.cuda.synchronize()
    for source, v, late, result in results:
        assert torch.equal(result, exact(source, v.t()))
        assert torch.equal(late.grad, exact(grad, v)) and torch.equal(v.grad, exact(grad.t(), source))


def test_four_threads_train_at_once(gpus: list[Counted]) -> None:
    grad = (numbers(LAYER[0], LAYER[1], seed=4) == 2).half()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x, w = layer(seed, grad=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                for _ in range(20):
                    result = outblas.linear(x, w)
                    found = torch.autograd.grad(result, (x, w), grad)
                torch.cuda.current_stream().synchronize()
            assert torch.equal(result, exact(x, w.t()))
            assert torch.equal(found[0], exact(grad, w)) and torch.equal(found[1], exact(grad.t(), x))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_two_gpus_are_served_whichever_is_current(gpus: list[Counted]) -> None:
    if len(gpus) < 2:
        pytest.skip("one GPU")
    for current in (0, 1):
        with torch.cuda.device(current):
            for index in (0, 1, 1, 0):
                x, w = layer(index, device=f"cuda:{index}", grad=True)
                result = outblas.linear(x, w)
                assert result.device == x.device and torch.equal(result, exact(x, w.t()))
                grad = (numbers(LAYER[0], LAYER[1], seed=4, device=x.device) == 2).half()
                assert torch.equal(torch.autograd.grad(result, x, grad)[0], exact(grad, w))
    assert all(state.status()["kernels_loaded"] for state in gpus[:2])
    with pytest.raises(RuntimeError, match="same device"):
        outblas.mm(numbers(8, 8, device="cuda:0"), numbers(8, 8, device="cuda:1"))
