"""The proof of correctness: gates in a fixed order, the first failure ends it.

=======  =====================================================================================
gate     what
=======  =====================================================================================
static   the caller's reason from the SASS: accumulator, spills (outblas.sass.check_static)
memory   C fully written over NaN, canaries around A, B, C whole, inputs unchanged
exact    0/1 and small integers, with sums past 2048 for fp32 accumulation: every bit right
bound    N(0, 1), positive and widely scaled inputs within outblas.oracle's bound
special  Inf, NaN, subnormals and overflow as cuBLAS has them; bitwise repeatable
rules    stream order, capture, two streams, no allocation, thread or state (outblas.rules)
=======  =====================================================================================

Gates memory to special need no GPU: they run on CPU tensors too, which is how the tests try cheats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

from outblas import integrity
from outblas.baselines import Bindable, Call, CublasGemm
from outblas.driver import check, driver
from outblas.evaluation import Status, Verdict
from outblas.operands import GUARDS, Operands, torch_dtype
from outblas.oracle import Oracle, product, right
from outblas.problem import Problem
from outblas.rejected import Rejected
from outblas.rules import check_rules, process_state
from outblas.trials import Trials

Level = Literal["full", "cell"]
#: Guards of the full proof are at least so wide, and as wide as 256 rows of C up to the maximum, bytes.
_GUARD_MIN, _GUARD_MAX = 64 * 1024, 8 * 1024 * 1024
#: Terms of one sign that are summed at most: the truncation of tensor cores is a bias linear in their number.
_POSITIVE_TERMS = 1024


class Lab:
    """Two guarded operand sets, a stream and the candidate's calls on them.

    The same bound call serves every experiment, with inputs changed in place: an answer remembered by
    address is a wrong answer here.

    Args:
        trials: what inputs are drawn from and answers compared with.
    """

    def __init__(self, entry: Bindable, problem: Problem, device: str, trials: Trials) -> None:
        import torch

        self.problem, self.entry, self.device, self.trials = problem, entry, device, trials
        guard = min(_GUARD_MAX, max(_GUARD_MIN, 512 * problem.n))
        self.data = Operands(problem, 2, device, guard)
        self.cuda = device.startswith("cuda")
        self.torch_stream: Any = None
        self.stream = 0
        if self.cuda:
            torch.cuda.set_device(device)  # the raw driver calls go to the current context
            self.torch_stream = torch.cuda.Stream(device)
            self.stream = int(self.torch_stream.cuda_stream)
        for index in range(2):
            self.data.set_inputs(index, *self.normal(100 + index))
        self.wait()
        #: What gate ``rules`` compares with: the process before the candidate was bound.
        self.before = process_state() if self.cuda else {}
        self.calls: list[Call] = [entry.bind(problem, *self.data[i]) for i in range(2)]

    def normal(self, seed: int, scale: float = 1.0, problem: Problem | None = None) -> tuple[Any, Any]:
        """N(0, scale^2) operands on the lab's device, of its problem or of another. Not to be written to."""
        p = problem or self.problem
        drawn: tuple[Any, Any] = self.trials.get((p, seed, scale), lambda: normal(p, seed, self.device, scale))
        return drawn

    def wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize(self.device)

    def run(self, a: Any, b: Any, index: int = 0, pattern: int | None = None) -> Any:
        """C (a copy) of new inputs, with gate ``memory`` on the way.

        Raises:
            Rejected: MEMORY_VIOLATION, or WRONG for elements left unwritten.
        """
        import torch

        self.data.set_inputs(index, a, b)
        if pattern is not None:
            self.data.poison(index, pattern)
        before = self.data.input_sum(index)
        self.wait()
        self.calls[index](self.stream)
        self.wait()
        changed = (before != self.data.input_sum(index)).reshape(1)
        *broken, other = torch.cat((self.data.broken_guards(index), changed)).tolist()  # one wait for all
        for place, found in zip(GUARDS, broken, strict=True):
            if found:
                where = "behind C" if place == "end" else f"in front of {place}"
                raise Rejected(Status.MEMORY_VIOLATION, f"the canary {where} was overwritten")
        if other:
            raise Rejected(Status.MEMORY_VIOLATION, "A or B was changed")
        return self.data[index][2].clone()


