"""Shared state of the proof's gates: guarded operands, a stream, and the candidate's calls on them."""

from __future__ import annotations

import threading
from typing import Any

from outblas.core.evaluation import GateFailed, Status
from outblas.core.problem import Problem
from outblas.core.rivals import BaselineCall, Bindable
from outblas.judge.operands import Operands
from outblas.judge.proof_inputs import normal_inputs
from outblas.judge.trials import ProofTrials
from outblas.runtime.driver import check, driver

#: Guards of the full proof are at least so wide, and as wide as 256 rows of C up to the maximum, bytes.
_GUARD_MIN, _GUARD_MAX = 64 * 1024, 8 * 1024 * 1024


class ProofContext:
    """Two guarded operand sets, a stream and the candidate's calls on them.

    Every experiment uses the same bound call and changes its inputs in place. So a candidate that remembers answers by
    address gives wrong results.

    Args:
        entry: the candidate; the constructor binds it to both operand sets.
        device: torch device, ``cuda:N`` or ``cpu``.

    Attributes:
        gpu_index: CUDA ordinal; 0 on the CPU.
        stream: raw CUstream of the calls; 0 on the CPU.
    """

    def __init__(self, entry: Bindable, problem: Problem, device: str, trials: ProofTrials) -> None:
        import torch

        self.problem, self.entry, self.device, self.trials = problem, entry, device, trials
        guard = min(_GUARD_MAX, max(_GUARD_MIN, 512 * problem.n))
        self.data = Operands(problem, 2, device, guard)
        self.cuda = device.startswith("cuda")
        self.gpu_index = torch.device(device).index or 0
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
        self.calls: list[BaselineCall] = [entry.bind(problem, *self.data[i]) for i in range(2)]

    def normal(self, seed: int, scale: float = 1.0, problem: Problem | None = None) -> tuple[Any, Any]:
        """Return (A, B as stored) from N(0, scale^2) on the context's device. Do not write to them."""
        p = problem or self.problem
        drawn: tuple[Any, Any] = self.trials.get(
            (p, seed, scale), lambda: normal_inputs(p, seed + self.trials.seed, self.device, scale)
        )
        return drawn

    def wait(self) -> None:
        if self.cuda:
            import torch

            torch.cuda.synchronize(self.gpu_index)

    def run(self, a: Any, b: Any, index: int = 0, pattern: int | None = None) -> Any:
        """Copy new inputs in, fill C with NaN, run the call, and return a copy of C.

        With secret trials C gets N(0, K) values instead, other ones each time: what C holds says nothing of the proof.

        C is not compared with anything. An element that the call leaves unwritten is NaN.

        Args:
            a: new values of A, (M, K).
            b: new values of B, as stored.
            pattern: 16-bit pattern to fill C with instead; None: NaN.

        Raises:
            GateFailed: MEMORY_VIOLATION: a canary was overwritten, or A or B was changed.
        """
        import torch

        self.data.set_inputs(index, a, b)
        if self.trials.seed:
            self.data.fill_stale(index)
        elif pattern is not None:
            self.data.poison(index, pattern)
        before = self.data.input_sum(index)
        self.wait()
        self.calls[index](self.stream)
        self.wait()
        changed = before != self.data.input_sum(index)
        broken, other = torch.stack((self.data.any_guard_broken(index), changed)).tolist()  # one wait for both
        if broken:
            place = self.data.broken_guard(index)
            where = "behind C" if place == "end" else f"in front of {place}"
            raise GateFailed(Status.MEMORY_VIOLATION, f"the canary {where} was overwritten")
        if other:
            raise GateFailed(Status.MEMORY_VIOLATION, "A or B was changed")
        return self.data[index][2].clone()


def process_state() -> dict[str, int]:
    """Return two counts that a candidate must not raise, by what it would have done.

    The key "started a thread of Python" has the number of Python's threads. The key "changed the persisting L2 size"
    has L2's persisting bytes. A CUDA context must exist, else it raises DeviceError.
    """
    cu = driver()
    limit = cu.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    return {
        "started a thread of Python": threading.active_count(),
        "changed the persisting L2 size": int(check("cuCtxGetLimit", cu.cuCtxGetLimit(limit))),
    }
