"""A correction factor for the physical model, log-linear in the extents, with one line per kind of kernel.

The formula of ``cost_model.py`` knows waves, traffic and latencies. Its error is 5-10%, similar for all kernels of a
kind on problems of one size. Causes are e.g. an epilogue that hides worse than assumed, a scheduler, a clock. The
factor is fitted by ridge regression on the logarithms of the errors (`outblas fit model`), with shapes held out. It
stays within e^±0.3, so it reorders only kernels that the formula considers similar.
"""

from __future__ import annotations

import numpy as np

from outblas.kernels.cost.terms import Columns, Floats, log_extents
from outblas.kernels.families.registry import FAMILIES

#: Largest absolute value of the factor's logarithm.
MAX_LOG_RESIDUAL = 0.3
_FAMILIES = sorted(FAMILIES.values(), key=lambda family: family.residual_place)
#: Kinds of kernels with different pipelines; a family without kinds counts as one.
KERNEL_KINDS = tuple(kind for family in _FAMILIES for kind in family.kinds)
#: Features per kind: a constant, and logarithms of extents and waves.
SLOPE_FEATURES = ("one", "m", "n", "k", "waves", "more_waves", "steps", "mn_k", "last_wave", "filled", "width")
#: Features shared by all kinds of a family.
SWITCH_FEATURES = tuple(name for family in _FAMILIES for name in family.residual_switches)
FEATURE_NAMES = (*(f"{kind}.{slope}" for kind in KERNEL_KINDS for slope in SLOPE_FEATURES), *SWITCH_FEATURES)


def residual_factor(residual: Floats, family: str, p: Columns, c: Columns, sms: int) -> Floats:
    """Return the factor for the predicted times of configs of one family: float64[configs].

    It is exp(features @ residual), limited to e^-0.3 (0.74) up to e^0.3 (1.35). Coefficients of 0 give the factor 1.

    Args:
        residual: coefficients in the order of :data:`FEATURE_NAMES`, float64.
    """
    return np.exp(np.clip(residual_features(family, p, c, sms) @ residual, -MAX_LOG_RESIDUAL, MAX_LOG_RESIDUAL))


def residual_features(family: str, p: Columns, c: Columns, sms: int) -> Floats:
    """Return float64[configs, len(FEATURE_NAMES)]; every feature is of order one.

    A row is 0 except in the columns of the config's kind and of its family's switches.

    Args:
        family: name of the family of all configs.
    """
    waves = np.ceil(p["m"] / c["bm"]) * np.ceil(p["n"] / c["bn"]) * c["split"] / sms
    slopes = _slopes(p, c, waves)
    known = FAMILIES[family]
    kind = KERNEL_KINDS.index(known.kinds[0]) + known.kind_index(c)
    out = np.zeros((len(waves), len(FEATURE_NAMES)))
    at = kind[:, None] * len(SLOPE_FEATURES) + np.arange(len(SLOPE_FEATURES))
    np.put_along_axis(out, at, slopes, axis=1)
    if known.residual_switches:
        first = len(KERNEL_KINDS) * len(SLOPE_FEATURES) + SWITCH_FEATURES.index(known.residual_switches[0])
        out[:, first : first + len(known.residual_switches)] = known.switch_values(p, c, waves)
    return out


def _slopes(p: Columns, c: Columns, exact: Floats) -> Floats:
    """Return float64[configs, len(SLOPE_FEATURES)]; ``exact`` is the number of waves before rounding."""
    m, n, k = log_extents(p)
    one, waves = np.ones_like(exact), np.log2(exact)
    steps = np.log2(np.maximum(p["k"] / c["bk"] / c["split"], 1.0))
    last = np.where(exact > 1, np.abs(exact - np.floor(exact) - 0.5), 0.0)
    columns = (
        *(one, m / 4 * one, n / 4 * one, k / 4 * one, waves / 3, np.maximum(waves, 0) / 3, steps / 4),
        *((m + n) * k / 20 * one, last, np.minimum(exact, 1.0), np.log2(c["bn"]) / 4),
    )
    return np.stack(columns, axis=1)