def prove(
    entry: Bindable, problem: Problem, static_reason: str | None = None, level: Level = "full",
    gpu_index: int = 0, device: str | None = None, trials: Trials | None = None,
) -> Verdict:  # fmt: skip
    """Prove a way to compute a GEMM on one problem.

    Args:
        static_reason: why gate 1 rejects it (None: it does not).
        level: ``full``: every gate. ``cell``: what a recording repeats in every cell, memory and
            bound on N(0, 1) data (:class:`CellProver` does it on the timed operands).
        device: a torch device instead of ``cuda:gpu_index``; on ``cpu`` gate ``rules`` is left out.
        trials: of the problem, kept from proof to proof (outblas.trials); None: made for this one.

    Raises:
        DeviceError and torch's errors when the candidate faults: the caller's process is then lost
        (outblas.sandbox).
    """
    if static_reason is not None:
        return Verdict(Status.STATIC_REJECTED, (), static_reason)
    if level == "cell":
        return _prove_cell_alone(entry, problem, gpu_index)
    passed = ["static"]
    worst = [0.0]
    before = integrity.snapshot()
    try:
        lab = Lab(entry, problem, device or f"cuda:{gpu_index}", trials or Trials())
        for name, gate in (("memory", _memory), ("exact", _exact), ("bound", _bound), ("special", _special)):
            gate(lab, worst)
            passed.append(name)
        if lab.cuda:
            check_rules(lab)
        name = integrity.tampered(before)
        if name:
            raise Rejected(Status.RULE_BROKEN, f"it replaced {name}")
        if lab.cuda:
            passed.append("rules")
    except Rejected as failure:
        return Verdict(failure.status, tuple(passed), failure.detail, failure.ratio)
    return Verdict(Status.PASSED, tuple(passed), "", worst[0])


def check_cell(data: Operands, oracle: Oracle, before: Any, run: Callable[[], Any]) -> Verdict:
    """Gates memory and bound of operand set 0, with one wait in the end.

    Args:
        oracle: of set 0. before: ``data.input_sum(0)`` of whole inputs and canaries, made once.
        run: enqueues the product on torch's current stream.
    """
    import torch

    data.poison(0)
    run()
    ratio = oracle.worst(data[0][2])
    changed = (data.input_sum(0) != before).to(torch.float32)
    tail = data.tail_broken(0).to(torch.float32)
    worst, inputs, behind = torch.stack((ratio, changed, tail)).tolist()
    if inputs or behind:
        where = "behind C" if behind else "of A or B, or an input,"
        return Verdict(Status.MEMORY_VIOLATION, ("static",), f"the canary {where} was overwritten")
    if not worst <= 1.0:
        return Verdict(Status.WRONG, ("static", "memory"), wrong_text(worst), _finite(worst))
    return Verdict(Status.PASSED, ("static", "memory", "bound"), "", worst)


class CellProver:
    """:func:`check_cell` on operands that are timed: reference, bound and input sum are made once per problem.

    Args:
        data: operands on a GPU, filled; set 0 is the one that is proved on.
        torch_stream: where the calls run, a torch.cuda.Stream.
    """

    def __init__(self, data: Operands, torch_stream: Any) -> None:
        import torch

        self._data, self._stream = data, torch_stream
        a, b, _ = data[0]
        self._oracle = Oracle(data.problem, a, b)
        self._before = data.input_sum(0)
        torch.cuda.synchronize(a.device)

    def call(self, call: Call) -> Verdict:
        """Prove one bound call of operand set 0."""
        return self._check(lambda: call(self._stream.cuda_stream))

    def graph(self, executable: Any) -> Verdict:
        """Prove what a CUgraphExec leaves in operand set 0, e.g. after it was timed."""
        launch, stream = driver().cuGraphLaunch, self._stream.cuda_stream
        return self._check(lambda: check("cuGraphLaunch", launch(executable, stream)))

    def _check(self, run: Callable[[], Any]) -> Verdict:
        import torch

        with torch.cuda.stream(self._stream):
            return check_cell(self._data, self._oracle, self._before, run)


