"""The hash of a recording, by which a result names the measurements that answered."""

from __future__ import annotations

import hashlib
import json

import numpy as np

from outblas.core.config import config_name
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import CHOICE_CODES


def recording_sha(recording: Recording) -> str:
    """Return the SHA-256 of the matrix, 64 hex digits: problems, candidates, statuses, times, spreads and rounds.

    The choices count, too, if a problem had candidates of its own.
    """
    names = [[p.key for p in recording.problems], [config_name(c) for c in recording.catalogue]]
    digest = hashlib.sha256(json.dumps(names).encode())
    for array in (recording.status, recording.median_us, recording.spread, recording.rounds):
        digest.update(np.nan_to_num(array, nan=-1.0).tobytes())
    if (recording.chosen != CHOICE_CODES["catalogue"]).any():
        digest.update(recording.chosen.tobytes())
    return digest.hexdigest()
