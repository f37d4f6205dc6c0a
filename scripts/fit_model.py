"""Fit the coefficients of ``outblas.model`` on measurements and write ``data/models/<gpu>.json``.

    python scripts/fit_model.py --store build/h200/grid1000_tn_fp16_fp32_tune.sqlite --store ...
    python scripts/fit_model.py --recording h200
    python scripts/fit_model.py times.jsonl more.jsonl --recording h200

Stores are what ``scripts/regenerate.py`` and ``outblas tune`` leave, JSON lines are described in ``measured.py``.
All families are fitted together, in log space, by Levenberg-Marquardt on robustly weighted residuals, of which
what all cells of a problem have in common counts little: the model is to rank. Every figure reported is for
held-out problems: k folds by shape (M, N, K in all layouts and dtypes), and what a fold is asked was never in
its fit. The shipped coefficients are then fitted on all problems.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from fit_residual import fit_residual
from measured import Row, launch_masks, of_jsonl, of_recording, of_store

from outblas import model, model_residual
from outblas.model_columns import columns_by_family
from outblas.provenance import commit
from outblas.recording import Recording
from outblas.roofline import H200, Gpu

TOPS = (4, 8, 16, 32)
FACTORS = (1.5, 2.0, 2.5, 3.0, 4.0)
#: Cells count by the square of (best of their launch option / their time), but no less than this: the model is to rank
#: the front. The error is reported over cells within NEAR x the best of their problem.
NEAR, FAR_WEIGHT = 3.0, 0.05
#: Log residual beyond which a cell pulls with constant force (Huber).
HUBER = 0.06
#: Share of the mean residual of a problem that is taken off its cells' before they count.
CENTRED = 0.9
#: Pull of every coefficient, in log, towards its start: keeps what the data do not determine sane.
#: (The cells of one problem weigh 1 together.)
PRIOR = 3e-3

Coefficients = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Columns:
    """Cells of one family as columns for the formula.

    Attributes:
        where: int[cells of the family], their places among all cells.
    """

    where: np.ndarray
    problem: dict[str, np.ndarray]
    config: dict[str, np.ndarray]


@dataclass(frozen=True)
class Cells:
    """All cells of a fit, row after row: their row, log time, and weight (1 a row together)."""

    row: np.ndarray
    log_times: np.ndarray
    weights: np.ndarray
    families: dict[str, Columns]

    def centred(self, values: np.ndarray) -> np.ndarray:
        """Less most of each row's weighted mean; ``values``: [cells] or [cells, any]."""
        weighted = values * (self.weights if values.ndim == 1 else self.weights[:, None])
        mean = np.add.reduceat(weighted, np.flatnonzero(np.diff(self.row, prepend=-1)), axis=0)
        return np.asarray(values - CENTRED * mean[self.row])


def main() -> None:
    args = _arguments()
    rows, gpu, source = _read(args)
    print(f"{len(rows)} problems, {sum(len(r.times) for r in rows)} cells from {source['source']}", flush=True)
    held_out = _cross_validate(rows, gpu, args.folds)
    coefficients = fit(rows, gpu)
    residual = fit_residual(rows, coefficients, gpu)
    report = {
        "format": model.FORMAT,
        "gpu": gpu.name,
        "coefficients": {f: {n: float(f"{v:.6g}") for n, v in x.items()} for f, x in coefficients.items()},
        "residual": dict(zip(model_residual.NAMES, (float(f"{v:.6g}") for v in residual), strict=True)),
        "checks": {"folds": args.folds, "problems": len(rows), **_checks(rows, held_out)},
        "provenance": {
            **source,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "command": " ".join(["scripts/fit_model.py", *_shown(args)]),
        },
    }
    _print(report)
    out = Path(args.out or Path(str(model.__file__)).parent / "data" / "models" / f"{gpu.name}.json")
    part = out.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(part, out)
    print(f"wrote {out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jsonl", nargs="*", type=Path, help="measurements as JSON lines")
    parser.add_argument("--recording", help="a recording: its name (h200) or its folder")
    parser.add_argument("--store", action="append", default=[], type=Path, help="a store of a tuning; may be repeated")
    parser.add_argument("--folds", type=int, default=5, help="folds of the check by shape (default 5)")
    parser.add_argument("--out", help="where to write (default: the package's data/models/<gpu>.json)")
    args = parser.parse_args()
    if not (args.jsonl or args.store or args.recording):
        parser.error("give a JSONL, --store, --recording or some of them")
    for path in (*args.jsonl, *args.store):
        if not path.is_file():
            parser.error(f"no file {path}")
    if args.folds < 2:
        parser.error("--folds must be 2 or more")
    return args