def wrong_text(ratio: float) -> str:
    """One line on a result outside the bound."""
    if math.isnan(ratio):
        return "C holds a NaN: an element not written, or an operand read out of bounds"
    return f"error {ratio:.3g} times the bound"


def normal(problem: Problem, seed: int, device: str = "cpu", scale: float = 1.0) -> tuple[Any, Any]:
    """N(0, scale^2) operands (A, B as stored)."""
    return _draw(problem, seed, device, lambda t: t.normal_(std=scale))


def _memory(lab: Lab, worst: list[float]) -> None:
    _within_bound(lab, "signed", lambda: lab.normal(1), worst)


def _exact(lab: Lab, worst: list[float]) -> None:
    import torch

    p = lab.problem
    for what, draw in _integer_draws(p, lab.device):
        a, b = lab.trials.get(what, draw)
        c = lab.run(a, b)
        expected = lab.trials.get(("product", what), functools.partial(_rounded, p, a, b))
        if not torch.equal(c, expected):
            off = int((c.double() != expected.double()).sum())
            raise Rejected(Status.WRONG, f"{off} of {c.numel()} elements are not exact on {what}")


def _rounded(problem: Problem, a: Any, b: Any) -> Any:
    """The product in the type of C."""
    return product(problem, a, b).float().to(torch_dtype(problem))


def integer_inputs(problem: Problem, device: str = "cpu") -> Iterator[tuple[str, Any, Any]]:
    """(what, A, B) whose products are exact in the claimed accumulator in any order of addition.

    For fp32 accumulation the sums go past 2048, where a half accumulator loses the odd numbers, up
    to 60,000 in fp16. For fp16 accumulation they stay below 2048.
    """
    return ((what, *draw()) for what, draw in _integer_draws(problem, device))


def _integer_draws(problem: Problem, device: str) -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """What each of :func:`integer_inputs` is, and how it is drawn."""
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
        right(problem, b)[:1] = 2.0 if k % 2 == 0 else 3.0
        if k > limit:
            a[:, limit:] = 0.0
        return a, b

    yield "0/1 inputs", integers(2, 0, 1)
    yield f"integers 0..{top}", integers(3, 0, top)
    yield f"integers -{top}..{top}", integers(4, -top, top)
    # Sums that are odd and, for fp32, past 2048: A rows of ones against B of ones and one 3.
    yield "rows of ones", ones


def _bound(lab: Lab, worst: list[float]) -> None:
    p, device = lab.problem, lab.device

    def positive() -> tuple[Any, Any]:
        a, b = _draw(p, 6, device, lambda t: t.uniform_(0.0, 1.0))
        a[:, _POSITIVE_TERMS:] = 0.0
        return a, b

    def scaled() -> tuple[Any, Any]:
        a, b = lab.normal(7, 0.5)
        return a * _column([2.0 ** ((i % 9) - 4) for i in range(p.m)], a), b

    def cancelling() -> tuple[Any, Any]:
        """The second half of K repeats the first with the other sign."""
        a, b = (t.clone() for t in lab.normal(7, 0.5))
        half, y = p.k // 2, right(p, b)
        a[:, half : 2 * half] = a[:, :half]
        y[half : 2 * half] = -y[:half]
        return a, b

    _within_bound(lab, "positive", positive, worst)
    _within_bound(lab, "scaled", scaled, worst)
    if p.k > 1:
        _within_bound(lab, "cancelling", cancelling, worst)


