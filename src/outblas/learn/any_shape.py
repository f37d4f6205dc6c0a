"""Which kernels are offered for shapes that no library has: few, for every one of them is shipped and ranked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from outblas.config import KernelConfig, Sm80GemvConfig, launch_of
from outblas.library import Library
from outblas.model import rank
from outblas.problem import Problem
from outblas.recording import Recording
from outblas.roofline import H200
from outblas.second_search import worth_trying

#: Kernels by what they add to the recorded problems, by how often the library installs them, and by how often the
#: ranking model has them first where nothing was recorded: extents that are no multiples of 8.
BY_RECORDING, BY_LIBRARY, GEMVS, BY_MODEL = 80, 24, 24, 24
#: Random problems of which the ranking model is asked.
ASKED = 300


def general_kernels(name: str = "h200", seed: int = 0) -> tuple[KernelConfig, ...]:
    """The kernels without PDL that are offered for any shape: by the packaged recording, library and ranking model."""
    found = dict.fromkeys(_covering(Recording.load(name), BY_RECORDING))
    for wanted, among in (
        (BY_LIBRARY, (c for c in _installed(name) if not isinstance(c, Sm80GemvConfig))),
        (GEMVS, (c for c in _installed(name) if isinstance(c, Sm80GemvConfig))),
        (BY_MODEL, _first_choices(seed)),
    ):
        counts = Counter(c for c in among if c not in found)
        found.update(dict.fromkeys(config for config, _ in counts.most_common(wanted)))
    return tuple(found)


def _covering(recording: Recording, count: int) -> Iterator[KernelConfig]:
    """Greedily: what adds most to the mean log speed-up over torch.matmul that those before give."""
    plain = np.array([launch_of(c) == "plain" for c in recording.catalogue])
    timed = (recording.rounds > 0) & plain
    us = np.where(timed, recording.median_us, np.inf).astype(float)
    gain = np.maximum(np.log(recording.baselines["torch"].astype(float)[:, None] / us), 0)
    best = np.zeros(len(gain))
    for _ in range(count):
        index = int(np.maximum(gain, best[:, None]).mean(axis=0).argmax())
        best = np.maximum(best, gain[:, index])
        yield recording.catalogue[index]


def _installed(name: str) -> Iterator[KernelConfig]:
    for row in Library.packaged(name).rows:
        if row.plain is not None and row.problem.acc == "fp32":
            yield row.plain.config


def _first_choices(seed: int) -> Iterator[KernelConfig]:
    rng = random.Random(seed)
    for _ in range(ASKED):
        m, n, k = (round(2 ** rng.uniform(0, 13)) for _ in range(3))
        problem = Problem(m, n, k, rng.choice(("TN", "NN")))
        offered: Sequence[KernelConfig] = [c for c in worth_trying(problem, H200) if launch_of(c) == "plain"]
        yield offered[int(rank(problem, offered, H200)[0])]
