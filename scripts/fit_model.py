"""Fit the coefficients of ``outblas.model`` on measurements and write ``data/models/<gpu>.json``.

    python scripts/fit_model.py --store build/h200/grid1000_tn_fp16_fp32_tune.sqlite --store ...
    python scripts/fit_model.py --recording h200
    python scripts/fit_model.py times.jsonl more.jsonl --recording h200

Stores are what ``scripts/regenerate.py`` and ``outblas tune`` leave, JSON lines are described in ``measured.py``.
The fit is ``outblas.learn.formula``'s. Every figure reported is for held-out problems: k folds by shape (M, N, K in
all layouts and dtypes), and what a fold is asked was never in its fit. The shipped coefficients are then fitted
on all problems.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from measured import of_jsonl, of_store

from outblas import model, model_residual
from outblas.files import write_json
from outblas.learn.formula import Row, fit, fit_residual, launch_masks, of_recording
from outblas.provenance import commit, utc_now
from outblas.recording import Recording
from outblas.roofline import H200, Gpu

TOPS = (4, 8, 16, 32)
FACTORS = (1.5, 2.0, 2.5, 3.0, 4.0)
#: The error is reported over cells within NEAR x the best of their problem.
NEAR = 3.0


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
            "date": utc_now(),
            "commit": commit(),
            "command": " ".join(["scripts/fit_model.py", *_shown(args)]),
        },
    }
    _print(report)
    out = Path(args.out or Path(str(model.__file__)).parent / "data" / "models" / f"{gpu.name}.json")
    write_json(out, report)
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
