"""Run a representative of each family, layout and split mode on small problems, for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 python tools/sanitize.py
    compute-sanitizer --tool racecheck --report-api-errors no --error-exitcode 1 python tools/sanitize.py

Runs each once on whole and once on ragged tiles, checks the result against torch in fp64 and prints a line
each. Exits with 1 when a result is wrong or a launch fails; what the tool itself finds is its own exit code.
Names given as arguments run those whose name contains one of them, e.g. wgmma-split or gemv. A name of none exits
with 2. Operands come straight from cudaMalloc (PYTORCH_NO_CUDA_MEMORY_CACHING), so that memcheck sees their ends.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from outblas.core.config import KernelConfig
from outblas.core.errors import OutblasError
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.judge.reference import Reference
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.kernel_space import proof_shapes
from outblas.kernels.source import make_source
from outblas.runtime.launch import load
from outblas.runtime.nvrtc import compile_source

H200 = packaged_gpu("h200")

WHOLE, RAGGED, ODD = (128, 128, 256), (136, 72, 200), (67, 45, 131)
#: At most 16 rows of A: whole steps; ragged everywhere (NN wants N a multiple of 8).
TOKENS, FEW, FEW_NN = (8, 128, 1024), (3, 77, 456), (11, 136, 456)
#: More tiles than CTAs are resident: whole steps; a ragged last tile, and K less than a round of the ring.
WALK, WALK_RAGGED, WALK_NN = (8, 16 * 3000, 512), (3, 16 * 2500 + 5, 328), (11, 64 * 1300 + 8, 456)


def config_of(family: str, *knobs: Any, **more: Any) -> KernelConfig | None:
    """A config of a family by its knobs. Return None if there is no such family."""
    found = FAMILIES.get(family)
    return None if found is None else found.config(*knobs, **more)


wgmma, mma = partial(config_of, "sm90_wgmma_gemm"), partial(config_of, "sm80_mma_gemm")
direct, gemv = partial(config_of, "sm80_direct_gemm"), partial(config_of, "sm80_gemv_mma")
oddrows = partial(config_of, "sm90_oddrows_gemm")
Extents = tuple[tuple[int, int, int], ...]
#: name, problems' extents, layout, dtype, accumulator, config
_BY_HAND: list[tuple[str, Extents, str, str, str, KernelConfig | None]] = [
    ("wgmma", (WHOLE, RAGGED), "TN", "fp16", "fp32", wgmma(64, 64, stages=3)),
    ("wgmma", (WHOLE, RAGGED), "NN", "bf16", "fp32", wgmma(128, 64, stages=3, consumers=2)),
    ("wgmma-acc16", (RAGGED,), "TN", "fp16", "fp16", wgmma(64, 32, stages=2, store="direct")),
    ("wgmma-cluster", (RAGGED,), "TN", "fp16", "fp32", wgmma(64, 32, stages=2, cluster_m=2)),
    ("wgmma-cluster", (RAGGED,), "NN", "fp16", "fp32", wgmma(64, 32, stages=2, cluster_m=2, cluster_n=2)),
    (
        "wgmma-split", (WHOLE, RAGGED), "TN", "fp16", "fp32",
        wgmma(64, 32, stages=2, split_k=3, store="direct"),
    ),
    ("wgmma-split", (RAGGED,), "NN", "fp16", "fp32", wgmma(64, 32, stages=2, split_k=2, store="direct")),
    (
        "wgmma-workspace", (WHOLE, RAGGED), "TN", "fp16", "fp32",
        wgmma(64, 32, stages=2, split_k=3, store="direct", split_kind="workspace"),
    ),
    (
        "wgmma-workspace", (RAGGED,), "NN", "fp16", "fp16",
        wgmma(128, 32, stages=2, consumers=2, split_k=2, store="direct", split_kind="workspace"),
    ),
    (
        "wgmma-workspace-multicast", (WHOLE, RAGGED), "TN", "fp16", "fp32",
        wgmma(64, 32, stages=6, cluster_n=2, split_k=4, store="direct", split_kind="workspace"),
    ),
    (
        "wgmma-pingpong", (RAGGED,), "TN", "fp16", "fp32",
        wgmma(64, 32, stages=3, consumers=2, schedule="pingpong", persistent=True),
    ),
    (
        "wgmma-persistent", (RAGGED,), "NN", "fp16", "fp32",
        wgmma(128, 32, stages=3, consumers=2, persistent=True),
    ),
    (
        "wgmma-multicast-deep", (WHOLE, RAGGED), "TN", "fp16", "fp32",
        wgmma(64, 32, stages=8, cluster_m=2, cluster_n=2, persistent=True),
    ),
    (
        "wgmma-multicast-split", (RAGGED,), "TN", "fp16", "fp32",
        wgmma(64, 32, stages=6, cluster_n=2, split_k=2, store="direct"),
    ),
    (
        "wgmma-stagger", (WHOLE, RAGGED), "TN", "fp16", "fp32",
        wgmma(128, 32, stages=3, consumers=2, schedule="stagger", persistent=True),
    ),
    (
        "wgmma-stagger", (RAGGED,), "NN", "fp16", "fp32",
        wgmma(128, 32, stages=6, consumers=2, schedule="stagger", cluster_m=2),
    ),
    ("mma", (WHOLE, RAGGED), "TN", "fp16", "fp32", mma(64, 64)),
    ("mma", (RAGGED,), "NN", "bf16", "fp32", mma(32, 32, 64, 3, 1, 1, 4)),
    ("mma-split", (WHOLE, RAGGED), "TN", "fp16", "fp32", mma(32, 32, 64, 3, 1, 1, 4, split_k=3)),
    ("mma-split", (RAGGED,), "NN", "fp16", "fp16", mma(32, 32, 64, 3, 2, 2, split_k=2)),
    ("direct", (WHOLE, RAGGED), "TN", "fp16", "fp32", direct(32, 32, 1, 1, 1, 2)),
    ("direct", (RAGGED,), "NN", "bf16", "fp32", direct(64, 32, 2, 2, 1, 1)),
    ("direct-warps", (WHOLE, RAGGED), "TN", "fp16", "fp32", direct(16, 16, 1, 1, 3, 2)),
    ("direct-warps", (RAGGED,), "NN", "fp16", "fp16", direct(32, 16, 1, 2, 4, 1)),
    ("gemv", (TOKENS, FEW), "TN", "fp16", "fp32", gemv(8, 32, 1, 4, 2)),
    ("gemv", (FEW_NN,), "NN", "bf16", "fp32", gemv(16, 128, 2, 2, 2)),
    ("gemv-shared", (TOKENS, FEW), "TN", "fp16", "fp32", gemv(8, 64, 2, 4, 3, "shared")),
    ("gemv-shared", (FEW_NN,), "NN", "fp16", "fp32", gemv(16, 64, 1, 4, 2, "shared")),
    ("gemv-split", (TOKENS, FEW), "TN", "fp16", "fp32", gemv(8, 64, 1, 2, 2, split_k=3)),
    ("gemv-split", (FEW_NN,), "NN", "fp16", "fp32", gemv(16, 64, 1, 2, 2, "shared", 2)),
    ("gemv-walk", (WALK, WALK_RAGGED), "TN", "fp16", "fp32", gemv(8, 16, 1, 4, 2, persistent=True)),
    ("gemv-walk", (WALK_NN,), "NN", "bf16", "fp32", gemv(16, 64, 1, 2, 2, persistent=True)),
    (
        "gemv-walk-kept", (WALK, WALK_RAGGED), "TN", "fp16", "fp32",
        gemv(8, 16, 1, 16, 4, persistent=True, l2="stream_b", kept_k=1024),
    ),
    (
        "gemv-walk-shared", (WALK, WALK_RAGGED), "TN", "fp16", "fp32",
        gemv(8, 16, 1, 8, 4, "shared", persistent=True, kept_k=4096),
    ),
    ("gemv-walk-shared", (WALK_NN,), "NN", "fp16", "fp32", gemv(16, 64, 1, 8, 2, "shared", persistent=True)),
    (
        "wgmma-few-rows", (TOKENS, (13, 136, 456)), "TN", "fp16", "fp32",
        wgmma(64, 32, 128, stages=4, a_rows=16),
    ),
    (
        "wgmma-few-rows", (FEW_NN,), "NN", "bf16", "fp32",
        wgmma(64, 16, stages=3, store="direct", a_rows=16),
    ),
    ("wgmma-early", (WHOLE, RAGGED), "TN", "fp16", "fp32", wgmma(64, 32, stages=3, pdl=True, early=True)),
    (
        "wgmma-early-multicast", (RAGGED,), "NN", "fp16", "fp32",
        wgmma(64, 32, stages=8, cluster_m=2, persistent=True, pdl=True, early=True),
    ),
    ("mma-early", (WHOLE, RAGGED), "TN", "fp16", "fp32", mma(32, 32, 64, 3, pdl=True, early=True)),
    ("direct-early", (WHOLE, RAGGED), "TN", "fp16", "fp32", direct(16, 16, wk=3, pdl=True, early=True)),
    ("gemv-early", (TOKENS, FEW), "TN", "fp16", "fp32", gemv(8, 32, 1, 4, 2, pdl=True, early=True)),
    (
        "gemv-early-shared", (FEW_NN,), "NN", "fp16", "fp32",
        gemv(16, 64, 1, 4, 2, "shared", pdl=True, early=True),
    ),
    ("mma-scalar", (ODD,), "TN", "fp16", "fp32", mma(32, 32, 32, 3, 2, 2, vec=1)),
    ("oddrows", (ODD, (75, 141, 333)), "TN", "fp16", "fp32", oddrows(64, 64, stages=3)),
    ("oddrows", (ODD, (75, 141, 333)), "NN", "bf16", "fp32", oddrows(64, 128, stages=3)),
    ("oddrows-two", (ODD,), "TN", "fp16", "fp32", oddrows(128, 64, stages=3, consumers=2)),
    ("oddrows-two", (ODD,), "NN", "fp16", "fp32", oddrows(128, 64, stages=3, consumers=2)),
    ("oddrows-split", (ODD, (75, 141, 333)), "TN", "fp16", "fp32", oddrows(64, 64, stages=3, split_k=2)),
    ("oddrows-few-rows", ((13, 139, 331),), "NN", "fp16", "fp32", oddrows(64, 64, stages=3, split_k=2, a_rows=16)),
    ("oddrows-early", (ODD,), "NN", "fp16", "fp32", oddrows(64, 64, stages=3, pdl=True, early=True)),
]  # fmt: skip
CASES: list[tuple[str, Extents, str, str, str, KernelConfig]] = [
    (name, extents, layout, dtype, acc, config)
    for name, extents, layout, dtype, acc, config in _BY_HAND
    if config is not None
]
for _family in FAMILIES.values():
    if all(case[-1].family != _family.name for case in CASES):  # one of its kernels, on small problems
        _config: KernelConfig = next(iter(_family.pool()))
        _small = [p for p in proof_shapes(Problem(64, 64, 64), _config, H200) if p.flops < 2**28]
        CASES.append((_family.name, tuple((p.m, p.n, p.k) for p in _small), "TN", "fp16", "fp32", _config))


def run(problem: Problem, config: KernelConfig) -> float:
    """Worst error of one launch, in units of the bound."""
    import torch

    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s, generator=generator).to(dtype).cuda() for s in ((problem.m, problem.k), problem.b_shape))
    c = torch.full((problem.m, problem.n), torch.nan, dtype=dtype, device="cuda")
    call = load(compile_source(make_source(problem, config)), config).bind(problem, a, b, c)
    torch.cuda.synchronize()
    call(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return float(Reference(problem, a.cpu(), b.cpu()).worst_error_ratio(c.cpu()))


def main(*wanted: str) -> int:
    if {"-h", "--help"} & set(wanted):
        print(__doc__)
        return 0
    known = list(dict.fromkeys(f"{name}-{layout}" for name, _, layout, *_ in CASES))
    for word in wanted:
        if not any(word in name for name in known):
            print(f"error: no case is named {word}; expected one of {', '.join(known)}; correct it", file=sys.stderr)
            return 2
    failures = 0
    for name, extents, layout, dtype, acc, config in CASES:
        is_wanted = not wanted or any(word in f"{name}-{layout}" for word in wanted)
        for m, n, k in extents if is_wanted else ():
            problem = Problem(m, n, k, layout, dtype, acc)  # type: ignore[arg-type]
            try:
                error = run(problem, config)
                verdict = "ok" if error <= 1 else "WRONG"
                detail = f"error {error:.3g} of the bound"
            except (OutblasError, RuntimeError) as failure:
                verdict, detail = "FAILED", str(failure).splitlines()[0]
            failures += verdict != "ok"
            print(f"{verdict:6} {name:22} {problem.key:28} {detail}", flush=True)
    print(f"{failures} failed" if failures else "all ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
