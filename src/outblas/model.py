"""A small physical model of the GPU time of a (problem, config): it ranks, it does not replace timing.

    time = launch (less with PDL) + cluster set-up
         + smooth max of: rounds x (fill latency + K stages x stage + epilogue), traffic / HBM
         + sum over a split K, in a cluster or in a workspace,            bounded below by the floor
    stage = smooth max of: tensor time, CTA's serial chain, SM ingest, L2 share, latency under load / stages

A *round* is one CTA on every slot of the GPU (SMs x resident CTAs); a persistent kernel has one round
of many tiles. Twenty to forty coefficients per family are fitted on measurements by
``scripts/fit_model.py`` and read from ``data/models/<gpu>.json``, with their provenance; so is what is
left when they are (``model_residual``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from outblas import model_direct, model_gemv
from outblas.config import KernelConfig
from outblas.errors import DeviceError, RecordError
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.model_columns import columns_by_family, problem_columns
from outblas.model_residual import NAMES as RESIDUAL
from outblas.model_residual import factor
from outblas.model_terms import (
    Columns,
    Floats,
    above_floor,
    cluster_split,
    launch_us,
    let_in,
    on_the_busiest_sm,
    resident_ctas,
    smooth_max,
    split_us,
    workspace_us,
)
from outblas.model_traffic import broken_bytes, hinted_bytes, traffic_bytes
from outblas.problem import ELEMENT_BYTES, Problem
from outblas.roofline import H200, Gpu

FORMAT = 2
#: Where a fit starts, by family: rough physics, in microseconds, bytes per microsecond, cycles, GHz.
START: dict[str, dict[str, float]] = {
    Sm90WgmmaConfig.family: {
        "launch": 1.2,
        "launch_pdl": 0.7,
        "launch_early": 0.4,
        "cluster": 0.1,
        "cluster_log": 0.05,
        "latency_l2": 0.3,
        "latency_hbm": 0.8,
        "loaded_l2": 0.4,
        "loaded_hbm": 0.4,
        "queue": 3e7,
        "apart": 1.5,
        "stacked": 0.3,
        "clock": 1.6,
        "issue": 60.0,
        "stage": 40.0,
        "ingest": 70e3,
        "l2": 5.5e6,
        "hbm": 4.0e6,
        "cache": 30e6,
        "wave": 0.3,
        "tile": 0.1,
        "quantum": 0.9,
        "epilogue_tma": 0.3,
        "epilogue_direct": 0.3,
        "store_tma": 80e3,
        "store_direct": 50e3,
        "split": 0.4,
        "split_peer": 0.03,
        "exchange": 50e3,
        "multicast": 0.5,
        "workspace": 1.2,
        "hint": 0.01,
        "once_b": 0.95,
        "again_b": 0.5,
        "once_c": 0.95,
        "broken_atom": 4.0,
        "broken_sector": 8.0,
        "narrow": 0.2,
        "outside": 0.1,
        "edge": 0.05,
    },
    Sm80MmaConfig.family: {
        "launch": 0.9,
        "launch_pdl": 0.5,
        "launch_early": 0.3,
        "cluster": 0.1,
        "cluster_log": 0.05,
        "latency_l2": 0.3,
        "latency_hbm": 0.8,
        "loaded_l2": 0.4,
        "loaded_hbm": 0.4,
        "queue": 3e7,
        "apart": 1.5,
        "stacked": 0.3,
        "clock": 1.6,
        "issue": 30.0,
        "stage": 60.0,
        "copy": 4.0,
        "ingest": 60e3,
        "l2": 5.0e6,
        "hbm": 3.8e6,
        "cache": 30e6,
        "wave": 0.2,
        "quantum": 0.9,
        "epilogue_direct": 0.2,
        "store_direct": 40e3,
        "split": 0.4,
        "split_peer": 0.03,
        "exchange": 50e3,
    },
    Sm80GemvConfig.family: model_gemv.START,
    Sm80DirectConfig.family: model_direct.START,
}


def predict_us(problem: Problem, config: KernelConfig, gpu: Gpu = H200) -> float:
    """Predicted GPU time per call of a legal (problem, config), microseconds.

    Raises:
        DeviceError: no model of this GPU ships with the package.
        RecordError: the model's file is of another version or lacks a coefficient.
    """
    return float(predict_many(problem, (config,), gpu)[0])


def predict_many(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu = H200) -> Floats:
    """:func:`predict_us` of each config: float64[len(configs)], microseconds; raises as it does."""
    return predict_by(*load(gpu.name), problem, configs, gpu)


def predict_by(
    coefficients: Mapping[str, Mapping[str, float]], residual: Floats | None, problem: Problem,
    configs: Sequence[KernelConfig], gpu: Gpu,
) -> Floats:  # fmt: skip
    """:func:`predict_many` by given coefficients, and a residual of :mod:`outblas.model_residual` or none."""
    out = np.empty(len(configs))
    shape = problem_columns(problem, gpu)
    for family, where, columns in columns_by_family(configs):
        out[where] = time_us(coefficients[family], family, shape, columns, gpu)
        if residual is not None:
            corrected = out[where] * factor(residual, family, shape, columns, gpu.sms)
            out[where] = np.maximum(corrected, (out[where] + shape["floor"]) / 2)  # above the floor still
    return out


def rank(problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu = H200) -> NDArray[np.intp]:
    """Indices of ``configs``, fastest predicted first; equal predictions in the order given."""
    return np.argsort(predict_many(problem, configs, gpu), kind="stable")


def left_out(
    problem: Problem, configs: Sequence[KernelConfig], gpu: Gpu = H200, factor: float = 3.0
) -> NDArray[np.bool_]:
    """Which of ``configs`` a recorder need not measure: bool[len(configs)].

    True where the prediction exceeds ``factor`` x the best prediction among the configs with the
    same PDL option. The model's file says how often each factor would have dropped a measured best
    (``checks.left_out``, on problems that the fit had not seen).
    """
    times = predict_many(problem, configs, gpu)
    return too_slow(times, np.array([c.pdl for c in configs], dtype=bool), factor)


def too_slow(times: Floats, pdl: NDArray[np.bool_], factor: float) -> NDArray[np.bool_]:
    """The rule of :func:`left_out` on times in hand."""
    mask = np.zeros(len(times), dtype=bool)
    for option in (False, True):
        same = pdl == option
        if same.any():
            mask[same] = times[same] > factor * times[same].min()
    return mask


@functools.cache
def load(gpu_name: str) -> tuple[dict[str, dict[str, float]], Floats]:
    """Coefficients by family of a packaged model, and its residual's; raises as :func:`predict_us`."""
    folder = resources.files("outblas").joinpath("data", "models")
    path = folder.joinpath(f"{gpu_name}.json")
    if not path.is_file():
        raise DeviceError(f"no model of GPU {gpu_name!r}", "a GPU that was measured", "use h200")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        coefficients = {f: {name: float(found["coefficients"][f][name]) for name in START[f]} for f in START}
        return coefficients, np.array([float(found["residual"][name]) for name in RESIDUAL])
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"model file {gpu_name}.json cannot be read ({error!r})", f"format {FORMAT}", "reinstall outblas"
        ) from error


