"""Inputs of the proof, each of which exposes one kind of wrong kernel (see outblas.judge.gates).

Every pair is (A, B as stored), drawn from the device's own generator with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from outblas.core.problem import Problem
from outblas.judge.operands import torch_dtype
from outblas.judge.reference import b_as_k_by_n

#: Terms of one sign that are summed at most: the truncation of tensor cores is a bias linear in their number.
_POSITIVE_TERMS = 1024


def normal_inputs(problem: Problem, seed: int, device: str = "cpu", scale: float = 1.0) -> tuple[Any, Any]:
    """Return operands drawn from N(0, scale^2).

    Args:
        problem: the problem; its dtype is that of the operands.
        seed: seed of the draw.
        device: device of the operands.
        scale: standard deviation.

    Returns:
        A (M, K), and B as stored (``problem.b_shape``). The same arguments give the same values; torch's own random
            state stays as it is.
    """
    return _draw(problem, seed, device, lambda t: t.normal_(std=scale))


def positive_inputs(problem: Problem, device: str = "cpu") -> tuple[Any, Any]:
    """Return (A, B as stored) drawn from U(0, 1) with a fixed seed, in the problem's dtype.

    Columns of A from 1024 on are 0, so at most 1,024 terms of every sum count. B has no such zeros.
    """
    a, b = _draw(problem, 6, device, lambda t: t.uniform_(0.0, 1.0))
    a[:, _POSITIVE_TERMS:] = 0.0
    return a, b


def scaled_inputs(problem: Problem, a: Any, b: Any) -> tuple[Any, Any]:
    """Return (A with row i times 2^(i % 9 - 4), B): the first nine rows times 2^-4, 2^-3 to 2^4, then again.

    A is a new tensor; B is the one that was passed.

    Args:
        problem: the problem.
        a: (M, K).
        b: B as stored.
    """
    rows = a.new_tensor([2.0 ** ((i % 9) - 4) for i in range(problem.m)])
    return a * rows.unsqueeze(1), b


def cancelling_inputs(problem: Problem, a: Any, b: Any) -> tuple[Any, Any]:
    """Return copies of (A, B) in which the second half of K cancels the first: A repeats it, B repeats it negated.

    So A B is 0 if K is even. If K is odd, the last column of A and the last row of B stay as they are.

    Args:
        problem: the problem.
        a: (M, K).
        b: B as stored.
    """
    a, b = a.clone(), b.clone()
    half, y = problem.k // 2, b_as_k_by_n(problem, b)
    a[:, half : 2 * half] = a[:, :half]
    y[half : 2 * half] = -y[:half]
    return a, b


def integer_inputs(problem: Problem, device: str = "cpu") -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, A, B as stored) whose sums are exact in the claimed accumulator in any order of addition.

    There are four: "0/1 inputs", "integers 0..T", "integers -T..T" and "rows of ones". For fp32 accumulation T is
    floor(sqrt(60000 / K)), from 1 to 15. If K is large enough, sums go past 2048, where a half accumulator loses the
    odd numbers, up to about 60,000. For fp16 accumulation T is 1, and sums stay below 2048.

    Args:
        problem: the problem; its dtype is that of the operands.
        device: device of the operands.
    """
    return ((what, *draw()) for what, draw in integer_draws(problem, device))


def integer_draws(problem: Problem, device: str = "cpu") -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """Yield (name, function) for each of the four pairs of :func:`integer_inputs`, in the same order.

    The function takes no arguments and returns (A, B as stored). Nothing is drawn before it is called.

    Args:
        problem: the problem.
        device: device of the operands.
    """
    k = problem.k
    if problem.acc == "fp32":
        top = max(1, min(15, int(math.sqrt(60000 / k))))
        density = min(1.0, math.sqrt(60000 / k))
    else:
        top, density = 1, min(1.0, math.sqrt(1024 / k))

    def integers(seed: int, low: int, high: int) -> Callable[[], tuple[Any, Any]]:
        def fill(t: Any) -> Any:
            import torch

            t.random_(low, high + 1)
            if density < 1.0:
                t.mul_(torch.empty_like(t).bernoulli_(density))
            return t

        return lambda: _draw(problem, seed, device, fill)

    def ones() -> tuple[Any, Any]:
        a, b = _draw(problem, 5, device, lambda t: t.fill_(1.0))
        limit = 2000 if problem.acc == "fp16" else 60000
        b_as_k_by_n(problem, b)[:1] = 2.0 if k % 2 == 0 else 3.0
        if k > limit:
            a[:, limit:] = 0.0
        return a, b

    yield "0/1 inputs", integers(2, 0, 1)
    yield f"integers 0..{top}", integers(3, 0, top)
    yield f"integers -{top}..{top}", integers(4, -top, top)
    # Sums that are odd and, for fp32, past 2048: A rows of ones against B of ones and one 3.
    yield "rows of ones", ones


def special_inputs(problem: Problem, device: str = "cpu") -> tuple[Any, Any]:
    """Return (A, B as stored) from N(0, 1) with special values, each of which rests on single products.

    So no order of addition can change the result. Rows of A that do not exist are left out:

    - rows 0 to 3 have one Inf, -Inf, NaN and Inf;
    - row 4 is 0 except one huge value (60000 in fp16, 3e38 in bf16);
    - row 5 has subnormals and zeros only;
    - row 6 begins with Inf and -Inf, if K is above 1.

    If N is above 3, column 1 of the (K, N) view of B has an Inf, and column 2 a NaN.
    """
    import torch

    a, b = normal_inputs(problem, 10, device)
    y, k = b_as_k_by_n(problem, b), problem.k
    tiny, huge = (2.0**-24, 60000.0) if problem.dtype == "fp16" else (2.0**-133, 3.0e38)
    rows: list[tuple[int, float]] = [(0, math.inf), (0, -math.inf), (k // 2, math.nan), (k - 1, math.inf)]
    for row, (column, value) in enumerate(rows):
        if row < problem.m:
            a[row, column] = value
    if problem.m > 4:
        a[4] = 0.0
        a[4, k // 3] = huge
    if problem.m > 5:
        a[5] = tiny * torch.arange(k, device=device, dtype=torch.float32).remainder(5).to(a.dtype)
    if problem.m > 6 and k > 1:
        a[6, 0], a[6, 1] = math.inf, -math.inf
    if problem.n > 3:
        y[k // 2, 1] = math.inf
        y[k // 4, 2] = math.nan
    return a, b


def _draw(problem: Problem, seed: int, device: str, fill: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(A, B as stored) filled by ``fill``, from the device's own generator of torch, seeded for the while.

    Not by torch.manual_seed, which also queues seeds for every kind of device that is not there: 0.4 ms.
    """
    import torch

    devices = [torch.device(device).index or 0] if device.startswith("cuda") else []
    dtype = torch_dtype(problem)
    with torch.random.fork_rng(devices=devices):
        (torch.cuda.manual_seed if devices else torch.default_generator.manual_seed)(seed)
        a = fill(torch.empty((problem.m, problem.k), dtype=torch.float32, device=device))
        b = fill(torch.empty(problem.b_shape, dtype=torch.float32, device=device))
    return a.to(dtype), b.to(dtype)
