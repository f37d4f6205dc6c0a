"""What the physical model leaves: a factor that is log-linear in the extents, one line for each kind of kernel.

The formula of ``model.py`` knows waves, traffic and latencies, and is 5-10% off, alike for all kernels of a kind on
problems of a size: an epilogue that hides worse than it says, a scheduler, a clock. The factor is fitted by ridge
regression on the logarithms of what is left (``scripts/fit_residual.py``), held out by shape like all of the
model, and stays within e^±0.3: it reorders kernels that the formula holds for level, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.model_terms import Columns, Floats

#: Most that the logarithm of the factor may be.
LIMIT = 0.3
#: Kinds of kernels; the first nine are wgmma's, by what makes their pipelines differ.
KINDS = (
    *("tile", "two_blocks", "cluster_split", "workspace", "pingpong_64", "pingpong", "three", "walk", "two_consumers"),
    *(Sm80MmaConfig.family, Sm80DirectConfig.family, Sm80GemvConfig.family),
)
#: Per kind: itself, and with it the logarithms of extents and of waves.
SLOPES = ("one", "m", "n", "k", "waves", "more_waves", "steps", "mn_k", "last_wave", "filled", "width")
#: For wgmma as a whole.
SWITCHES = (
    *("multicast", "multicast_4", "raster_m", "raster_m_tall", "cluster_m_tall", "stages", "bk_128", "bk_128_k"),
    *("stream_b", "stream_c", "direct_store", "early", "width_k", "width_waves", "tall_tile"),
)
NAMES = (*(f"{kind}.{slope}" for kind in KINDS for slope in SLOPES), *SWITCHES)


def factor(residual: Floats, family: str, p: Columns, c: Columns, sms: int) -> Floats:
    """What predicted times of configs of one family are multiplied by: float64[configs].

    Args:
        residual: coefficients in the order of :data:`NAMES`. p, c: columns of the problem and of the configs.
    """
    return np.exp(np.clip(features(family, p, c, sms) @ residual, -LIMIT, LIMIT))


def features(family: str, p: Columns, c: Columns, sms: int) -> Floats:
    """float64[configs, len(NAMES)]; every feature is of order one."""
    waves = np.ceil(p["m"] / c["bm"]) * np.ceil(p["n"] / c["bn"]) * c["split"] / sms
    slopes = _slopes(p, c, waves)
    kind = _kind(family, c)
    out = np.zeros((len(waves), len(NAMES)))
    at = kind[:, None] * len(SLOPES) + np.arange(len(SLOPES))
    np.put_along_axis(out, at, slopes, axis=1)
    if family == Sm90WgmmaConfig.family:
        out[:, len(KINDS) * len(SLOPES) :] = _switches(p, c, waves)
    return out


def _slopes(p: Columns, c: Columns, exact: Floats) -> Floats:
    m, n, k = _extents(p)
    one, waves = np.ones_like(exact), np.log2(exact)
    steps = np.log2(np.maximum(p["k"] / c["bk"] / c["split"], 1.0))
    last = np.where(exact > 1, np.abs(exact - np.floor(exact) - 0.5), 0.0)
    columns = (
        *(one, m / 4 * one, n / 4 * one, k / 4 * one, waves / 3, np.maximum(waves, 0) / 3, steps / 4),
        *((m + n) * k / 20 * one, last, np.minimum(exact, 1.0), np.log2(c["bn"]) / 4),
    )
    return np.stack(columns, axis=1)


def _kind(family: str, c: Columns) -> np.ndarray:
    """Index into :data:`KINDS` of every config."""
    if family != Sm90WgmmaConfig.family:
        return np.full(len(c["bm"]), KINDS.index(family))
    split = c["split"] > 1
    tests: Mapping[str, np.ndarray] = {
        "workspace": c["workspace"] > 0,
        "cluster_split": split,
        "pingpong_64": (c["pingpong"] > 0) & (c["bm"] == 64),
        "pingpong": c["pingpong"] > 0,
        "three": c["consumers"] == 3,
        "walk": c["persistent"] > 0,
        "two_blocks": c["min_blocks"] > 1,
        "tile": c["consumers"] == 1,
    }
    return np.select(list(tests.values()), [KINDS.index(name) for name in tests], KINDS.index("two_consumers"))


def _switches(p: Columns, c: Columns, exact: Floats) -> Floats:
    m, n, k = _extents(p)
    tall, bk_128, width = (m - n) / 4, c["bk"] == 128, np.log2(c["bn"]) / 4
    columns = (
        *(c["cm"] * c["cn"] > 1, c["cm"] * c["cn"] > 2, c["raster_m"], c["raster_m"] * tall, (c["cm"] > 1) * tall),
        *(c["stages"] / 10, bk_128, bk_128 * k / 4, c["stream_b"], c["stream_c"], 1 - c["tma"], c["early"]),
        *(width * k / 4, width * np.log2(exact) / 3, np.log2(c["bm"] / 64)),
    )
    return np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)


def _extents(p: Columns) -> tuple[Floats, Floats, Floats]:
    """Powers of two above 512."""
    return tuple(np.log2(p[name]) - 9.0 for name in ("m", "n", "k"))  # type: ignore[return-value]
