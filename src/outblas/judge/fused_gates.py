"""Prove a kernel with an epilogue against fp64 of the whole expression.

The expression is act(A B + bias) + residual, or act(gate) * up of a gated epilogue. The gates are those of
:mod:`outblas.judge.gates`; the first one that fails names the status:

=======  =====================================================================================
memory   C fully written over NaN; canaries around A, B and C, and all inputs, as they were
exact    integers through bias and residual (no activation): every bit right
bound    N(0, 1) and scaled inputs within the bound below
special  NaN and infinities where fp64 has them; bitwise repeatable, whatever C held before
=======  =====================================================================================

Let z = A B + bias and y = act(z) + residual, all in fp64. L is the largest slope of the activation (1; SiLU 1.1,
GELU 1.13), u the unit roundoff of the output and s its floor. With the product's bound of
:mod:`outblas.judge.reference`:

    |err| <= u |y| + L (c sqrt(K) 2^-24 (|A| |B|) + 2^-23 |z|) + E |z| + 2^-23 |y| + s

2^-23 |z| and 2^-23 |y| are the additions in fp32. E is the evaluation of the activation: 2^-20 (fast exponential and
division, the normal tail to 1e-7), or 0 without an activation.

In a gated epilogue, g and u0 are neighbouring columns of z, and y = act(g) u0. S(x) is the error of a sum: the bracket
after L above. The gate's factor has the error D = L S(g) + E |g|, the other factor S(u0). So:

    |err| <= u |y| + (1 + u) (D (|u0| + S(u0)) + |act(g)| S(u0) + 2^-23 |y|) + s

2^-23 |y| is the rounding of the product in fp32. The factor 1 + u rounds the error as well, which is not small beside y
if the two factors differ in size. Source of the product's bound: :mod:`outblas.judge.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from outblas.core.evaluation import GateFailed, Status, Verdict
from outblas.core.problem import Problem
from outblas.judge.gates import wrong_result_text
from outblas.judge.operands import Operands, equal_bits, torch_dtype
from outblas.judge.proof_inputs import integer_inputs, normal_inputs
from outblas.judge.reference import ERROR_C, SMALLEST_STEP, UNIT_ROUNDOFF, fp64_product, magnitudes
from outblas.kernels.epilogue import Epilogue
from outblas.runtime.fused_launch import Extra, FusedKernel

#: Largest slope of each activation, rounded up, and what its evaluation in fp32 is off by, of |z|.
ACTIVATION_SLOPE = {"none": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
ACTIVATION_ERROR = 2.0**-20
#: Columns by which rows of the residual that is proved with lie further apart than they are long.
_APART = 24


def apply_activation(z: Any, epilogue: Epilogue) -> Any:
    """Return the activation of every element of ``z``, in the dtype of ``z``. Bias, residual and gate are not applied.

    Args:
        z: floating-point tensor of any shape. Without an activation, ``z`` itself is returned.
        epilogue: its ``activation`` says which one: ``none``, ``silu``, ``gelu`` (exact, by erf) or ``gelu_tanh``.
    """
    import torch

    if epilogue.activation == "silu":
        return z * torch.sigmoid(z)
    if epilogue.activation == "gelu":
        return z * 0.5 * torch.special.erfc(-z * math.sqrt(0.5))
    if epilogue.activation == "gelu_tanh":
        return z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    return z


def fused_reference(problem: Problem, a: Any, b: Any, extra: Extra, epilogue: Epilogue) -> tuple[Any, Any]:
    """Return (z, y) in fp64: z = A B + bias, and y is what C should hold.

    y is act(z) + residual, of shape (M, N). Gated, it is act(even columns of z) * odd columns, of shape (M, N / 2),
    without residual.

    Args:
        a: (M, K), of any dtype.
        b: B as stored (``problem.b_shape``).
        extra: bias (N,) and residual (M, N); None for what the epilogue lacks.
        epilogue: gives the activation and whether it is gated. Bias and residual are added if ``extra`` has them.
    """
    z = fp64_product(problem, a, b)
    if extra.bias is not None:
        z = z + extra.bias.double()
    if epilogue.gated:
        return z, apply_activation(z[:, 0::2], epilogue) * z[:, 1::2]
    y = apply_activation(z, epilogue)
    return z, y if extra.residual is None else y + extra.residual.double()


def fused_error_bound(problem: Problem, a: Any, b: Any, z: Any, y: Any, epilogue: Epilogue) -> Any:
    """Return the largest allowed |error| of every element of C, in fp64, for fp32 accumulation.

    The module's text has the formula. The result has the shape of ``y``.

    Args:
        a: (M, K).
        b: B as stored.
        z: first result of :func:`fused_reference`, (M, N).
    """
    size = magnitudes(problem, a, b)[0].double()
    sums = ERROR_C * math.sqrt(problem.k) * 2.0**-24 * size + 2.0**-23 * z.abs()
    evaluation = 0.0 if epilogue.activation == "none" else ACTIVATION_ERROR
    slope = ACTIVATION_SLOPE[epilogue.activation]
    if epilogue.gated:
        gate, up = z[:, 0::2], z[:, 1::2]
        off = slope * sums[:, 0::2] + evaluation * gate.abs()
        off = (
            off * (up.abs() + sums[:, 1::2])
            + apply_activation(gate, epilogue).abs() * sums[:, 1::2]
            + 2.0**-23 * y.abs()
        )
        return (
            UNIT_ROUNDOFF[problem.dtype] * y.abs()
            + (1 + UNIT_ROUNDOFF[problem.dtype]) * off
            + SMALLEST_STEP[problem.dtype]
        )
    return (
        UNIT_ROUNDOFF[problem.dtype] * y.abs()
        + slope * sums
        + evaluation * z.abs()
        + 2.0**-23 * y.abs()
        + SMALLEST_STEP[problem.dtype]
    )


def worst_fused_error(problem: Problem, a: Any, b: Any, extra: Extra, epilogue: Epilogue, c: Any) -> float:
    """Return the largest |error| / bound over C, a float; at most 1 is right. NaN if there is a NaN in C or the inputs.

    Args:
        a: (M, K).
        b: B as stored.
        c: what the kernel wrote: (M, N), or (M, N / 2) if gated.
    """
    z, y = fused_reference(problem, a, b, extra, epilogue)
    return float(((c.double() - y).abs() / fused_error_bound(problem, a, b, z, y, epilogue)).max())


class FusedProof:
    """Guarded operands, bias and residual, and the candidate's one call on them. Inputs are changed in place.

    Args:
        entry: the fused kernel; the constructor binds it.
        device: ``cuda:N`` or ``cpu``.

    Attributes:
        data: one guarded operand set, with random A and B.
        extra: bias and residual with random values; None for what the epilogue lacks.
    """

    def __init__(self, entry: FusedKernel, problem: Problem, device: str) -> None:
        import torch

        self.problem, self.epilogue, self.cuda = problem, entry.epilogue, device.startswith("cuda")
        self.data = Operands(problem, 1, device, columns=self.epilogue.columns(problem.n))
        self.data.fill_normal(1)
        dtype = torch_dtype(problem)
        bias = torch.randn(problem.n, device=device).to(dtype) if self.epilogue.bias else None
        wide = torch.randn(problem.m, problem.n + _APART, device=device).to(dtype)
        self.extra = Extra(bias, wide[:, : problem.n] if self.epilogue.residual else None)
        # Of A: products of two sums are to stay inside of fp16.
        self.size = 16.0 / math.sqrt(problem.k) if self.epilogue.gated else 1.0
        self.stream = 0
        if self.cuda:
            self._torch_stream = torch.cuda.Stream(device)
            self.stream = int(self._torch_stream.cuda_stream)
            torch.cuda.synchronize(device)
        self.call = entry.bind(problem, self.data[0], self.extra)

    def run(self, a: Any, b: Any, pattern: int | None = None) -> Any:
        """Copy new inputs in, fill C with NaN, run the call, and return a copy of C.

        C is not compared with anything. An element that the call leaves unwritten is NaN.

        Args:
            a: new values of A, (M, K).
            b: new values of B, as stored, gate and up by turns. A stacked epilogue gets its rows one above the other.
            pattern: 16-bit pattern to fill C with instead; None: NaN.

        Raises:
            GateFailed: MEMORY_VIOLATION: a guard was overwritten, or A, B, bias or residual was changed.
        """
        import torch

        self.data.set_inputs(0, a, torch.cat((b[0::2], b[1::2])) if self.epilogue.stacked else b)
        if pattern is not None:
            self.data.poison(0, pattern)
        before, extra = self.data.input_sum(0), [t.clone() for t in self.extra if t is not None]
        self._wait()
        self.call(self.stream)
        self._wait()
        guard = self.data.broken_guard(0)
        if guard:
            raise GateFailed(Status.MEMORY_VIOLATION, f"the canary around {guard} was overwritten")
        now = [t for t in self.extra if t is not None]  # compared as bits: there may be a NaN
        same = (equal_bits(x, y) for x, y in zip(extra, now, strict=True))
        if not torch.equal(before, self.data.input_sum(0)) or not all(same):
            raise GateFailed(Status.MEMORY_VIOLATION, "A, B, bias or residual was changed")
        return self.data[0][2].clone()

    def fill(self, bias: Any, residual: Any) -> None:
        """Set new values of bias and residual in place; an operand that the epilogue lacks is skipped.

        Args:
            bias: function that fills the tensor it gets, e.g. ``lambda t: t.normal_()``.
        """
        for t, fill in ((self.extra.bias, bias), (self.extra.residual, residual)):
            if t is not None:
                fill(t)

    def _wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize()


def prove_fused(entry: FusedKernel, problem: Problem, device: str = "cuda:0") -> Verdict:
    """Prove a fused kernel on one problem with fp32 accumulation.

    Args:
        device: ``cuda:N`` or ``cpu``.

    Returns:
        The verdict: PASSED, or the status and reason of the first gate that failed. ``gates`` names the passed ones:
            all are static, memory, exact, bound and special. With an activation, exact is left out.

    Raises:
        TensorError: the operands do not fit the kernel.
        ConfigError: the config does not fit the problem.
        DeviceError: the candidate faults; torch's errors may be raised instead. The process cannot be used afterwards.
    """
    passed, ratio = ["static"], 0.0
    try:
        bench = FusedProof(entry, problem, device)
        a, b = normal_inputs(problem, 1, device)
        ratio = _within(bench, a * bench.size, b)
        passed.append("memory")
        if entry.epilogue.activation == "none":
            _exact(bench, device)
            passed.append("exact")
        for a, b in _inputs(bench, device):
            ratio = max(ratio, _within(bench, a, b))
        passed.append("bound")
        _special(bench, device)
        passed.append("special")
    except GateFailed as failure:
        return Verdict(failure.status, tuple(passed), failure.detail, failure.ratio)
    return Verdict(Status.PASSED, tuple(passed), "", ratio)


def _within(bench: FusedProof, a: Any, b: Any) -> float:
    c = bench.run(a, b)
    ratio = worst_fused_error(bench.problem, a, b, bench.extra, bench.epilogue, c)
    if not ratio <= 1.0:
        raise GateFailed(Status.WRONG, wrong_result_text(ratio), ratio if math.isfinite(ratio) else None)
    return ratio


def _exact(bench: FusedProof, device: str) -> None:
    import torch

    bench.fill(lambda t: t.random_(-8, 9), lambda t: t.random_(-8, 9))
    for what, a, b in integer_inputs(bench.problem, device):
        y = fused_reference(bench.problem, a, b, bench.extra, bench.epilogue)[1]
        if not torch.equal(bench.run(a, b), y.float().to(torch_dtype(bench.problem))):
            raise GateFailed(Status.WRONG, f"not exact for {what} with integer bias and residual")


def _inputs(bench: FusedProof, device: str) -> Iterator[tuple[Any, Any]]:
    """Sums of the size at which activations bend; large ones; rows of all scales. Bias and residual change, too."""
    p = bench.problem
    for seed, size in ((2, bench.size), (3, 8.0 / math.sqrt(p.k)), (4, 1.0 / math.sqrt(p.k))):
        bench.fill(lambda t, s=size: t.normal_(std=max(s, 0.5)), lambda t: t.normal_(std=4.0))
        a, b = normal_inputs(p, seed, device)
        yield a * size, b
    rows = a.new_tensor([2.0 ** ((i % 9) - 4) for i in range(p.m)]).unsqueeze(1)
    yield a * rows / math.sqrt(p.k), b


def _special(bench: FusedProof, device: str) -> None:
    """NaN and infinities of A, bias and residual come out where fp64 has them; and twice the same bits."""
    import torch

    p = bench.problem
    bench.fill(lambda t: t.normal_(), lambda t: t.normal_())
    a, b = normal_inputs(p, 5, device)
    a *= bench.size
    first = bench.run(a, b)
    for pattern in (0x0000, 0x3C01):
        if not equal_bits(first, bench.run(a, b, pattern)):
            raise GateFailed(Status.NOT_REPEATABLE, "two runs on the same inputs differ bitwise")
    a[0, 0] = math.inf
    a[p.m // 2, p.k - 1] = math.nan
    bias, residual = bench.extra
    if bias is not None:
        bias[0], bias[p.n - 1] = math.inf, math.nan
    if residual is not None:
        residual[p.m - 1, 0], residual[p.m - 1, p.n - 1] = -math.inf, math.nan
    c, y = bench.run(a, b), fused_reference(p, a, b, bench.extra, bench.epilogue)[1]
    # A finite value past the largest of the output's type is an infinity there.
    y = torch.where(y.isfinite(), y.to(torch_dtype(p)).double(), y)
    for what, ours, theirs in (("NaN", c.isnan(), y.isnan()), ("Inf", c.isinf(), y.isinf())):
        if not torch.equal(ours, theirs):
            off = int((ours != theirs).sum())
            raise GateFailed(Status.WRONG, f"{what} differs from fp64 at {off} elements")
