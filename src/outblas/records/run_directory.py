"""The directory of a run that can be resumed: what every kind of run keeps there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps what.

    Attributes:
        path: the directory itself.
    """

    path: Path

    @property
    def run(self) -> Path:
        """What the run was asked for, with its provenance: a resumed run has the same settings."""
        return self.path / "run.json"

    @property
    def store(self) -> Path:
        """Every evaluation."""
        return self.path / "store.sqlite"

    @property
    def report(self) -> Path:
        return self.path / "report.html"