def _shown(args: argparse.Namespace) -> list[str]:
    """The arguments that decide the result, without the folders of one machine."""
    shown = [path.name for path in args.jsonl]
    shown += ["--recording", Path(args.recording).name] if args.recording else []
    shown += [word for path in args.store for word in ("--store", path.name)]
    return [*shown, "--folds", str(args.folds)]


def _read(args: argparse.Namespace) -> tuple[list[Row], Gpu, dict[str, Any]]:
    rows: list[Row] = []
    gpu, about = H200, {}
    if args.recording:
        name = Path(args.recording).name
        recording = Recording.load(args.recording)
        gpu = recording.gpu
        rows += of_recording(recording, name)
        about["measured"] = recording.provenance
    for path in args.jsonl:
        rows += of_jsonl(path)
    for path in args.store:
        rows += of_store(path)
    files = [*args.jsonl, *args.store]
    if files:
        about["source_sha256"] = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    named = [f"recording {Path(args.recording).name}"] if args.recording else []
    source = ", ".join([*named, *(path.name for path in files)])
    return [r for r in rows if len(r.times)], gpu, {"source": source, **about}


# --- fitting -------------------------------------------------------------------------------------


def fit(rows: Sequence[Row], gpu: Gpu, steps: int = 60) -> Coefficients:
    """Coefficients of every family: damped Gauss-Newton with numeric derivatives, all in logarithms.

    A family without cells stays where the fit starts.
    """
    cells = _cells(rows, gpu)
    names = [(family, name) for family, start in model.START.items() for name in start]
    start = np.log([model.START[family][name] for family, name in names])

    def predicted(x: np.ndarray, family: str) -> np.ndarray:
        own = {name: np.exp(v) for (f, name), v in zip(names, x, strict=True) if f == family}
        columns = cells.families[family]
        return np.log(model.time_us(own, family, columns.problem, columns.config, gpu))

    def residuals(x: np.ndarray) -> np.ndarray:
        out = -cells.log_times
        for family, columns in cells.families.items():
            out[columns.where] += predicted(x, family)
        return out

    def jacobian(x: np.ndarray) -> np.ndarray:
        out = np.zeros((len(cells.row), len(names)))
        for family, columns in cells.families.items():
            here = predicted(x, family)
            for i in (i for i, (f, _) in enumerate(names) if f == family):
                step = np.where(np.arange(len(names)) == i, 1e-4, 0.0)
                out[columns.where, i] = (predicted(x + step, family) - here) / 1e-4
        return cells.centred(out)

    def cost(r: np.ndarray, x: np.ndarray) -> float:
        size = np.abs(r)
        huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float(np.sum(cells.weights * huber) + PRIOR * np.sum((x - start) ** 2) / 2)

    x, damping = start.copy(), 1e-2
    r = cells.centred(residuals(x))
    best = cost(r, x)
    for _ in range(steps):
        slopes = jacobian(x)
        weighted = slopes * (cells.weights * np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-12)))[:, None]
        hessian = slopes.T @ weighted + PRIOR * np.eye(len(names))
        gradient = weighted.T @ r + PRIOR * (x - start)
        before = best
        while damping < 1e6:
            step = -np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            trial = x + np.clip(step, -0.7, 0.7)
            r_trial = cells.centred(residuals(trial))
            if (value := cost(r_trial, trial)) < best:
                x, r, best, damping = trial, r_trial, value, max(damping / 4, 1e-6)
                break
            damping *= 4
        if before - best < 1e-4 * before:
            break
    found: Coefficients = {family: {} for family in model.START}
    for (family, name), value in zip(names, np.exp(x), strict=True):
        found[family][name] = float(value)
    return found


