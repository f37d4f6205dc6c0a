"""What a perfectly even hand-out of work could gain: the most that stream-K, which costs something, could bring.

    python scripts/wave_efficiency.py [RECORDING]

Of every recorded problem whose fastest kernel without PDL is one of wgmma: the work of the busiest SM over the
average SM's, where all tiles (times the parts of K) take as long. By layout and regime, geometric means.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.problem import Problem
from outblas.recording import Recording
from outblas.roofline import H200, regime
from outblas.stats import geomean

SMS = H200.sms


def unevenness(problem: Problem, config: Sm90WgmmaConfig, sms: int = SMS) -> float:
    """The busiest SM's tiles over the average SM's, at least 1."""
    tiles = -(-problem.m // config.bm) * -(-problem.n // config.bn) * config.split_k
    return -(-tiles // sms) * sms / tiles


def rows(recording: Recording) -> list[tuple[str, str, int, float, float]]:
    """(layout, regime, problems, mean unevenness, the worst)."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for problem in recording.problems:
        best = recording.best(problem, pdl=False)
        if best is not None and isinstance(best[0], Sm90WgmmaConfig):
            found[problem.layout, regime(problem, H200)].append(unevenness(problem, best[0]))
    return [(*key, len(all_), geomean(all_), max(all_)) for key, all_ in sorted(found.items())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", nargs="?", default="h200", help="name or folder of a recording")
    options = parser.parse_args()
    print(
        "| layout | regime | problems | even hand-out gains at most | the worst |\n| --- | --- | ---: | ---: | ---: |"
    )
    for layout, name, count, mean, worst in rows(Recording.load(options.recording)):
        print(f"| {layout} | {name} | {count} | {mean:.3f} | {worst:.2f} |")


if __name__ == "__main__":
    main()
