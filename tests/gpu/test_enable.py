"""outblas.enable() on a GPU: the same results of eager, trained, compiled and captured models, by our kernels."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from support.everything_fixture import Counted, computed, exact, gpus_fixture, numbers  # noqa: F401  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def on(gpus: list[Counted]) -> Iterator[list[Counted]]:
    assert outblas.enable()
    yield gpus
    torch.cuda.synchronize()
    outblas.disable()
    assert not outblas.enabled()


def model(device: Any = "cuda", seed: int = 0) -> Any:
    """Two layers without a bias and one with, of whole numbers."""
    layers = [torch.nn.Linear(256, 128, bias=False), torch.nn.ReLU(), torch.nn.Linear(128, 64, bias=True)]
    made = torch.nn.Sequential(*layers).to(device, torch.float16)
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            parameter.copy_((numbers(*parameter.shape, seed=seed + index, device=device) == 2).half())
    return made


def trained(made: Any, x: Any) -> list[Any]:
    """The result and all gradients; sums of few ones, which fp16 holds exactly."""
    result = made(x)
    seen = (numbers(*result.shape, seed=9, device=x.device) == 2).half()
    return [result, *torch.autograd.grad(result, [x, *made.parameters()], seen)]


def few(*shape: int, seed: int = 5, device: Any = "cuda") -> Any:
    """Ones, one in 25."""
    picked = (numbers(*shape, seed=seed, device=device) == 2) & (numbers(*shape, seed=seed + 50, device=device) == 2)
    return picked.half().requires_grad_()


def test_a_model_trains_the_same(on: list[Counted]) -> None:
    made, x = model(), few(4, 32, 256)
    outblas.disable()
    expected = trained(made, x)
    outblas.enable()
    before, counts = computed(on), dict(outblas.status()["torch"])
    for _ in range(3):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(trained(made, x), expected, strict=True))
    assert computed(on) >= before + 9, "a forward and two products of data gradients, each time"
    assert outblas.status()["torch"]["ours"] >= counts["ours"] + 9
    assert outblas.status()["torch"]["torchs"] > counts["torchs"], "the weights' gradients"


def test_random_products_are_exact(on: list[Counted]) -> None:
    chance = random.Random(1000)
    before = computed(on)
    for case in range(1000):
        m, n, k = (chance.choice([0, 1, 7, 8, 33, 64, 128, 200]) for _ in range(3))
        dtype = chance.choice([torch.float16, torch.bfloat16, torch.float32])
        a, b = numbers(m, k + 2, dtype=dtype, seed=case), numbers(n, k, dtype=dtype, seed=case + 1)
        a = a[:, chance.choice([0, 1, 2]) :][:, :k] if chance.random() < 0.3 else a[:, :k].contiguous()
        b = b.t() if chance.random() < 0.5 else b.t().contiguous()
        for found in (a @ b, torch.mm(a, b), torch.bmm(a[None], b[None])[0], torch.matmul(a[None], b)[0]):
            assert torch.equal(found, exact(a, b)), (case, a.shape, a.stride(), b.shape, b.stride(), dtype)
    assert computed(on) > before + 500


def test_operands_of_two_devices_are_an_error_as_before(on: list[Counted]) -> None:
    x = numbers(64, 64)
    others = [numbers(64, 64, device="cpu")] + ([numbers(64, 64, device="cuda:1")] if len(on) > 1 else [])
    for other in others:
        for a, b in ((x, other), (other, x)):
            with pytest.raises(RuntimeError):
                torch.mm(a, b)
    assert torch.equal(x @ x, exact(x, x))


def test_autocast_chooses_the_dtype(on: list[Counted]) -> None:
    x, w = numbers(64, 128, dtype=torch.float32), numbers(32, 128, dtype=torch.float32)
    before = computed(on)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = torch.nn.functional.linear(x, w)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact(x, w.t()).bfloat16())
    assert computed(on) == before + 1


def test_graphs_replay_the_model(on: list[Counted]) -> None:
    made, x = model(), few(32, 256).detach()
    with torch.no_grad():
        made(x)
        torch.cuda.synchronize()
        before = computed(on)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            c = made(x)
        assert computed(on) == before + 1
        for seed in (6, 7):
            x.copy_(few(32, 256, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            outblas.disable()
            assert torch.equal(c, made(x))
            outblas.enable()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_has_our_products(mode: str, on: list[Counted]) -> None:
    made, x = model(), few(32, 256)
    outblas.disable()
    expected = trained(made, x)
    outblas.enable()
    torch._dynamo.reset()
    compiled = outblas.status()["torch"]["compiled"]
    run = torch.compile(made, fullgraph=True, mode=mode)
    before = computed(on)
    # From Inductor's cache the graph would come with our operator in it, and the pass would have nothing to do.
    with torch._inductor.config.patch(force_disable_caches=True):
        for _ in range(4):
            result = run(x)
            seen = (numbers(*result.shape, seed=9) == 2).half()
            found = [result, *torch.autograd.grad(result, [x, *made.parameters()], seen)]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert computed(on) > before
    assert outblas.status()["torch"]["compiled"] > compiled


def test_code_for_any_m_has_our_products(on: list[Counted]) -> None:
    """A single compiled graph serves all numbers of rows; each CUDA graph holds the kernel of its number."""
    made = model()
    torch._dynamo.reset()
    compiled, graphs = outblas.status()["torch"]["compiled"], torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run, stream = torch.compile(made, fullgraph=True, dynamic=True), torch.cuda.Stream()
    before = computed(on)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        for rows in (32, 5, 100):
            x = few(rows, 256, seed=rows).detach()
            torch._dynamo.mark_dynamic(x, 0)
            product = exact(torch.relu(exact(x, made[0].weight.t())), made[2].weight.t())
            expected = (product.float() + made[2].bias.float()).half()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):  # of the capture: for another one dynamo may compile again
                found = run(x)
            torch.cuda.synchronize()
            assert torch.equal(found, expected)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = run(x)
            captured.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, expected)
    assert computed(on) >= before + 6, "a call and a capture for each number of rows"
    assert outblas.status()["torch"]["compiled"] > compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1


def test_threads_and_streams_share_it(on: list[Counted]) -> None:
    made = model()
    inputs = [few(32, 256, seed=seed) for seed in range(4)]
    outblas.disable()
    expected = [trained(made, x) for x in inputs]
    outblas.enable()
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), outblas.use():
                for _ in range(20):
                    found = trained(made, inputs[index])
                stream.synchronize()
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected[index], strict=True))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert outblas.enabled()


def test_two_gpus_are_served_at_once(on: list[Counted]) -> None:
    if len(on) < 2:
        pytest.skip("one GPU")
    for index in (0, 1, 0):
        made, x = model(f"cuda:{index}"), few(32, 256, device=f"cuda:{index}")
        found = trained(made, x)
        outblas.disable()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, trained(made, x), strict=True))
        outblas.enable()
    assert all(state.status()["kernels_loaded"] for state in on[:2])


def test_the_environment_keeps_it_out(gpus: list[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBLAS_DISABLE", "1")
    with pytest.warns(RuntimeWarning, match="OUTBLAS_DISABLE"):
        assert not outblas.enable()
    x = numbers(64, 64)
    assert torch.equal(x @ x, exact(x, x)) and computed(gpus) == 0


#: In a process of its own: no product of torch has made a handle of cuBLAS before.
CAPTURES = """
import threading
import torch, outblas

