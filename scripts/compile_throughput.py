"""Core-seconds that a candidate's compilation takes, by family: NVRTC, ptxas' report and the SASS facts, no cache.

    python scripts/compile_throughput.py --out results/compile_throughput.json

Counts processor time of one process, so that a busy machine does not change the answer.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import numpy as np

from outblas.compile import compile_source
from outblas.files import write_json
from outblas.kernels.catalogue import catalogue
from outblas.kernels.legality import why_illegal
from outblas.problem import Problem
from outblas.provenance import collect
from outblas.source import make_source

PROBLEM = Problem(16384, 16384, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("compile_throughput.json"))
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    candidates = [c for c in catalogue() if why_illegal(PROBLEM, c) is None]
    compile_source(make_source(PROBLEM, candidates[0]), cache=None)  # loads NVRTC
    for done, config in enumerate(candidates, 1):
        source = make_source(PROBLEM, config)
        begin = time.process_time()
        compile_source(source, cache=None)
        seconds.setdefault(config.family, []).append(time.process_time() - begin)
        if done % 50 == 0:
            print(f"{done}/{len(candidates)}", flush=True)
    rows = [
        {
            "family": family,
            "candidates": len(found),
            "mean_s": round(float(np.mean(found)), 4),
            "median_s": round(float(np.median(found)), 4),
            "max_s": round(max(found), 4),
        }
        for family, found in seconds.items()
    ]
    for row in rows:
        print(row)
    provenance = {**collect("scripts/compile_throughput.py"), "cpu": platform.processor() or platform.machine()}
    write_json(options.out, {"unit": "core-seconds", "rows": rows, "provenance": provenance})


if __name__ == "__main__":
    main()
