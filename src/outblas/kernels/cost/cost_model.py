"""A small physical model of the GPU time of a (problem, config). It ranks configs; it does not replace timing.

Formula::

    time = launch (less with PDL) + cluster set-up
         + smooth max of: rounds x (fill latency + K stages x stage + epilogue), traffic / HBM
         + sum over a split K, in a cluster or in a workspace,            bounded below by the floor
    stage = smooth max of: tensor time, CTA's serial chain, SM ingest, L2 share, latency under load / stages

A *round* is one CTA on every slot of the GPU (SMs x resident CTAs). A persistent kernel has one round of many tiles.
Each family has 15 to 40 coefficients. ``outblas fit model`` fits them to measurements and writes them to
``data/models/<gpu>.json`` with their provenance. The same file holds the residual.
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
from outblas.core.roofline import Gpu, floor_us
from outblas.kernels.catalogue import candidates
from outblas.kernels.cost.columns import columns_by_family, problem_columns
from outblas.kernels.cost.terms import Columns, Floats, admitted_ctas, log_extents, resident_ctas
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


def predicted_us(problem: Problem, gpu: Gpu) -> float:
    """Return the ranking model's time of the best candidate, microseconds; the roofline time if no candidate exists."""
    offered = candidates(problem, gpu)
    return float(predict_many(problem, offered, gpu).min()) if offered else floor_us(problem, gpu)


def predict_with(
    coefficients: Mapping[str, Mapping[str, float]], residual: Floats | None, problem: Problem,
    configs: Sequence[KernelConfig], gpu: Gpu,
) -> Floats:  # fmt: skip
    """Return the predictions of :func:`predict_many` with given coefficients: float64[len(configs)], microseconds.

    Args:
        coefficients: family -> name -> value; it needs the families of the configs only.
        residual: coefficients of :data:`FEATURE_NAMES`, float64[len(FEATURE_NAMES)]; None: no
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
    records (:func:`scaled`). For the GPU of the fit, they are those of :func:`load`.

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
        wrong = f"no cost model for GPU {gpu_name!r}"
        raise DeviceError(wrong, "a GPU with a fitted model", "scale a model with model_of")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        fitted = found["coefficients"]
        coefficients = {family: _fitted(family, fitted) for family in FAMILIES}
        unmeasured = {kind for name, family in FAMILIES.items() if name not in fitted for kind in family.kinds}
        known = (name.partition(".")[0] not in unmeasured for name in FEATURE_NAMES)
        residual = [
            float(found["residual"][name]) if here else 0.0 for name, here in zip(FEATURE_NAMES, known, strict=True)
        ]
        return coefficients, np.array(residual)
    except (ValueError, KeyError, TypeError) as error:
        wrong = f"model file {gpu_name}.json cannot be read ({error!r})"
        raise RecordError(wrong, f"a file of format {FORMAT}", "reinstall outblas") from error


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


#: Ratio -> coefficients that are multiplied by it.
MULTIPLIED = {
    "launch": ("launch", "launch_pdl", "launch_early"), "hbm": ("hbm",), "l2": ("l2",), "l2_bytes": ("cache",),
    "clock": ("ingest", "shared", "store_tma", "store_direct", "exchange"), "tensor": ("clock",),
}  # fmt: skip
#: Cycles at the coefficient ``clock`` that are no tensor work: their time scales with the clock of an SM.
CYCLES = ("issue", "stage", "copy", "scalar", "align")
#: Times on an SM, microseconds, that shrink as its clock rises.
TIMES = (
    *("cluster", "cluster_log", "latency_l2", "latency_hbm", "loaded_l2", "loaded_hbm", "wave", "tile"),
    *("epilogue_tma", "epilogue_direct", "split", "split_peer", "multicast", "workspace", "hint", "outside", "edge"),
    *("epilogue", "chunk", "warp_sum"),
)
#: Times of tensor instructions, microseconds, that shrink as their rate per SM rises.
TENSOR_TIMES = ("mma",)
#: Numbers that do not depend on the GPU.
UNSCALED = (
    *("queue", "apart", "stacked", "quantum", "once_b", "again_b", "once_c", "broken_atom", "broken_sector", "narrow"),
    *("duty",),
)


def ratios(family: str, gpu: Gpu, base: Gpu) -> dict[str, float]:
    """Return the ratios of two GPUs' rates, ``gpu`` over ``base``, by the names of :data:`MULTIPLIED`.

    ``tensor`` is the ratio of the rates per SM of the family's instructions. It is that of mma.sync if one of the GPUs
    lacks wgmma.
    """
    rate = "wgmma_tflops" if FAMILIES[family].instructions == "wgmma" else "mma_tflops"
    if min(getattr(gpu, rate), getattr(base, rate)) == 0:
        rate = "mma_tflops"
    return {
        "launch": gpu.launch_us / base.launch_us,
        "hbm": gpu.hbm_tbs / base.hbm_tbs,
        "l2": gpu.l2_tbs / base.l2_tbs,
        "l2_bytes": gpu.l2_bytes / base.l2_bytes,
        "clock": gpu.clock_mhz / base.clock_mhz,
        "tensor": getattr(gpu, rate) / gpu.sms / (getattr(base, rate) / base.sms),
    }


def scaled(family: str, coefficients: Mapping[str, float], gpu: Gpu, base: Gpu) -> dict[str, float]:
    """Return a family's coefficients for a GPU, scaled from those of another; equal values if the rates are equal.

    Args:
        coefficients: name -> value, of ``base``.
    """
    by = ratios(family, gpu, base)
    factors = {name: by[ratio] for ratio, names in MULTIPLIED.items() for name in names}
    factors |= dict.fromkeys(CYCLES, by["tensor"] / by["clock"]) | dict.fromkeys(TIMES, 1 / by["clock"])
    factors |= dict.fromkeys(TENSOR_TIMES, 1 / by["tensor"])
    return {name: value * factors.get(name, 1.0) for name, value in coefficients.items()}
