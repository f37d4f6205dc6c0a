"""The first answer of cuBLASLt's heuristic as numbers: the tile, the split of K and the waves that the rival will run.

torch.matmul runs that answer, or an equal one. The heuristic is no smooth function of the shape, so its answer says
more of torch's time than the extents do. An answer is a text of :func:`outblas.runtime.cublas.describe`.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.predict.features import Features

#: Number of features of an answer.
ANSWER_FEATURES = 10
#: Algorithm of cuBLASLt's kernels for Hopper. It answers for aligned rows.
_HOPPER_ALGORITHM = 66
#: Tiles 1 to 35 of cublasLtMatmulTile_t (cublasLt.h of CUDA 13), rows x columns of the column-major output.
_FIRST_TILES = (
    "8x8 8x16 16x8 8x32 16x16 32x8 8x64 16x32 32x16 64x8 32x32 32x64 64x32 32x128 64x64 128x32 64x128 128x64 64x256 "
    "128x128 256x64 64x512 128x256 256x128 512x64 64x96 96x64 96x128 128x160 160x128 192x128 128x192 128x96 32x256 "
    "256x32"
)
#: The other tiles follow two rules: steps of rows and columns, and the largest area of a tile.
_TILE_RULES = ((8, 64, 49152), (64, 8, 65536))
_LARGEST_EXTENT = 768
#: Columns of K in a stage of cuBLASLt's kernels for Hopper.
_STAGE_K = 64


def answer_features(problem: Problem, answer: str, gpu: Gpu) -> Features:
    """Return the features of a heuristic's first answer, float32[10], each of order one.

    The first two are flags: a readable answer, and cuBLASLt's algorithm for Hopper. Then come log2 of tile rows, tile
    columns, parts of K and waves. Three shares follow: waves over whole waves, SMs that the first wave uses, and the
    used part of the tiles. The last is log2 of the steps along K. All are 0 if the answer is empty, unreadable, or
    names an unknown tile.

    Args:
        answer: text of :func:`outblas.runtime.cublas.describe`, e.g. ``id=66 tile=10 splitk=1 ...``; empty: unknown.
        gpu: the GPU.
    """
    fields = answer_fields(answer)
    tile = _tiles().get(fields.get("tile", 0))
    if tile is None:
        return np.zeros(ANSWER_FEATURES, dtype=np.float32)
    rows, columns = tile
    parts = max(1, fields.get("splitk", 1))
    # cuBLASLt computes the transpose: its rows are columns of our output.
    tiles = math.ceil(problem.n / rows) * math.ceil(problem.m / columns)
    waves = tiles * parts / gpu.sms
    values = [1.0, float(fields.get("id") == _HOPPER_ALGORITHM)]
    values += [math.log2(rows) / 4, math.log2(columns) / 4, math.log2(parts) / 2, math.log2(waves) / 4]
    values += [waves / math.ceil(waves), min(1.0, waves), problem.m * problem.n / (tiles * rows * columns)]
    values += [math.log2(max(1.0, problem.k / (_STAGE_K * parts))) / 4]
    return np.array(values, dtype=np.float32)


def answer_fields(answer: str) -> dict[str, int]:
    """Return name -> number of the words ``name=number`` of an answer; other words are skipped."""
    pairs = (word.partition("=") for word in answer.split())
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}


@functools.cache
def _tiles() -> dict[int, tuple[int, int]]:
    """Return number -> (rows, columns) of cublasLtMatmulTile_t."""
    found = [(int(rows), int(columns)) for rows, columns in (word.split("x") for word in _FIRST_TILES.split())]
    known = set(found)
    for step_rows, step_columns, area in _TILE_RULES:
        for rows in range(step_rows, _LARGEST_EXTENT + 1, step_rows):
            for columns in range(step_columns, _LARGEST_EXTENT + 1, step_columns):
                if rows * columns <= area and (rows, columns) not in known:
                    found.append((rows, columns))
                    known.add((rows, columns))
    return dict(enumerate(found, 1))
