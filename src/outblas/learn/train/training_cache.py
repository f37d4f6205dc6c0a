"""A cache of trainings, so that none is repeated on the same problems."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outblas.core.config import config_name
from outblas.core.problem import Problem
from outblas.records.recording import Recording
from outblas.runtime.cubin import default_directory


def training_cache_folder(kind: str, recording: Recording, problems: Sequence[Problem], *about: Any) -> Path:
    """Return the folder of a training in the cache directory: ``CACHE/KIND/`` and 16 hexadecimal digits. Nothing is
    created.

    The digits hash the problems in order, their recorded times, the catalogue and ``about``.

    Args:
        kind: name of the parent folder, e.g. ``"regressors"``.
        recording: the recording.
        problems: recorded problems.
        about: other settings that tell trainings apart; JSON values.

    Raises:
        UsageError: a problem was not recorded.
    """
    names = [p.key for p in problems] + [config_name(c) for c in recording.catalogue]
    rows = [recording.row(p) for p in problems]
    measured = hashlib.sha256(recording.status[rows].tobytes() + recording.median_us[rows].tobytes()).hexdigest()
    text = json.dumps([names, measured, *about], sort_keys=True)
    return default_directory() / kind / hashlib.sha256(text.encode()).hexdigest()[:16]
