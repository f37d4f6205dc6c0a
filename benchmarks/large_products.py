"""Question: how many large products win by 0.5% or more, each kernel alone at its settled frequency?

Command:

    python benchmarks/large_products.py [--library FILE] [--name packaged] [--work build/large_products]
        [--out results/<gpu>/large_products.json]
    python benchmarks/large_products.py --bench results/<gpu>/grid1000_tn_fp16_fp32_block.parquet [--name packaged]

Result file: results/<gpu>/large_products.json, an entry for each ``--name``. A note below the published table has the
counts. Needs a GPU, about 3 s a product.

It times the problems of grid1000 in TN from 1e11 FLOP on for which the library has a kernel. An interrupted run
resumes. With ``--bench`` it times nothing: it counts the rows of a bench in mode ``block`` that was made before. To
time the kernels of an earlier commit, check it out elsewhere and give its library. Run this file from here with
``PYTHONPATH`` set to that checkout's ``src``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures.rival_files import LARGE_FORMAT

from outblas.core.errors import OutblasError, UsageError
from outblas.core.problem import Problem
from outblas.core.stats import geomean
from outblas.core.suites import block_problems, suite
from outblas.records.library import Library
from outblas.records.results import read_result, result_file
from outblas_lab.pool.run_bench import BenchRequest, run_bench

#: A win has at least this speed-up over the fastest rival.
WIN = 1.005


def entry_of(rows: Sequence[dict[str, Any]], provenance: dict[str, Any], problems: int) -> dict[str, Any]:
    """Return an entry of the result file.

    Args:
        rows: result rows of mode ``block`` of the products with a kernel.
        provenance: of the bench.
        problems: number of products, those without a kernel included.
    """
    ours = [row for row in rows if not row["fallback"]]
    return {
        "problems": problems,
        "with_kernel": len(ours),
        "wins": sum(row["published"] >= WIN for row in ours),
        "geomean": round(geomean([row["published"] for row in ours]), 6),
        "provenance": {key: provenance[key] for key in ("gpu", "driver", "toolchain", "date", "commit", "command")},
        "rows": [
            {key: row[key] for key in ("m", "n", "k", "config", "published", "low", "high", "ours_mhz", "baseline_mhz")}
            for row in ours
        ],
    }


def measure(library: Library, work: Path) -> dict[str, Any]:
    """Return the entry of a library, timed on GPU 0; the bench is kept in ``work``."""
    large = block_problems(suite("grid1000"))
    mine = [p for p in large if (row := library.lookup(p)) is not None and row.plain is not None]
    return entry_of_bench(run_bench(BenchRequest(mine, "grid1000", library, work / "large.parquet", mode="block")))


def entry_of_bench(path: Path) -> dict[str, Any]:
    """Return the entry of a result file of mode ``block``.

    Raises:
        UsageError: the file is of another mode.
        RecordError: the file is damaged.
    """
    result, large = read_result(path), set(block_problems(suite("grid1000")))
    if any(row["mode"] != "block" for row in result.rows):
        raise UsageError(f"{path} is of another mode", "a bench in mode block", "outblas bench --mode block makes one")
    rows = [row for row in result.rows if Problem(row["m"], row["n"], row["k"]) in large]
    return entry_of(rows, result.provenance, len(large))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--library", type=Path, help="a library file (default: the packaged one of the H200)")
    parser.add_argument("--name", default="packaged", help="name of the entry")
    parser.add_argument("--work", type=Path, default=Path("build/large_products"))
    parser.add_argument("--out", type=Path, default=result_file("large_products.json"))
    parser.add_argument("--bench", type=Path, help="a result file of mode block, to count without timing")
    options = parser.parse_args(arguments)
    try:
        if options.bench:
            found = entry_of_bench(options.bench)
        else:
            library = Library.load(options.library) if options.library else Library.packaged("h200")
            work = options.work / options.name
            work.mkdir(parents=True, exist_ok=True)
            found = measure(library, work)
    except OutblasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = json.loads(options.out.read_text()) if options.out.exists() else {"format": LARGE_FORMAT, "libraries": {}}
    known["libraries"][options.name] = found
    options.out.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{options.name}: {found['wins']} of {found['with_kernel']} kernels win by 0.5%; {options.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