# --- the formula ---------------------------------------------------------------------------------


def time_us(x: Mapping[str, float], family: str, p: Columns, c: Columns, gpu: Gpu) -> Floats:
    """The formula over columns that broadcast together; ``x``: coefficients of the family."""
    if family == Sm80GemvConfig.family:
        return model_gemv.time_us(x, p, c, gpu)
    if family == Sm80DirectConfig.family:
        return model_direct.time_us(x, p, c, gpu)
    tiles_m = np.ceil(p["m"] / (c["bm"] * c["cm"])) * c["cm"]
    tiles_n = np.ceil(p["n"] / (c["bn"] * c["cn"])) * c["cn"]
    tiles = tiles_m * tiles_n
    latency = np.where(p["from_hbm"] > 0, x["latency_hbm"], x["latency_l2"])
    tensor, chain = (_wgmma_stage if family == Sm90WgmmaConfig.family else _mma_stage)(x, c)

    # CTAs on an SM at once, in a full round and in the last one.
    ctas = tiles * c["split"]
    per_sm = np.where(c["persistent"] > 0, c["min_blocks"], let_in(c, ctas, gpu))
    slots = resident_ctas(c["cluster"], per_sm, gpu)
    full = on_the_busiest_sm(x, c, ctas, per_sm, gpu)
    active = np.minimum(ctas, slots)

    steps = np.ceil(np.ceil(p["k"] / c["bk"]) / c["split"])
    stage_bytes = ELEMENT_BYTES * c["bk"] * (c["rows"] + c["bn"])
    l2_bytes = ELEMENT_BYTES * c["bk"] * (c["rows"] / c["cn"] + c["bn"] / c["cm"])
    if family == Sm90WgmmaConfig.family:
        narrow = _narrow_bytes(x, p, c)
        stage_bytes, l2_bytes = stage_bytes + narrow, l2_bytes + narrow / c["cm"]
    apart = np.where(cluster_split(c) > 1, x["apart"], 1.0)
    waiting = np.where(p["from_hbm"] > 0, x["loaded_hbm"], x["loaded_l2"]) + (
        active * c["stages"] * stage_bytes / x["queue"]
    )
    stage = smooth_max(
        full * tensor,
        tensor + chain,
        full * stage_bytes / x["ingest"],
        active * l2_bytes * apart / x["l2"],
        waiting / c["stages"],
        _multicast_us(x, c),
        full * _outside_us(x, p, c),
    )
    main = steps * stage
    if family == Sm90WgmmaConfig.family:
        main = main + steps * _edge_us(x, p, c) / np.maximum(ctas / slots, 1.0)
    store = _store_us(x, family, c)

    # Rounds: between fluid (CTAs finish unevenly) and whole.
    exact = np.maximum(ctas / slots, 1.0)
    rounds = exact + x["quantum"] * (np.ceil(exact) - exact)
    plain = rounds * (latency + main + store) + (rounds - 1) * x["wave"]
    if family == Sm90WgmmaConfig.family:
        steady = main + store + x["tile"]
        alternating = smooth_max(main, (main + store) / 2) + x["tile"]
        walked = latency + (rounds - 1) * np.where(c["pingpong"] > 0, alternating, steady) + main + store
        plain = np.where(c["persistent"] > 0, walked, plain)

    traffic = traffic_bytes(x, p, c, tiles_m, tiles_n, slots)
    if family == Sm90WgmmaConfig.family:
        traffic = traffic + hinted_bytes(x, p, c, tiles_m, tiles_n, slots) + broken_bytes(x, p, c, tiles_n)
    work = smooth_max(plain, traffic / np.where(p["from_hbm"] > 0, x["hbm"], x["l2"]))
    sums = split_us(x, c)
    if family == Sm90WgmmaConfig.family:
        sums = sums + workspace_us(x, c, tiles) + (c["stream_b"] + c["stream_c"]) * x["hint"]
    return above_floor(launch_us(x, c) + sums + work, p["floor"])


