"""Fit the coefficients of ``outblas.kernels.cost.cost_model`` on measurements and write ``data/models/<gpu>.json``.

Stores are what ``outblas build-library`` and ``outblas tune`` leave.
:mod:`outblas_lab.train.fit_cost_model` has the fit. Every reported figure is for held-out problems: k folds by shape
(M, N, K in all layouts and dtypes). The shipped coefficients are then fitted on all problems.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.gpu_records import reference_gpu
from outblas.core.roofline import Gpu
from outblas.kernels.cost import cost_model
from outblas.records.provenance import source_commit, utc_now
from outblas_lab.recordings.recording import Recording
from outblas_lab.train.fit_cost_model import (
    MeasuredRow,
    fit,
    fit_residual,
    launch_masks,
    rows_of_recording,
    rows_of_store,
)

TOP_COUNTS = (4, 8, 16, 32)
PRUNING_FACTORS = (1.5, 2.0, 2.5, 3.0, 4.0)
#: The error is reported over cells within NEAR x the best of their problem.
NEAR_BEST_FACTOR = 3.0


@dataclass(frozen=True)
class Measurements:
    """Sources of measured times.

    Attributes:
        recording: name of a packaged recording, or a recording's folder.
    """

    stores: Sequence[Path] = ()
    recording: str | None = None

    def read(self) -> tuple[list[MeasuredRow], Gpu, dict[str, Any]]:
        """Read all sources: the recording, then the stores.

        Returns:
            (rows without empty ones, GPU, provenance). The GPU is the recording's, or the reference GPU without a
            recording. The provenance has ``source``, and if they apply, ``measured`` and ``source_sha256``.
        """
        rows: list[MeasuredRow] = []
        gpu, about = reference_gpu(), dict[str, Any]()
        if self.recording:
            recording = Recording.load(self.recording)
            gpu = recording.gpu
            rows += rows_of_recording(recording, Path(self.recording).name)
            about["measured"] = recording.provenance
        for path in self.stores:
            rows += rows_of_store(path)
        if self.stores:
            content = b"".join(path.read_bytes() for path in self.stores)
            about["source_sha256"] = hashlib.sha256(content).hexdigest()
        named = [f"recording {Path(self.recording).name}"] if self.recording else []
        source = ", ".join([*named, *(path.name for path in self.stores)])
        return [r for r in rows if len(r.times)], gpu, {"source": source, **about}

    def arguments(self) -> list[str]:
        """Return the command-line arguments that name the sources, without folders."""
        shown = ["--recording", Path(self.recording).name] if self.recording else []
        return shown + [word for path in self.stores for word in ("--store", path.name)]


def fit_model(measured: Measurements, folds: int) -> dict[str, Any]:
    """Fit the ranking model and return the content of its file; progress goes to standard output.

    The coefficients are fitted on all problems. The figures under ``checks`` are for problems that were held out.

    Returns:
        A dict with the keys ``format, gpu, coefficients, residual, checks, provenance``.
    """
    rows, gpu, source = measured.read()
    print(f"{len(rows)} problems, {sum(len(r.times) for r in rows)} cells from {source['source']}", flush=True)
    held_out = _cross_validate(rows, gpu, folds)
    coefficients = fit(rows, gpu)
    residual = fit_residual(rows, coefficients, gpu)
    return {
        "format": cost_model.FORMAT,
        "gpu": gpu.name,
        "coefficients": {f: {n: float(f"{v:.6g}") for n, v in x.items()} for f, x in coefficients.items()},
        "residual": dict(zip(cost_model.FEATURE_NAMES, (float(f"{v:.6g}") for v in residual), strict=True)),
        "checks": {"folds": folds, "problems": len(rows), **_checks(rows, held_out)},
        "provenance": {
            **source,
            "date": utc_now(),
            "commit": source_commit(),
            "command": " ".join(["outblas fit model", *measured.arguments(), "--folds", str(folds)]),
        },
    }


def _cross_validate(rows: Sequence[MeasuredRow], gpu: Gpu, folds: int) -> list[np.ndarray]:
    """Predictions of every row by a fit that did not see its shape."""
    shapes = sorted({(r.problem.m, r.problem.n, r.problem.k) for r in rows})
    fold_of = dict(zip(shapes, np.random.default_rng(0).permutation(len(shapes)) % folds, strict=True))
    fold = np.array([fold_of[r.problem.m, r.problem.n, r.problem.k] for r in rows])
    out: list[np.ndarray] = [np.empty(0)] * len(rows)
    for f in range(folds):
        seen = [row for row, g in zip(rows, fold, strict=True) if g != f]
        coefficients = fit(seen, gpu)
        residual = fit_residual(seen, coefficients, gpu)
        for i in np.flatnonzero(fold == f).tolist():
            out[i] = cost_model.predict_with(coefficients, residual, rows[i].problem, rows[i].configs, gpu)
        print(f"fold {f + 1} of {folds} done", flush=True)
    return out


def _checks(rows: Sequence[MeasuredRow], predictions: Sequence[np.ndarray]) -> dict[str, Any]:
    """Held-out figures: error, regret of the model's first n, and what pruning would have lost."""
    error = np.concatenate(
        [
            np.log(p / r.times)[r.times <= NEAR_BEST_FACTOR * r.times.min()]
            for r, p in zip(rows, predictions, strict=True)
        ]
    )
    out: dict[str, Any] = {"log_rms_near": _round(np.sqrt(np.mean(error**2)))}
    out |= {"top": _tops(rows, predictions, False), "top_each_pdl": _tops(rows, predictions, True)}
    for source in dict.fromkeys(r.source for r in rows):
        own = [i for i, r in enumerate(rows) if r.source == source]
        mine = [rows[i] for i in own], [predictions[i] for i in own]
        out.setdefault("sources", {})[source] = {"top": _tops(*mine, False), "top_each_pdl": _tops(*mine, True)}
    needed = np.array(
        [
            predicted[mask][row.times[mask].argmin()] / predicted[mask].min()
            for row, predicted in zip(rows, predictions, strict=True)
            for mask in launch_masks(row.configs)
        ]
    )
    out["left_out"] = {
        "n": len(needed),
        "smallest_safe_factor": _round(needed.max()),
        "factors": {str(factor): _pruning(rows, predictions, needed, factor) for factor in PRUNING_FACTORS},
    }
    return out


