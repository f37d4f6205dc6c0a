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
    """Of the cache directory, the folder of a training on these problems of a recording with these settings (JSON)."""
    names = [p.key for p in problems] + [config_name(c) for c in recording.catalogue]
    rows = [recording.row(p) for p in problems]
    measured = hashlib.sha256(recording.status[rows].tobytes() + recording.median_us[rows].tobytes()).hexdigest()
    text = json.dumps([names, measured, *about], sort_keys=True)
    return default_directory() / kind / hashlib.sha256(text.encode()).hexdigest()[:16]
