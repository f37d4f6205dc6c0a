"""Fit the coefficients of ``outblas.model`` on measurements and write ``data/models/<gpu>.json``.

    python scripts/fit_model.py --recording h200
    python scripts/fit_model.py times.jsonl
    python scripts/fit_model.py times.jsonl --recording h200

A JSONL has one problem per line: ``{"p": problem key, "first": {config name: us}, "med": {config name:
us}}``; ``med`` (a median over rounds) wins over ``first`` (a sample or two). Each family is fitted by
itself, in log space, by Levenberg-Marquardt on robustly weighted residuals. Every figure reported is
for held-out problems: k folds by problem, and what a fold is asked was never in its fit. The shipped
coefficients are then fitted on all problems.
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

from outblas import model
from outblas.config import KernelConfig, config_from_name
from outblas.problem import Problem
from outblas.provenance import commit
from outblas.roofline import H200, Gpu

TOPS = (4, 8, 16, 32)
FACTORS = (1.5, 2.0, 2.5, 3.0, 4.0)
#: Cells slower than this x the best of their problem hardly count: the model is to rank the front.
NEAR, FAR_WEIGHT = 3.0, 0.1
#: Log residual beyond which a cell pulls with constant force (Huber).
HUBER = 0.15
#: A sample of a JSONL is corrected by a difference below this median time, by a ratio above.
LAUNCH_MATTERS_US = 30.0
#: Pull of every coefficient, in log, towards its start: keeps what the data do not determine sane.
#: (The cells of one problem weigh 1 together.)
PRIOR = 1e-3


@dataclass(frozen=True)
class Row:
    """The measured cells of one problem; times in microseconds."""

    problem: Problem
    configs: tuple[KernelConfig, ...]
    times: np.ndarray


@dataclass(frozen=True)
class Cells:
    """Cells of one family as columns for the formula."""

    problem: dict[str, np.ndarray]
    config: dict[str, np.ndarray]
    times: np.ndarray
    weights: np.ndarray


def main() -> None:
    args = _arguments()
    rows, gpu, source = _read(args)
    print(f"{len(rows)} problems, {sum(len(r.times) for r in rows)} cells from {source['source']}", flush=True)
    held_out = _cross_validate(rows, gpu, args.folds)
    coefficients = {family: fit(family, rows, gpu) for family in model.START}
    report = {
        "format": model.FORMAT,
        "gpu": gpu.name,
        "coefficients": {f: {n: float(f"{v:.6g}") for n, v in x.items()} for f, x in coefficients.items()},
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
    parser.add_argument("jsonl", nargs="?", type=Path, help="measurements as JSON lines")
    parser.add_argument("--recording", help="a recording: its name (h200) or its folder")
    parser.add_argument("--folds", type=int, default=5, help="folds of the check by problem (default 5)")
    parser.add_argument("--out", help="where to write (default: the package's data/models/<gpu>.json)")
    args = parser.parse_args()
    if args.jsonl is None and args.recording is None:
        parser.error("give a JSONL, --recording or both")
    if args.jsonl and not args.jsonl.is_file():
        parser.error(f"no file {args.jsonl}")
    if args.folds < 2:
        parser.error("--folds must be 2 or more")
    return args


def _shown(args: argparse.Namespace) -> list[str]:
    """The arguments that decide the result, without the folders of one machine."""
    source = [args.jsonl.name] if args.jsonl else []
    source += ["--recording", Path(args.recording).name] if args.recording else []
    return [*source, "--folds", str(args.folds)]


def _read(args: argparse.Namespace) -> tuple[list[Row], Gpu, dict[str, Any]]:
    rows, gpu, sources, about = [], H200, [], {}
    if args.recording:
        from outblas.recording import Recording

        recording = Recording.load(args.recording)
        gpu = recording.gpu
        rows += [
            _row(p, dict(zip(recording.catalogue, times, strict=True)))
            for p, times in zip(recording.problems, recording.median_us, strict=True)
        ]
        sources.append(f"recording {Path(args.recording).name}")
        about["measured"] = recording.provenance
    if args.jsonl:
        text = args.jsonl.read_bytes()
        rows += [_line(json.loads(line)) for line in text.decode("utf-8").splitlines()]
        sources.append(args.jsonl.name)
        about["source_sha256"] = hashlib.sha256(text).hexdigest()
    return [r for r in rows if len(r.times)], gpu, {"source": ", ".join(sources), **about}


def _line(found: dict[str, Any]) -> Row:
    times = {**_as_medians(found["first"], found["med"]), **found["med"]}
    named = {name: t for name, t in times.items() if ":" in name and t}  # baselines have no family
    return _row(Problem.from_key(found["p"]), {config_from_name(n): t for n, t in named.items()})


def _as_medians(first: dict[str, Any], med: dict[str, float]) -> dict[str, float]:
    """Samples brought to the scale of the medians by the configs that have both: a lone call carries
    about a microsecond of launch that back-to-back calls hide, and long runs lower the clock."""
    both = [name for name in med if first.get(name)]
    samples, medians = np.array([_one(first[name]) for name in both]), np.array([med[name] for name in both])
    offset, scale = 0.0, 1.0
    if len(both) and np.median(medians) < LAUNCH_MATTERS_US:
        offset = float(np.median(samples - medians))
    elif len(both):
        scale = float(np.median(samples / medians))
    return {name: max(_one(t) - offset, 0.5 * _one(t)) / scale for name, t in first.items() if t}


def _one(time: Any) -> float:
    return float(min(time) if isinstance(time, list) else time)


def _row(problem: Problem, times: dict[KernelConfig, float]) -> Row:
    kept = {c: t for c, t in times.items() if np.isfinite(t) and t > 0}
    return Row(problem, tuple(kept), np.array(list(kept.values()), dtype=float))


# --- fitting -------------------------------------------------------------------------------------


def fit(family: str, rows: Sequence[Row], gpu: Gpu, steps: int = 60) -> dict[str, float]:
    """Coefficients of one family: damped Gauss-Newton with numeric derivatives, all in logarithms.

    Without cells of the family: where the fit would have started.
    """
    if not any(c.family == family for row in rows for c in row.configs):
        return dict(model.START[family])
    cells = _cells(family, rows, gpu)
    names = tuple(model.START[family])
    start = np.log([model.START[family][n] for n in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        times = model.time_us(dict(zip(names, np.exp(x), strict=True)), family, cells.problem, cells.config, gpu)
        return np.log(times / cells.times)

    def cost(r: np.ndarray, x: np.ndarray) -> float:
        size = np.abs(r)
        huber = np.where(size < HUBER, size**2 / 2, HUBER * (size - HUBER / 2))
        return float(np.sum(cells.weights * huber) + PRIOR * np.sum((x - start) ** 2) / 2)

    x, damping = start.copy(), 1e-2
    r = residuals(x)
    best = cost(r, x)
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + step) - r) / 1e-4 for step in 1e-4 * np.eye(len(names))], axis=1)
        weights = cells.weights * np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-12))
        weighted = jacobian * weights[:, None]
        hessian = jacobian.T @ weighted + PRIOR * np.eye(len(names))
        gradient = weighted.T @ r + PRIOR * (x - start)
        before = best
        while damping < 1e6:
            step = -np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            trial = x + np.clip(step, -0.7, 0.7)
            r_trial = residuals(trial)
            if (value := cost(r_trial, trial)) < best:
                x, r, best, damping = trial, r_trial, value, max(damping / 4, 1e-6)
                break
            damping *= 4
        if before - best < 1e-5 * before:
            break
    return dict(zip(names, np.exp(x), strict=True))


def _cells(family: str, rows: Sequence[Row], gpu: Gpu) -> Cells:
    parts = []
    for row in rows:
        mine = [i for i, c in enumerate(row.configs) if c.family == family]
        if not mine:
            continue
        times = row.times[mine]
        weights = np.maximum(np.square(row.times.min() / times), FAR_WEIGHT)
        shape = {k: np.full(len(mine), v) for k, v in model.problem_columns(row.problem, gpu).items()}
        parts.append((shape, model.config_columns([row.configs[i] for i in mine]), times, weights / weights.sum()))

    def join(which: int) -> dict[str, np.ndarray]:
        return {k: np.concatenate([part[which][k] for part in parts]) for k in parts[0][which]}

    return Cells(join(0), join(1), *(np.concatenate([part[i] for part in parts]) for i in (2, 3)))


# --- checking ------------------------------------------------------------------------------------


def _cross_validate(rows: Sequence[Row], gpu: Gpu, folds: int) -> list[np.ndarray]:
    """Predictions of every row by a fit that did not see its problem."""
    fold = np.random.default_rng(0).permutation(len(rows)) % folds
    out: list[np.ndarray] = [np.empty(0)] * len(rows)
    for f in range(folds):
        seen = [row for row, g in zip(rows, fold, strict=True) if g != f]
        coefficients = {family: fit(family, seen, gpu) for family in model.START}
        for i in np.flatnonzero(fold == f):
            out[i] = _predict(coefficients, rows[i], gpu)
        print(f"fold {f + 1} of {folds} done", flush=True)
    return out


def _predict(coefficients: dict[str, dict[str, float]], row: Row, gpu: Gpu) -> np.ndarray:
    times = np.empty(len(row.configs))
    shape = model.problem_columns(row.problem, gpu)
    for family, x in coefficients.items():
        mine = [i for i, c in enumerate(row.configs) if c.family == family]
        if mine:
            columns = model.config_columns([row.configs[i] for i in mine])
            times[mine] = model.time_us(x, family, shape, columns, gpu)
    return times


def _checks(rows: Sequence[Row], predictions: Sequence[np.ndarray]) -> dict[str, Any]:
    """Held-out figures: error, regret of the model's first n, and what pruning would have lost."""
    error = np.concatenate([np.log(p / r.times)[r.times <= NEAR * r.times.min()] for r, p in zip_(rows, predictions)])
    out: dict[str, Any] = {"log_rms_near": _round(np.sqrt(np.mean(error**2))), "top": {}, "top_each_pdl": {}}
    for label, masks in (("top", lambda r: [np.ones(len(r.times), bool)]), ("top_each_pdl", _pdl_masks)):
        for n in TOPS:
            ratios = []
            for row, predicted in zip_(rows, predictions):
                for mask in masks(row):
                    order = np.argsort(predicted[mask], kind="stable")[:n]
                    ratios.append(row.times[mask][order].min() / row.times[mask].min())
            ratio = np.array(ratios)
            out[label][str(n)] = {
                "n": len(ratio),
                "geomean": _round(np.exp(np.mean(np.log(ratio)))),
                "within_2_percent": int((ratio <= 1.02).sum()),
                "worst": _round(ratio.max()),
            }
    needed = np.array(
        [
            predicted[mask][row.times[mask].argmin()] / predicted[mask].min()
            for row, predicted in zip_(rows, predictions)
            for mask in _pdl_masks(row)
        ]
    )
    out["left_out"] = {
        "n": len(needed),
        "smallest_safe_factor": _round(needed.max()),
        "factors": {str(factor): _pruning(rows, predictions, needed, factor) for factor in FACTORS},
    }
    return out


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


def _pdl_masks(row: Row) -> list[np.ndarray]:
    pdl = np.array([c.pdl for c in row.configs])
    return [mask for mask in (~pdl, pdl) if mask.any()]


def zip_(*sequences: Sequence[Any]) -> Any:
    return zip(*sequences, strict=True)


def _round(value: Any) -> float:
    return round(float(value), 4)


def _print(report: dict[str, Any]) -> None:
    checks = report["checks"]
    for family, values in report["coefficients"].items():
        print(f"{family}: " + " ".join(f"{name}={value:.4g}" for name, value in values.items()))
    print(f"held out, cells within {NEAR}x of the best: rms log error {checks['log_rms_near']}")
    for label in ("top", "top_each_pdl"):
        for n, f in checks[label].items():
            print(
                f"{label} {n:>2}: geomean {f['geomean']:.4f}, within 2% {f['within_2_percent']} of {f['n']}, "
                f"worst {f['worst']:.3f}"
            )
    print(f"pruning: smallest factor that loses no best {checks['left_out']['smallest_safe_factor']}")
    for factor, f in checks["left_out"]["factors"].items():
        print(f"  {factor}: {f}")


if __name__ == "__main__":
    main()
