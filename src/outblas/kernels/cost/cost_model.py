"""A small physical model of the GPU time of a (problem, config). It ranks configs; it does not replace timing.

Formula::

    time = launch (less with PDL) + cluster set-up
         + smooth max of: rounds x (fill latency + K stages x stage + epilogue), traffic / HBM
         + sum over a split K, in a cluster or in a workspace,            bounded below by the floor
    stage = smooth max of: tensor time, CTA's serial chain, SM ingest, L2 share, latency under load / stages

A *round* is one CTA on every slot of the GPU (SMs x resident CTAs). A persistent kernel has one round of many tiles.
Each family has 15 to 40 coefficients. ``outblas fit model`` fits them to measurements and writes them to
``data/models/<gpu>.json`` with their provenance. The same file holds the residual
(:mod:`outblas.kernels.cost.residual`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig
from outblas.core.errors import DeviceError, RecordError
from outblas.core.gpu_records import nearest_with_data, packaged_gpu, reference_gpu
from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.columns import columns_by_family, problem_columns
from outblas.kernels.cost.residual import FEATURE_NAMES as RESIDUAL
from outblas.kernels.cost.residual import residual_factor
from outblas.kernels.cost.scaled import scaled
from outblas.kernels.cost.terms import Columns, Floats, admitted_ctas, resident_ctas
from outblas.kernels.cost.traffic import traffic_bytes
from outblas.kernels.families.registry import FAMILIES

FORMAT = 2
#: Family -> coefficients from which a fit on the reference GPU starts.
START_COEFFICIENTS = {name: dict(family.start) for name, family in FAMILIES.items()}


def predict_us(problem: Problem, config: KernelConfig, gpu: Gpu) -> float:
    """Return the predicted GPU time per call of a legal (problem, config), microseconds.

    Legality is not checked: an illegal config gets a meaningless number.

    Raises:
        RecordError: the model's file is damaged, of another version, or lacks a coefficient.
    """
    return float(predict_many(problem, (config,), gpu)[0])


def predict_many(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> Floats:
    """Return :func:`predict_us` of each config: float64[len(configs)], microseconds, in the order of ``configs``.

    Raises:
        RecordError: the model's file is damaged, of another version, or lacks a coefficient.
    """
    return predict_with(*model_of(gpu), problem, configs, gpu)


def predict_with(
    coefficients: Mapping[str, Mapping[str, float]], residual: Floats | None, problem: Problem,
    configs: Sequence[KernelConfig], gpu: Gpu,
) -> Floats:  # fmt: skip
    """Return the predictions of :func:`predict_many` with given coefficients: float64[len(configs)], microseconds.

    Args:
        coefficients: family -> name -> value; it needs the families of the configs only.
        residual: coefficients of :mod:`outblas.kernels.cost.residual`, float64[len(FEATURE_NAMES)]; None: no
            correction.

    Raises:
        KeyError: a family or a coefficient is missing.
    """
    out = np.empty(len(configs))
    shape = problem_columns(problem, gpu)
    for family, where, columns in columns_by_family(configs, gpu):
        out[where] = time_us(coefficients[family], family, shape, columns, gpu)
        if residual is not None:
            corrected = out[where] * residual_factor(residual, family, shape, columns, gpu.sms)
            out[where] = np.maximum(corrected, (out[where] + shape["floor"]) / 2)  # stays above the floor
    return out


def rank(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> NDArray[np.intp]:
    """Return indices of ``configs``, fastest prediction first; equal predictions keep their order.

    Example: ``configs[rank(problem, configs)[0]]`` is predicted fastest. Without configs, the array is empty.

    Raises:
        RecordError: the model's file is damaged, of another version, or lacks a coefficient.
    """
    return np.argsort(predict_many(problem, configs, gpu), kind="stable")


def pruned_mask(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu, factor: float = 3.0) -> NDArray[np.bool_]:
    """Return bool[len(configs)]: True for configs that a recording may leave out.

    They are predicted slower than ``factor`` times the best prediction among configs with the same value of ``pdl``.
    The model's file says how often each factor would have dropped a measured best (``checks.left_out``, on problems
    outside the fit).

    Args:
        factor: the limit, 1 or more; then the best with and the best without PDL are kept.

    Raises:
        RecordError: the model's file is damaged, of another version, or lacks a coefficient.
    """
    times = predict_many(problem, configs, gpu)
    return too_slow_mask(times, np.array([c.pdl for c in configs], dtype=bool), factor)


def too_slow_mask(times: Floats, pdl: NDArray[np.bool_], factor: float) -> NDArray[np.bool_]:
    """Return bool[n]: True for times above ``factor`` times the least time with the same PDL option.

    A time equal to the limit gives False. Example: times 1.0, 3.0 and 3.1 without PDL give False, False, True for
    factor 3.

    Args:
        times: float64[n], microseconds.
        pdl: bool[n], whether each config has PDL.
        factor: the limit.
    """
    mask = np.zeros(len(times), dtype=bool)
    for option in (False, True):
        same = pdl == option
        if same.any():
            mask[same] = times[same] > factor * times[same].min()
    return mask


@functools.lru_cache(maxsize=64)
def model_of(gpu: Gpu) -> tuple[dict[str, dict[str, float]], Floats]:
    """Return the coefficients and the residual of a GPU, as :func:`load`.

    They come from the model of the most similar GPU that has one. Its coefficients are scaled by the rates of both
    records (:mod:`outblas.kernels.cost.scaled`). For the GPU of the fit, they are those of :func:`load`.

    Raises:
        RecordError: the model's file is damaged, of another version, or lacks a coefficient.
    """
    name = nearest_with_data(gpu, "models", ".json")
    coefficients, residual = load(name)
    base = packaged_gpu(name)
    if gpu == base:
        return coefficients, residual
    return {family: scaled(family, own, gpu, base) for family, own in coefficients.items()}, residual


@functools.lru_cache(maxsize=64)
def start_coefficients(gpu: Gpu) -> dict[str, dict[str, float]]:
    """Return family -> name -> coefficient from which a fit on a GPU starts.

    They are rough physics of the reference GPU, scaled by the rates of both records.
    """
    base = reference_gpu()
    if gpu == base:
        return START_COEFFICIENTS
    return {family: scaled(family, own, gpu, base) for family, own in START_COEFFICIENTS.items()}


@functools.cache
def load(gpu_name: str) -> tuple[dict[str, dict[str, float]], Floats]:
    """Return (family -> name -> coefficient, residual coefficients) of a packaged model.

    The residual is float64[len(FEATURE_NAMES)]. A family that the file lacks has the coefficients from which a fit
    starts, and zeros for its kinds in the residual. Every call of a name returns the same objects: do not change them.

    Raises:
        DeviceError: the package has no model of this GPU.
        RecordError: the model's file is damaged, of another version, or lacks a coefficient.
    """
    folder = resources.files("outblas") / "data" / "models"
    path = folder.joinpath(f"{gpu_name}.json")
    if not path.is_file():
        raise DeviceError(f"no model of GPU {gpu_name!r}", "a GPU that was measured", "scale one: model_of")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        fitted = found["coefficients"]
        coefficients = {family: _fitted(family, fitted) for family in FAMILIES}
        unmeasured = {kind for name, family in FAMILIES.items() if name not in fitted for kind in family.kinds}
        known = (name.partition(".")[0] not in unmeasured for name in RESIDUAL)
        residual = [float(found["residual"][name]) if here else 0.0 for name, here in zip(RESIDUAL, known, strict=True)]
        return coefficients, np.array(residual)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"model file {gpu_name}.json cannot be read ({error!r})", f"format {FORMAT}", "reinstall outblas"
        ) from error


def time_us(x: Mapping[str, float], family: str, p: Columns, c: Columns, gpu: Gpu) -> Floats:
    """Return the formula's time, microseconds, without residual, over columns that broadcast together.

    Args:
        x: coefficients of the family: name -> value.
        p: columns of the problem, as from :func:`outblas.kernels.cost.columns.problem_columns`.
        c: columns of the configs, as from :func:`outblas.kernels.cost.columns.config_columns`.

    Raises:
        KeyError: no family has that name.
    """
    return FAMILIES[family].time_us(x, p, c, gpu)


def _fitted(family: str, found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return a family's coefficients: from the file, or the start of a fit if the family was not measured."""
    return (
        {name: float(found[family][name]) for name in START_COEFFICIENTS[family]}
        if family in found
        else START_COEFFICIENTS[family]
    )