def _cells(rows: Sequence[Row], gpu: Gpu) -> Cells:
    parts: dict[str, list[tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]]] = {}
    offset = 0
    for row in rows:
        shape = model.problem_columns(row.problem, gpu)
        for family, mine, columns in columns_by_family(row.configs):
            same = {k: np.full(len(mine), v) for k, v in shape.items()}
            parts.setdefault(family, []).append((offset + mine, same, columns))
        offset += len(row.configs)

    def join(columns: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {k: np.concatenate([c[k] for c in columns]) for k in columns[0]}

    families = {
        family: Columns(np.concatenate([p[0] for p in some]), join([p[1] for p in some]), join([p[2] for p in some]))
        for family, some in parts.items()
    }
    number = np.repeat(np.arange(len(rows)), [len(r.times) for r in rows])
    times, weights = (np.concatenate(v) for v in ([r.times for r in rows], [_weights(r) for r in rows]))
    return Cells(number, np.log(times), weights, families)


def _weights(row: Row) -> np.ndarray:
    weights = np.empty(len(row.times))
    for mask in launch_masks(row.configs):
        front = np.maximum(np.square(row.times[mask].min() / row.times[mask]), FAR_WEIGHT)
        weights[mask] = front / front.sum()
    return weights / weights.sum()


# --- checking ------------------------------------------------------------------------------------


def _cross_validate(rows: Sequence[Row], gpu: Gpu, folds: int) -> list[np.ndarray]:
    """Predictions of every row by a fit that did not see its shape."""
    shapes = sorted({(r.problem.m, r.problem.n, r.problem.k) for r in rows})
    fold_of = dict(zip(shapes, np.random.default_rng(0).permutation(len(shapes)) % folds, strict=True))
    fold = np.array([fold_of[r.problem.m, r.problem.n, r.problem.k] for r in rows])
    out: list[np.ndarray] = [np.empty(0)] * len(rows)
    for f in range(folds):
        seen = [row for row, g in zip(rows, fold, strict=True) if g != f]
        coefficients = fit(seen, gpu)
        residual = fit_residual(seen, coefficients, gpu)
        for i in np.flatnonzero(fold == f):
            out[i] = model.predict_by(coefficients, residual, rows[i].problem, rows[i].configs, gpu)
        print(f"fold {f + 1} of {folds} done", flush=True)
    return out


def _checks(rows: Sequence[Row], predictions: Sequence[np.ndarray]) -> dict[str, Any]:
    """Held-out figures: error, regret of the model's first n, and what pruning would have lost."""
    error = np.concatenate([np.log(p / r.times)[r.times <= NEAR * r.times.min()] for r, p in zip_(rows, predictions)])
    out: dict[str, Any] = {"log_rms_near": _round(np.sqrt(np.mean(error**2)))}
    out |= {"top": _tops(rows, predictions, False), "top_each_pdl": _tops(rows, predictions, True)}
    for source in dict.fromkeys(r.source for r in rows):
        own = [i for i, r in enumerate(rows) if r.source == source]
        figures = _tops([rows[i] for i in own], [predictions[i] for i in own], False)
        each = _tops([rows[i] for i in own], [predictions[i] for i in own], True)
        out.setdefault("sources", {})[source] = {"top": figures, "top_each_pdl": each}
    needed = np.array(
        [
            predicted[mask][row.times[mask].argmin()] / predicted[mask].min()
            for row, predicted in zip_(rows, predictions)
            for mask in launch_masks(row.configs)
        ]
    )
    out["left_out"] = {
        "n": len(needed),
        "smallest_safe_factor": _round(needed.max()),
        "factors": {str(factor): _pruning(rows, predictions, needed, factor) for factor in FACTORS},
    }
    return out


def _tops(rows: Sequence[Row], predictions: Sequence[np.ndarray], by_launch: bool) -> dict[str, Any]:
    """The best time among the first n of the predicted order over the best of all that was measured."""
    found: dict[str, Any] = {}
    for n in TOPS:
        ratios = []
        for row, predicted in zip_(rows, predictions):
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
    rows: Sequence[Row], predictions: Sequence[np.ndarray], needed: np.ndarray, factor: float
) -> dict[str, Any]:
    pdl = [np.array([c.pdl for c in row.configs]) for row in rows]
    masks = [model.too_slow(p, d, factor) for p, d in zip_(predictions, pdl)]
    spent = [row.times[mask].sum() / row.times.sum() for row, mask in zip_(rows, masks)]
    return {
        "bests_lost": int((needed > factor).sum()),
        "share_of_cells_pruned": _round(np.mean(np.concatenate(masks))),
        "share_of_time_pruned": _round(np.mean(spent)),
    }


def zip_(*sequences: Sequence[Any]) -> Any:
    return zip(*sequences, strict=True)


def _round(value: Any) -> float:
    return round(float(value), 4)


def _print(report: dict[str, Any]) -> None:
    checks = report["checks"]
    for family, values in report["coefficients"].items():
        print(f"{family}: " + " ".join(f"{name}={value:.4g}" for name, value in values.items()))
    print(f"held out, cells within {NEAR}x of the best: rms log error {checks['log_rms_near']}")
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


if __name__ == "__main__":
    main()