def _tops(rows: Sequence[MeasuredRow], predictions: Sequence[np.ndarray], by_launch: bool) -> dict[str, Any]:
    """The best time among the first n of the predicted order over the best of all that was measured."""
    found: dict[str, Any] = {}
    for n in TOP_COUNTS:
        ratios = []
        for row, predicted in zip(rows, predictions, strict=True):
            for mask in launch_masks(row.configs) if by_launch else [np.ones(len(row.times), bool)]:
                order = np.argsort(predicted[mask], kind="stable")[:n]
                ratios.append(row.times[mask][order].min() / row.times[mask].min())
        ratio = np.array(ratios)
        found[str(n)] = {
            "n": len(ratio),
            "geomean": _round(np.exp(np.mean(np.log(ratio)))),
            "within_2_percent": int((ratio <= 1.02).sum()),
            "worst": _round(ratio.max()),
        }
    return found


def _pruning(
    rows: Sequence[MeasuredRow], predictions: Sequence[np.ndarray], needed: np.ndarray, factor: float
) -> dict[str, Any]:
    pdl = [np.array([c.pdl for c in row.configs]) for row in rows]
    masks = [cost_model.too_slow_mask(p, d, factor) for p, d in zip(predictions, pdl, strict=True)]
    spent = [row.times[mask].sum() / row.times.sum() for row, mask in zip(rows, masks, strict=True)]
    return {
        "bests_lost": int((needed > factor).sum()),
        "share_of_cells_pruned": _round(np.mean(np.concatenate(masks))),
        "share_of_time_pruned": _round(np.mean(spent)),
    }


def _round(value: Any) -> float:
    return round(float(value), 4)


def print_report(report: dict[str, Any]) -> None:
    """Print coefficients and held-out figures of what :func:`fit_model` returned to standard output, a line each."""
    checks = report["checks"]
    for family, values in report["coefficients"].items():
        print(f"{family}: " + " ".join(f"{name}={value:.4g}" for name, value in values.items()))
    print(f"held out, cells within {NEAR_BEST_FACTOR}x of the best: rms log error {checks['log_rms_near']}")
    for source, figures in {"all": checks, **checks["sources"]}.items():
        for label in ("top", "top_each_pdl"):
            for n, f in figures[label].items():
                print(
                    f"{source} {label} {n:>2}: geomean {f['geomean']:.4f}, within 2% {f['within_2_percent']} of "
                    f"{f['n']}, worst {f['worst']:.3f}"
                )
    print(f"pruning: smallest factor that loses no best {checks['left_out']['smallest_safe_factor']}")
    for factor, f in checks["left_out"]["factors"].items():
        print(f"  {factor}: {f}")