def _within_bound(lab: Lab, what: str, draw: Callable[[], tuple[Any, Any]], worst: list[float]) -> None:
    a, b = lab.trials.get(what, draw)
    c = lab.run(a, b)
    oracle = lab.trials.get(("oracle", what), lambda: Oracle(lab.problem, a, b))
    ratio = float(oracle.worst(c))
    if not ratio <= 1.0:
        raise Rejected(Status.WRONG, wrong_text(ratio), _finite(ratio))
    worst[0] = max(worst[0], ratio)


def _special(lab: Lab, worst: list[float]) -> None:
    import torch

    p = lab.problem
    a, b = lab.trials.get("special", lambda: special_inputs(p, lab.device))
    c = lab.run(a, b)
    theirs = lab.trials.get("cuBLAS", lambda: _their_product(lab, a, b))
    kinds = (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf))
    off = torch.stack([(is_it(c) != is_it(theirs)).sum() for _, is_it in kinds]).tolist()
    for (what, _), count in zip(kinds, off, strict=True):
        if count:
            raise Rejected(Status.WRONG, f"{what} differs from cuBLAS at {count} elements (Inf, NaN, overflow inputs)")
    finite = theirs.isfinite()  # and so is C

    def oracle_of_the_rest() -> Oracle:
        oracle = Oracle(p, torch.nan_to_num(a, 0.0, 0.0, 0.0), torch.nan_to_num(b, 0.0, 0.0, 0.0))
        oracle.reference[~finite] = 0.0
        return oracle

    oracle = lab.trials.get("oracle of the finite", oracle_of_the_rest)
    ratio = float(oracle.worst(torch.where(finite, c, 0.0)))
    if not ratio <= 1.0:
        raise Rejected(Status.WRONG, f"{wrong_text(ratio)} on subnormal and large inputs", _finite(ratio))
    x, y = lab.normal(8)
    first = lab.run(x, y)
    lab.run(*lab.normal(9))
    for _ in range(3):
        if not torch.equal(first.view(torch.int16), lab.run(x, y).view(torch.int16)):
            raise Rejected(Status.NOT_REPEATABLE, "two runs on the same inputs differ in some bit")
    for pattern in (0x0000, 0x3C01):
        if not torch.equal(first.view(torch.int16), lab.run(x, y, pattern=pattern).view(torch.int16)):
            raise Rejected(Status.WRONG, "the result depends on what C held before")


def special_inputs(problem: Problem, device: str = "cpu") -> tuple[Any, Any]:
    """N(0, 1) with special rows of A (Inf, -Inf, NaN, Inf - Inf, subnormals, one huge term) and an Inf and a
    NaN in B. Each special case rests on single products, so that no order of addition can change it."""
    import torch

    a, b = normal(problem, 10, device)
    y, k = right(problem, b), problem.k
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


def _their_product(lab: Lab, a: Any, b: Any) -> Any:
    """cuBLAS' C; on the CPU the fp32 product, which has the same special values."""
    import torch

    p = lab.problem
    if not lab.cuda:
        return (a.float() @ right(p, b).float()).to(torch_dtype(p))
    c = torch.empty((p.m, p.n), dtype=torch_dtype(p), device=lab.device)
    a, b = a.contiguous(), b.contiguous()
    lab.wait()
    reference_blas(torch.device(lab.device).index or 0).bind(p, a, b, c)(lab.stream)
    lab.wait()
    return c


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


def _column(values: list[float], like: Any) -> Any:
    return like.new_tensor(values).unsqueeze(1)


def _finite(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None


def _prove_cell_alone(entry: Bindable, problem: Problem, gpu_index: int) -> Verdict:
    import torch

    data = Operands(problem, 1, f"cuda:{gpu_index}")
    data.fill_normal()
    prover = CellProver(data, torch.cuda.Stream(gpu_index))
    return prover.call(entry.bind(problem, *data[0]))


@functools.cache
def reference_blas(gpu_index: int) -> CublasGemm:
    """One handle for every proof of this process."""
    return CublasGemm(gpu_index)
