"""Free kernels for the tests of language models: texts, answers that hold them, and recordings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from outblas.core.evaluation import Evaluation, Speedup, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.evaluation_file import Recorder
from support.gpus.known import H200

PROBLEM = Problem(512, 512, 512)
BASELINE_US = 4.0

_TEXT = """/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 64)", "ceil(M, 64)", 1], "block": [128, 1, 1]}
*/
#include <cuda_fp16.h>
extern "C" __global__ void gemm(const half* A, const half* B, half* C, int M, int N, int K, void* workspace) {
    int variant = NUMBER;
    if (variant < 0) C[0] = A[0];
}
"""


def kernel(number: int) -> FreeKernel:
    """A kernel of its own name for every number; none of them multiplies."""
    return FreeKernel.parse(_TEXT.replace("NUMBER", str(number)))


def answer(text: str) -> str:
    """An answer that holds a kernel."""
    return f"It is bound by latency.\n\n```cuda\n{text}\n```\n"


def passed(kernel: FreeKernel, us: float, problem: Problem = PROBLEM) -> Evaluation:
    ratio = BASELINE_US / us
    return Evaluation(
        problem, kernel, Status.PASSED, verdict=Verdict(Status.PASSED, ("static", "exact")),
        timing=Timing("offline", (us, us, us), us, 0.01, 32, 4), baselines_us={"lt_auto": BASELINE_US},
        speedup=Speedup("lt_auto", ratio, ratio * 0.99, ratio * 1.01), counters={"registers": 64.0, "hgmma": 8.0},
    )  # fmt: skip


def failed(kernel: FreeKernel, status: Status, detail: str, log: str = "", problem: Problem = PROBLEM) -> Evaluation:
    return Evaluation(problem, kernel, status, detail, Verdict(status, ("static",), detail, 17.0), log=log)


def record(path: Path, *evaluations: Evaluation, provenance: Mapping[str, str] | None = None) -> Path:
    """A recording of them."""
    with Recorder(path, H200, dict(provenance or {"gpu": "NVIDIA H200", "date": "2000-01-01T00:00:00+00:00"})) as file:
        for evaluation in evaluations:
            file.append(evaluation)
    return path


def config_answer(**knobs: object) -> str:
    return f"Knobs will do.\n```json\n{json.dumps(knobs)}\n```\n"