assert outblas.enable()
shapes = [(m, n, 4096) for m in (16, 64, 128, 1, 8, 256) for n in (4096, 14336, 1024, 6144)]
failures = []

def pair(shape, device):
    m, n, k = shape
    ones = lambda *extents: torch.ones(extents, device=device, dtype=torch.float16)
    return ones(m, k), ones(n, k).t()

def by_a_kernel(shape):
    return not outblas.explain(*pair(shape, 0)).startswith(("torch.", "cuBLASLt"))

served = next(filter(by_a_kernel, shapes))

def work(device):
    try:
        with torch.cuda.device(device), torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            a, b = pair(served, device)
            x, count = torch.ones(32, 32, device=device), outblas.status()["torch"]["ours"]
            torch.mm(a, b)  # the warm-up
            assert outblas.status()["torch"]["ours"] == count + 1, outblas.status()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = torch.mm(x, x)
            found.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert found.eq(32).all()
    except BaseException as error:
        failures.append(error)

for device in range(min(2, torch.cuda.device_count())):
    before = outblas.status()["torch"]["torchs"]
    work(device)
    work_elsewhere = threading.Thread(target=work, args=(device,))
    work_elsewhere.start()
    work_elsewhere.join()
    assert not failures, failures
    assert outblas.status()["torch"]["torchs"] == before + 2, "those in the graphs alone"
outblas.disable()
print("captured")
"""

#: In a process of its own, as torch keeps the first kernel that Python has registered for an operator in mind.
OVERRIDDEN = """
import sys, warnings
import torch, outblas

def theirs(a, b):
    return torch.full((*a.shape[:-1], b.shape[-1]), 7, dtype=a.dtype, device=a.device)

name = sys.argv[1]
a, b = (torch.ones(64, 64, device="cuda", dtype=torch.float16) for _ in range(2))
multiply = (lambda: torch.mm(a, b)) if name == "mm" else (lambda: torch.bmm(a[None], b[None]))
wanted = multiply()
library = torch.library.Library("aten", "IMPL")
library.impl(name, theirs, "CUDA")
for _ in range(2):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert not outblas.enable() and not outblas.enabled()
    assert [one.category for one in seen] == [RuntimeWarning], seen
    text = str(seen[0].message)
    assert f"aten::{name}" in text and "\\n" not in text, text
    assert multiply().eq(7).all()
library._destroy()
assert torch.equal(multiply(), wanted)
assert outblas.enable() and outblas.enabled()
assert torch.equal(multiply(), wanted)
outblas.disable()
assert torch.equal(multiply(), wanted)
print("refused")
"""


def printed(script: str, *words: str, **variables: str) -> str:
    """Return the standard output of a script, of a process that must succeed."""
    command = [sys.executable, "-c", script, *words]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_graph_may_begin_with_torchs_product_after_ours(native: str) -> None:
    """The warm-up makes torch's handle of cuBLAS, in each thread and on each GPU."""
    if gpu_of_device(0).name != "h200":
        pytest.skip("the packaged library is of an H200")
    assert "captured" in printed(CAPTURES, OUTBLAS_NATIVE=native, OUTBLAS_DISABLE="")


@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_another_packages_kernel_is_left_alone(name: str) -> None:
    if gpu_of_device(0).name != "h200":
        pytest.skip("the packaged library is of an H200")
    assert "refused" in printed(OVERRIDDEN, name, OUTBLAS_DISABLE="")
