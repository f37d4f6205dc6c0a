"""CUTLASS 2.x kernels that a careful user of an A100 tries: usual tiles, depths, orders and shares of K."""

from __future__ import annotations

from collections.abc import Iterator

from outblas.core.problem import Acc
from outblas_lab.custom.templates.fill import CutlassSm80

#: (tile, warp tile, stages) of CTAs that each own a tile, with the band of their order.
_OWN_TILE = (
    ((256, 128, 32), (64, 64), 3, 1),
    ((256, 128, 32), (64, 64), 4, 4),
    ((256, 128, 64), (64, 64), 3, 1),
    ((256, 128, 64), (64, 64), 3, 8),
    ((128, 256, 32), (64, 64), 4, 8),
    ((128, 256, 64), (64, 64), 3, 1),
    ((128, 256, 64), (64, 64), 3, 8),
    ((256, 64, 32), (64, 64), 4, 1),
    ((64, 256, 32), (64, 64), 4, 1),
    ((64, 256, 64), (64, 64), 4, 1),
    ((128, 128, 32), (64, 64), 4, 1),
    ((128, 128, 32), (64, 64), 5, 4),
    ((128, 128, 64), (64, 64), 3, 4),
    ((128, 128, 64), (64, 64), 4, 8),
    ((128, 64, 32), (64, 32), 6, 1),
    ((128, 64, 64), (64, 32), 4, 1),
    ((64, 128, 32), (32, 64), 6, 1),
    ((64, 128, 64), (32, 64), 4, 1),
    ((64, 64, 32), (32, 32), 6, 1),
    ((64, 64, 64), (32, 32), 5, 1),
    ((32, 64, 64), (16, 32), 6, 1),
)
#: (tile, warp tile, stages) of CTAs that share a tile's K, with the parts; 1: CUTLASS' own stream-K.
_SHARED_K = (
    ((128, 256, 64), (64, 64), 3, 1),
    ((128, 128, 64), (64, 64), 4, 1),
    ((128, 128, 32), (64, 64), 4, 4),
    ((128, 64, 64), (64, 32), 4, 1),
    ((64, 128, 64), (32, 64), 4, 1),
    ((64, 128, 64), (32, 64), 4, 4),
    ((64, 64, 64), (32, 32), 5, 1),
    ((64, 64, 64), (32, 32), 5, 4),
    ((64, 64, 64), (32, 32), 5, 8),
    ((32, 64, 64), (16, 32), 6, 1),
    ((32, 64, 64), (16, 32), 6, 8),
)


def cutlass_instances(acc: Acc) -> tuple[CutlassSm80, ...]:
    """Return the instances of one accumulator, all of which fit the 163 KiB of an A100."""
    return tuple(_instances(acc))


def _instances(acc: Acc) -> Iterator[CutlassSm80]:
    for tile, warp, stages, width in _OWN_TILE:
        yield CutlassSm80(tile, warp, stages, "identity", width, acc=acc)
    for tile, warp, stages, splits in _SHARED_K:
        yield CutlassSm80(tile, warp, stages, "stream_k", splits=splits, acc=acc)