def modelled_hit_rates(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu) -> Floats:
    """Return the modelled share of the bytes asked of L2 that are in it: float64[len(configs)], 0 to 1.

    It is 1 - (bytes read from HBM) / (bytes asked of L2). The traffic model gives the first: every operand once, and
    again as far as L2 lost it. The second counts the tiles of A and B that all CTAs load, and one write of C. A tile
    that a cluster multicasts counts once for the cluster. A write counts as a hit. L2 hints are left out.

    Args:
        configs: legal configs of families with tiles in stages. Another family has operands that are read once.

    Raises:
        RecordError: the model's file is damaged, of another version, or lacks a coefficient.
    """
    out = np.empty(len(configs))
    coefficients, p = model_of(gpu)[0], problem_columns(problem, gpu)
    for family, where, columns in columns_by_family(configs, gpu):
        out[where] = _hit_rates(coefficients[family], p, columns, gpu)
    return out


def _hit_rates(x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
    tiles_m = np.ceil(p["m"] / (c["bm"] * c["cm"])) * c["cm"]
    tiles_n = np.ceil(p["n"] / (c["bn"] * c["cn"])) * c["cn"]
    tiles = tiles_m * tiles_n
    per_sm = np.where(c["persistent"] > 0, c["min_blocks"], admitted_ctas(c, tiles * c["split"], gpu))
    slots = resident_ctas(c["cluster"], per_sm, gpu)
    written = ELEMENT_BYTES * p["m"] * p["n"]
    # Without a coefficient of the cache, a family has no tiles in stages: its operands are read once.
    cache = {"cache": x.get("cache", np.inf)}
    from_hbm = traffic_bytes(cache, p, c, tiles_m, tiles_n, slots) - written
    asked = ELEMENT_BYTES * p["k"] * tiles * (c["bm"] / c["cn"] + c["bn"] / c["cm"]) + written
    return np.clip(1 - from_hbm / np.maximum(asked, from_hbm), 0.0, 1.0)
