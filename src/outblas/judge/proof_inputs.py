"""Inputs of the proof, each of which exposes one kind of wrong kernel (see outblas.judge.gates).

Every pair is (A, B as stored), drawn from a generator with a fixed seed.
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
#: Share of the lines of a mixed operand that hold integers, and of those that are scaled.
_OF_A_KIND = 1 / 8


def normal_inputs(problem: Problem, seed: int, device: str = "cpu", scale: float = 1.0) -> tuple[Any, Any]:
    """Return operands drawn from N(0, scale^2).

    Returns:
        A (M, K), and B as stored (``problem.b_shape``). The same arguments give the same values; torch's own random
            state stays as it is.
    """
    return _draw(problem, seed, device, lambda t, generator: t.normal_(std=scale, generator=generator))


def positive_inputs(problem: Problem, device: str = "cpu", seed: int = 0) -> tuple[Any, Any]:
    """Return (A, B as stored) drawn from U(0, 1), in the problem's dtype; ``seed`` is added to a fixed one.

    Columns of A from 1024 on are 0, so at most 1,024 terms of every sum count. B has no such zeros.
    """
    a, b = _draw(problem, 6 + seed, device, lambda t, generator: t.uniform_(0.0, 1.0, generator=generator))
    a[:, _POSITIVE_TERMS:] = 0.0
    return a, b


def scaled_inputs(problem: Problem, a: Any, b: Any) -> tuple[Any, Any]:
    """Return (A with row i times 2^(i % 9 - 4), B): the first nine rows times 2^-4, 2^-3 to 2^4, then again.

    A is a new tensor; B is the one that was passed.

    Args:
        a: (M, K).
        b: B as stored.
    """
    rows = a.new_tensor([2.0 ** ((i % 9) - 4) for i in range(problem.m)])
    return a * rows.unsqueeze(1), b


def cancelling_inputs(problem: Problem, a: Any, b: Any) -> tuple[Any, Any]:
    """Return copies of (A, B) in which the second half of K cancels the first: A repeats it, B repeats it negated.

    So A B is 0 if K is even. If K is odd, the last column of A and the last row of B stay as they are.

    Args:
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
    """
    return ((what, *draw()) for what, draw in integer_draws(problem, device))


def integer_draws(
    problem: Problem, device: str = "cpu", seed: int = 0
) -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """Yield (name, function) for each of the four pairs of :func:`integer_inputs`, in the same order.

    The function takes no arguments and returns (A, B as stored). Nothing is drawn before it is called.

    Args:
        seed: added to the fixed seeds.
    """
    k, (top, _) = problem.k, _integer_range(problem)

    def integers(seed: int, low: int, high: int) -> Callable[[], tuple[Any, Any]]:
        def fill(t: Any, generator: Any) -> Any:
            return _fill_sparse(problem, t, low, high, generator)

        return lambda: _draw(problem, seed, device, fill)

    def ones() -> tuple[Any, Any]:
        a, b = _draw(problem, 5, device, lambda t, generator: t.fill_(1.0))
        limit = 2000 if problem.acc == "fp16" else 60000
        b_as_k_by_n(problem, b)[:1] = 2.0 if k % 2 == 0 else 3.0
        if k > limit:
            a[:, limit:] = 0.0
        return a, b

    yield "0/1 inputs", integers(2 + seed, 0, 1)
    yield f"integers 0..{top}", integers(3 + seed, 0, top)
    yield f"integers -{top}..{top}", integers(4 + seed, -top, top)
    # Sums that are odd and, for fp32, past 2048: A rows of ones against B of ones and one 3.
    yield "rows of ones", ones


def fill_integers(problem: Problem, a: Any, b: Any, seed: int = 4, signed: bool = True) -> None:
    """Fill A and B with the integers -T..T of :func:`integer_inputs`, in place and with little further memory.

    Args:
        a: (M, K).
        b: B as stored, on the same device.
        seed: seed of the draw; torch's own random state stays as it is.
        signed: False: the integers 0..T, whose sums are large.
    """
    import torch

    top, _ = _integer_range(problem)
    generator = torch.Generator(a.device).manual_seed(seed)
    for operand in (a, b):
        _fill_sparse(problem, operand, -top if signed else 0, top, generator)


def fill_mixed(problem: Problem, a: Any, b: Any, seed: int) -> tuple[Any, Any]:
    """Fill A and B in place with N(0, 1), some integers and some scaled rows: the operands of untrusted kernels.

    An eighth of A's rows and of B's columns, drawn one by one, hold the integers -T..T of :func:`integer_inputs`.
    Another eighth of A's rows is multiplied by a power of two from 2^-4 to 2^4.

    Args:
        a: (M, K).
        b: B as stored, on the same device.
        seed: seed of the draw. The same seed gives the same values on one kind of device.

    Returns:
        Bool tensors (M,) and (N,): the rows of A and the columns of B that hold integers alone.
    """
    import torch

    top, _ = _integer_range(problem)
    generator = torch.Generator(a.device).manual_seed(seed)
    drawn = []
    for operand, extent in ((a, problem.m), (b_as_k_by_n(problem, b).t(), problem.n)):  # lines of K elements each
        operand.normal_(generator=generator)
        lot = torch.rand(extent, generator=generator, device=a.device)
        whole = lot < _OF_A_KIND
        integers = _fill_sparse(problem, torch.empty_like(operand), -top, top, generator)
        operand.copy_(torch.where(whole.unsqueeze(1), integers, operand))
        drawn.append((lot, whole))
    (lot, rows), (_, columns) = drawn
    powers = torch.randint(-4, 5, (problem.m,), generator=generator, device=a.device)
    scale = torch.where(lot > 1 - _OF_A_KIND, torch.exp2(powers.float()), 1.0)
    a.mul_(scale.to(a.dtype).unsqueeze(1))
    return rows, columns


def put_special_values(problem: Problem, a: Any, b: Any, seed: int) -> None:
    """Put Inf, -Inf and NaN at drawn places of A and B, in place, and make one drawn row of A mostly subnormal.

    Args:
        a: (M, K), finite.
        b: B as stored, finite, on the same device.
    """
    import random

    draw = random.Random(seed)
    y = b_as_k_by_n(problem, b)
    a[draw.randrange(problem.m)] *= 2.0**-20 if problem.dtype == "fp16" else 2.0**-130
    for value in (math.inf, -math.inf, math.nan):
        a[draw.randrange(problem.m), draw.randrange(problem.k)] = value
        y[draw.randrange(problem.k), draw.randrange(problem.n)] = value


def _integer_range(problem: Problem) -> tuple[int, float]:
    """Return (T, share of elements that are not zero) with which sums are exact in the accumulator."""
    if problem.acc == "fp32":
        return max(1, min(15, int(math.sqrt(60000 / problem.k)))), min(1.0, math.sqrt(60000 / problem.k))
    return 1, min(1.0, math.sqrt(1024 / problem.k))


def _fill_sparse(problem: Problem, t: Any, low: int, high: int, generator: Any) -> Any:
    """Fill a tensor with integers from low to high, and with as many zeros as K needs; return it."""
    import torch

    t.random_(low, high + 1, generator=generator)
    density = _integer_range(problem)[1]
    if density < 1.0:
        t.mul_(torch.empty_like(t).bernoulli_(density, generator=generator))
    return t


def special_inputs(problem: Problem, device: str = "cpu", seed: int = 0) -> tuple[Any, Any]:
    """Return (A, B as stored) from N(0, 1) with special values, each of which rests on single products.

    ``seed`` is added to the fixed seed of the other values.

    So no order of addition can change the result. Rows of A that do not exist are left out:

    - rows 0 to 3 have one Inf, -Inf, NaN and Inf;
    - row 4 is 0 except one huge value (60000 in fp16, 3e38 in bf16);
    - row 5 has subnormals and zeros only;
    - row 6 begins with Inf and -Inf, if K is above 1.

    If N is above 3, column 1 of the (K, N) view of B has an Inf, and column 2 a NaN.
    """
    import torch

    a, b = normal_inputs(problem, 10 + seed, device)
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


def _draw(problem: Problem, seed: int, device: str, fill: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Return (A, B as stored), filled by ``fill(tensor, generator)``.

    The generator is a new one: torch's own may be drawn from by another thread at the same time.
    """
    import torch

    generator, dtype = torch.Generator(device).manual_seed(seed), torch_dtype(problem)
    a = fill(torch.empty((problem.m, problem.k), dtype=torch.float32, device=device), generator)
    b = fill(torch.empty(problem.b_shape, dtype=torch.float32, device=device), generator)
    return a.to(dtype), b.to(dtype)
