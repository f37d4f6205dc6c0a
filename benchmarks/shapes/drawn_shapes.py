"""Shapes drawn by a seed, for ``benchmarks/new_shapes.py --drawn`` and ``benchmarks/learning.py --drawn``.

Half are layers of ten published models with M drawn log-uniformly from 1 to 8192. Six of the models share one (N, K)
of 24 with a row or an interval of the packaged library. The published draws are older than that. The others have all
extents log-uniform from 16 to 16384. A quarter of all shapes have odd extents only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import get_args

from outblas.core.errors import UsageError
from outblas.core.problem import Dtype, Layout, Problem
from outblas.core.suites import GRID_EXTENTS, LLM_LAYERS
from outblas.predict.extents import log_uniform

#: Model -> (N = out features, K = in features) of its linear layers, from the model's config.json. QKV and gate/up are
#: fused. Suites have two of these. Gemma's 8192 x 3584 in fp16 is also a part of Llama 3 70B on 8 GPUs (llm_tp).
#: Qwen's 5120 x 5120 in bf16 is in suite engine.
OTHER_LAYERS: dict[str, tuple[tuple[int, int], ...]] = {
    # hidden 3584, 16 heads and 8 KV heads of 256, intermediate 14336
    "gemma2-9b": ((8192, 3584), (3584, 4096), (28672, 3584), (3584, 14336)),
    # hidden 3072, 32 heads of 96, intermediate 8192
    "phi3-mini": ((9216, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    # hidden 5120, 40 heads and 8 KV heads of 128, intermediate 13824
    "qwen2.5-14b": ((7168, 5120), (5120, 5120), (27648, 5120), (5120, 13824)),
    # hidden 4544, 71 heads and 1 KV head of 64, intermediate 18176
    "falcon-7b": ((4672, 4544), (4544, 4544), (18176, 4544), (4544, 18176)),
    # hidden 5120, 32 heads and 8 KV heads of 128, intermediate 14336
    "mistral-nemo-12b": ((6144, 5120), (5120, 4096), (28672, 5120), (5120, 14336)),
    # hidden 7168, 56 heads and 8 KV heads of 128, intermediate 20480
    "yi-34b": ((9216, 7168), (7168, 7168), (40960, 7168), (7168, 20480)),
}
#: Models whose layers a suite has.
LISTED = ("llama3-8b", "llama3-70b", "qwen2.5-7b", "deepseek-v3")
MODELS = OTHER_LAYERS | {name: LLM_LAYERS[name] for name in LISTED}
#: Ranges of M of a layer, and of each extent of the other shapes.
LAYER_M, EXTENTS = (1, 8192), (16, GRID_EXTENTS[-1])
#: Above this a single product takes milliseconds.
MAX_FLOPS = 1e12


def drawn_shapes(count: int, seed: int, layout: str = "TN", dtype: str = "fp16") -> list[Problem]:
    """Return ``count`` different problems; the same arguments give the same problems, in the same order.

    Layers and other shapes take turns. Every second of the other shapes has odd extents only.

    Args:
        count: number of problems, 0 or more.
        seed: seed of the draw.
        layout: layout of all, ``TN`` or ``NN``.
        dtype: dtype of all, ``fp16`` or ``bf16``.

    Raises:
        UsageError: an unknown layout or dtype.
    """
    if layout not in get_args(Layout) or dtype not in get_args(Dtype):
        raise UsageError(f"layout {layout!r}, dtype {dtype!r}", "TN or NN, fp16 or bf16", "pass one of each")
    rng = random.Random(seed)
    turns: tuple[Callable[[random.Random], tuple[int, int, int]], ...] = (_layer, _any, _layer, _odd)
    found: dict[Problem, None] = {}
    while len(found) < count:
        mnk = turns[len(found) % len(turns)](rng)
        if 2 * math.prod(mnk) <= MAX_FLOPS:
            found[Problem(*mnk, layout, dtype)] = None  # type: ignore[arg-type]
    return list(found)


def _layer(rng: random.Random) -> tuple[int, int, int]:
    n, k = rng.choice(MODELS[rng.choice(sorted(MODELS))])
    return log_uniform(rng, *LAYER_M), n, k


def _any(rng: random.Random) -> tuple[int, int, int]:
    m, n, k = (log_uniform(rng, *EXTENTS) for _ in range(3))
    return m, n, k


def _odd(rng: random.Random) -> tuple[int, int, int]:
    m, n, k = (extent - 1 if extent % 2 == 0 else extent for extent in _any(rng))
    return m, n, k
