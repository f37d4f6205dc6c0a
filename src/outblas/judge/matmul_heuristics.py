"""nvMatmulHeuristics' choices, and the first of them mapped to our own family.

The package runs in a subprocess, many problems at a time: one of its calls has been seen to segfault.
A problem that kills the subprocess counts as "no choice" and the rest goes on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from outblas.core.config import KernelConfig
from outblas.core.errors import ToolchainMissing
from outblas.core.gpu_records import packaged_records
from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.families.family import TileChoice
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.legality import why_illegal

_TIMEOUT_S = 120.0
#: A row-major M x K, B row-major N x K (TN) or K x N (NN), in the words of the package.
_LAYOUTS = {"TN": "NT_ROW_MAJOR", "NN": "NN_ROW_MAJOR"}
#: Inputs, accumulator, output: H fp16, T bf16, S fp32.
_PRECISIONS = {("fp16", "fp32"): "HSH", ("fp16", "fp16"): "HHH", ("bf16", "fp32"): "TST"}

#: Reads [gpu, [[m, n, k, layout, precision], ...]]; the argument is how many choices. Writes one JSON line for each
#: problem as soon as it is known: [[bm, bn, ...], ...], fastest predicted first.
_SCRIPT = """
import json, sys
from nvMatmulHeuristics import (NvMatmulHeuristicsFlags as F, NvMatmulHeuristicsInterfaceEx as I,
    NvMatmulHeuristicsMatmulLayout as L, NvMatmulHeuristicsNvidiaGpu as G, NvMatmulHeuristicsTarget as T)
gpu, problems = json.load(sys.stdin)
api = I(backend=T.CUTLASS3, flags=F.PERF_MODEL_BASED_AUTO_TUNING, gpu=G[gpu])
for m, n, k, layout, precision in problems:
    problem = api.makeNvMatmulHeuristicsProblem(m, n, k, L[layout])
    found = sorted(api.get(problem, int(sys.argv[1]), precision=precision), key=lambda f: f["runtime"])
    print(json.dumps([[g.cta_tile_m, g.cta_tile_n, g.cta_tile_k, g.stages, g.split_k, g.cluster_m, g.cluster_n,
                       g.cta_order] for g in (f["kernel"] for f in found)]), flush=True)
"""


def nvmmh_configs(problems: Sequence[Problem], gpu: Gpu) -> dict[Problem, KernelConfig | None]:
    """Return problem -> the nearest legal config to nvMatmulHeuristics' first choice, in the order of ``problems``.

    The config is of the family ``sm90_wgmma_gemm``. It is None if nvMatmulHeuristics has no choice or crashes, or if no
    near config is legal. All are None if the GPU's record has no name for it. No problems give an empty dict.

    Raises:
        ToolchainMissing: nvMatmulHeuristics is not installed.
    """
    found = heuristic_choices(problems, gpu)
    return {p: None if c is None else nearest_config(p, c, gpu) for p, c in zip(problems, found, strict=True)}


def heuristic_choices(problems: Sequence[Problem], gpu: Gpu, script: str = _SCRIPT) -> list[TileChoice | None]:
    """Return nvMatmulHeuristics' first choice per problem, as a list in the order of ``problems``.

    An entry is None if it has no choice or crashes. All are None if the GPU's record has no name for it.

    Args:
        script: Python program of the subprocess; tests replace it.

    Raises:
        ToolchainMissing: nvMatmulHeuristics is not installed; not checked for another ``script``.
    """
    return [found[0] if found else None for found in _all_choices(problems, gpu, 1, script)]


def ranked_choices(
    problems: Sequence[Problem], gpu: Gpu, count: int = 64, script: str = _SCRIPT
) -> dict[Problem, list[TileChoice]]:
    """Return problem -> up to ``count`` different choices of nvMatmulHeuristics, the fastest predicted first.

    The list is empty if it has no choice or crashes. All lists are empty if the GPU's record has no name for it.

    Raises:
        ToolchainMissing: nvMatmulHeuristics is not installed; not checked for another ``script``.
    """
    found = _all_choices(problems, gpu, count, script)
    return {p: list(dict.fromkeys(ranked)) for p, ranked in zip(problems, found, strict=True)}


def _all_choices(problems: Sequence[Problem], gpu: Gpu, count: int, script: str) -> list[list[TileChoice]]:
    if script is _SCRIPT and importlib.util.find_spec("nvMatmulHeuristics") is None:
        raise ToolchainMissing(
            "nvMatmulHeuristics is not installed", "the wheel nvidia-matmul-heuristics", install_hint("gpu")
        )
    record = packaged_records().get(gpu.name)
    if record is None or not record.heuristics:
        return [[] for _ in problems]
    out: list[list[TileChoice]] = []
    while len(out) < len(problems):
        answers = _ask(problems[len(out) :], record.heuristics, count, script)
        out += answers
        if len(out) < len(problems):
            out.append([])  # the one in hand when the subprocess died
    return out


def nearest_config(problem: Problem, choice: TileChoice, gpu: Gpu) -> KernelConfig | None:
    """Return the legal config of ``sm90_wgmma_gemm`` that differs least from ``choice``; None if no near one is legal.

    Stages are changed first, and only downwards. Then come the cluster, the split, the depth, and the tile last.
    """
    for family in FAMILIES.values():
        for config in family.near_tile_choice(choice):
            if why_illegal(problem, config, gpu) is None:
                found: KernelConfig = config
                return found
    return None


def _ask(problems: Sequence[Problem], gpu: str, count: int, script: str) -> list[list[TileChoice]]:
    """Answers up to the subprocess' end, natural or not.

    The subprocess sees no GPU. Its answers come of the record ``gpu`` alone. A context would disturb who times there.
    """
    rows = [[p.m, p.n, p.k, _LAYOUTS[p.layout], _PRECISIONS[p.dtype, p.acc]] for p in problems]
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, str(count)], input=json.dumps([gpu, rows]), capture_output=True, text=True,
            timeout=_TIMEOUT_S, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    parsed = [json.loads(line) for line in lines if line.startswith(("[", "null"))]
    return [[TileChoice(*row) for row in rows or ()] for rows in parsed]
