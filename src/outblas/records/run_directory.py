"""The directory of a run that can be resumed, with the files that every kind of run has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """Paths in a run's directory; nothing is made or checked."""

    path: Path

    @property
    def run(self) -> Path:
        """Return the path of the run's settings and provenance. A resumed run must have the same settings."""
        return self.path / "run.json"

    @property
    def store(self) -> Path:
        return self.path / "store.sqlite"

    @property
    def report(self) -> Path:
        return self.path / "report.html"