def _wgmma_stage(x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
    """Tensor time of one stage and its serial overhead. m64nNk16 takes N / 2 cycles of the tensor
    cores, or those in which shared memory yields its operands (128 bytes a cycle): 16 + N / 4."""
    k16 = c["bk"] / 16
    cycles = k16 * (c["bm"] / 64) * smooth_max(c["bn"] / 2, 16 + c["bn"] / 4)
    return cycles / (x["clock"] * 1e3), (x["stage"] + x["issue"] * k16 / 4) / (x["clock"] * 1e3)


def _mma_stage(x: Mapping[str, float], c: Columns) -> tuple[Floats, Floats]:
    """As :func:`_wgmma_stage` for mma.sync: 1,024 multiply-adds a cycle at best, every warp reading its
    own operands by ldmatrix, and cp.async instructions issued by the same warps."""
    warps = c["wm"] * c["wn"] * c["wk"]
    math_cycles = c["bm"] * c["bn"] * c["bk"] / 1024
    read_cycles = warps * (c["bm"] / c["wm"] + c["bn"] / c["wn"]) * (c["bk"] / c["wk"]) * ELEMENT_BYTES / 128
    copies = (c["bm"] + c["bn"]) * c["bk"] / c["vec"] / 32
    serial = x["stage"] + x["issue"] * c["bk"] / 16 / c["wk"] + x["copy"] * copies / warps
    cycles = smooth_max(math_cycles, read_cycles + x["copy"] * copies / 4)
    return cycles / (x["clock"] * 1e3), serial / (x["clock"] * 1e3)


def _multicast_us(x: Mapping[str, float], c: Columns) -> Floats:
    """Floor of a stage whose operands are multicast: CTAs wait until all of them have freed it. (Measured
    on this family's kernel: it does not shrink with the number of stages.)"""
    peers = c["cm"] * c["cn"]
    return np.where(peers > 1, x.get("multicast", 0.0) * np.sqrt(peers / 2), 0.0)


def _outside_us(x: Mapping[str, float], p: Columns, c: Columns) -> Floats:
    """Floor of a stage whose boxes of A reach past M: TMA takes its time over each. (Measured at M = 32 with boxes of
    64 rows: up to 1.8 times as long as at M = 64, the narrower the tile of B, the longer.)"""
    return np.where(p["m"] < c["rows"], x.get("outside", 0.0) * c["bk"] / 64, 0.0)


def _edge_us(x: Mapping[str, float], p: Columns, c: Columns) -> Floats:
    """The same for the CTAs of the last row or column of tiles, which the others wait for in one wave."""
    past_m = (p["m"] > c["bm"]) & (p["m"] % c["bm"] != 0)
    past_n = (p["n"] > c["bn"]) & (p["n"] % c["bn"] != 0)
    return np.where((past_m | past_n) & (c["shift"] == 0), x.get("edge", 0.0) * c["bk"] / 64, 0.0)


def _store_us(x: Mapping[str, float], family: str, c: Columns) -> Floats:
    """From the last product of a tile to its last store."""
    tile_bytes = ELEMENT_BYTES * c["bm"] * c["bn"]
    direct = x["epilogue_direct"] + tile_bytes / cluster_split(c) / x["store_direct"]
    if family == Sm90WgmmaConfig.family:
        return np.where(c["tma"] > 0, x["epilogue_tma"] + tile_bytes / x["store_tma"], direct)
    return direct + 2 * tile_bytes * (c["wk"] - 1) / x["exchange"]  # warps that split K meet in shared memory


def _narrow_bytes(x: Mapping[str, float], p: Columns, c: Columns) -> Floats:
    """Bytes that count for a stage's B where NN reads it by TMA in boxes narrower than 128 bytes."""
    boxes = 64 / np.where(c["bn"] % 64 == 0, 64, np.where(c["bn"] % 32 == 0, 32, 16))
    return p["nn"] * x["narrow"] * (boxes - 1) * ELEMENT_BYTES * c["bk"] * c["bn"]
