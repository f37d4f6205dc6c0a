"""Choose a catalogue from a recording of a wide pool: greedy cover of the problems, several deep.

    outblas record --catalogue pool --out recordings/pool
    python scripts/choose_catalogue.py recordings/pool --kernels 90 --out src/outblas/data/catalogues/h200.json

Every round adds the kernel (both its launch options) that lowers the summed log of the best time most;
when nothing is gained any more, the kernels chosen so far are set aside and the cover starts again,
so that problems between the measured ones find a second and third choice.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from outblas.config import KernelConfig, config_name
from outblas.recording import Recording

#: A kernel that gains less (sum over problems of log time) does not earn a place in a cover.
LEAST_GAIN = 1e-3
#: A problem that no chosen kernel serves counts as this much slower than its best baseline.
UNSERVED = 1.5


def kernel_times(recording: Recording) -> tuple[list[KernelConfig], np.ndarray]:
    """Kernels (launch options off) and their times [P, K, 2] in microseconds, plain and with PDL; inf if unknown."""
    kernels = list(dict.fromkeys(replace(c, pdl=False) for c in recording.catalogue))
    times = np.full((len(recording.problems), len(kernels), 2), np.inf)
    where = {k: i for i, k in enumerate(kernels)}
    for column, config in enumerate(recording.catalogue):
        measured = recording.median_us[:, column]
        times[:, where[replace(config, pdl=False)], int(config.pdl)] = np.where(np.isfinite(measured), measured, np.inf)
    return kernels, times


def cover(times: np.ndarray, start: np.ndarray, taken: list[int], limit: int) -> list[int]:
    """Indices of kernels, best gain first, none of ``taken``."""
    best, chosen = start.copy(), []
    while len(chosen) < limit:
        gains = np.log(best[:, None, :] / np.minimum(best[:, None, :], times)).sum(axis=(0, 2))
        gains[taken + chosen] = -1.0
        pick = int(gains.argmax())
        if gains[pick] < LEAST_GAIN:
            break
        chosen.append(pick)
        best = np.minimum(best, times[:, pick])
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--kernels", type=int, default=90)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    recording = Recording.load(options.recording)
    kernels, times = kernel_times(recording)
    base = np.array([recording.best_baseline(p)[1] for p in recording.problems]) * UNSERVED
    start = np.repeat(base[:, None], 2, axis=1)
    chosen: list[int] = []
    while len(chosen) < min(options.kernels, len(kernels)):
        added = cover(times, start, chosen, options.kernels - len(chosen))
        if not added:
            break
        chosen += added
    names = [config_name(replace(kernels[i], pdl=pdl)) for i in chosen for pdl in (False, True)]
    data = {"format": 1, "gpu": recording.gpu.name, "chosen_by": str(recording.provenance), "candidates": names}
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{len(chosen)} kernels, {len(names)} candidates -> {options.out}")


if __name__ == "__main__":
    main()
