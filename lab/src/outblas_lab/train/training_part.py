"""Recorded problems of one GPU, of which a training takes one part or more; the cache of trainings on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import config_name
from outblas.runtime.cubin import default_directory
from outblas_lab.recordings.recording import TrainingPart
from outblas_lab.train.policy import input_names

#: Share of the (N, K) that is set apart, to judge by what is built on a regressor.
HELD_BACK_SHARE = 0.1


def split_parts(parts: Sequence[TrainingPart], seed: int) -> tuple[list[TrainingPart], list[TrainingPart]]:
    """Split the problems by (N, K) into those to learn from and those to judge by: (learn, check).

    All problems of an (N, K) stay together, on all GPUs. A tenth of the (N, K) is to judge by, at least one. If there
    is one (N, K) only, both lists have all problems. Orders are kept, and parts without a problem are left out.

    Args:
        parts: parts with at least one problem in all.
    """
    families = sorted({(p.n, p.k) for part in parts for p in part.problems})
    count = max(1, round(HELD_BACK_SHARE * len(families)))
    apart = {families[i] for i in np.random.default_rng(seed).permutation(len(families))[:count]}
    learn, check = (
        [
            TrainingPart(part.recording, kept)
            for part in parts
            if (kept := tuple(p for p in part.problems if ((p.n, p.k) in apart) == judged))
        ]
        for judged in (False, True)
    )
    return (learn, check) if learn else (check, check)


def training_cache_folder(kind: str, parts: Sequence[TrainingPart], *about: Any) -> Path:
    """Return a training's cache folder, ``CACHE/KIND/`` and 16 hexadecimal digits. Nothing is created.

    The digits hash the names of a policy's inputs and ``about``. Of each part they hash the problems in order, their
    recorded times, the candidates and the GPU's figures.

    Args:
        kind: name of the parent folder, e.g. ``"regressors"``.
        parts: recorded problems of the training.
        about: other settings that tell trainings apart; JSON values.

    Raises:
        UsageError: a problem was not recorded.
    """
    text = json.dumps([input_names(), [_identity(part) for part in parts], *about], sort_keys=True)
    return default_directory() / kind / hashlib.sha256(text.encode()).hexdigest()[:16]


def _identity(part: TrainingPart) -> list[Any]:
    """Return problems, candidates, figures of the GPU and the hash of the times of a part, as JSON values."""
    recording = part.recording
    rows = [recording.row(p) for p in part.problems]
    measured = hashlib.sha256(recording.status[rows].tobytes() + recording.median_us[rows].tobytes()).hexdigest()
    names = [p.key for p in part.problems] + [config_name(c) for c in recording.catalogue]
    return [names, asdict(recording.gpu), measured]
