"""The outcome of a finished weight in the run's store, so that a resumed run need not seek it again.

The agent takes about a third of a weight's time, on the host. A resumed run would ask it for all of that again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outblas.core.weight import WeightRange
from outblas.records.library import Library
from outblas.records.library_file import parse_content
from outblas.records.store import Store
from outblas.tune.agents.base import Agent
from outblas.tune.intervals.interval_search import FoundIntervals


class FinishedWeights:
    """The weights that a run has finished, with the settings on which their outcome depends.

    The settings are those of :meth:`outblas.tune.intervals.range_search.RangesRequest.settings`.

    Args:
        store: the run's store.
        run_id: name of the run in the store.
        agent: proposes the kernels. One that learns from what it observes is asked again for every weight.
    """

    def __init__(self, store: Store, run_id: str, agent: Agent) -> None:
        self._store, self._run_id = store, run_id
        self._is_of_use = type(agent).observe is Agent.observe

    def outcome(self, asked: WeightRange, settings: Mapping[str, Any]) -> tuple[FoundIntervals, int] | None:
        """Return what was found for a weight and the number of its measurements; None if it is not finished.

        Args:
            asked: the weight and its range.
            settings: an outcome of other settings is not of use.

        Raises:
            RecordError: the store cannot be read, or its outcome is damaged.
        """
        kept = self._store.outcome(self._run_id, asked.key) if self._is_of_use else None
        if kept is None or kept.get("settings") != settings:
            return None
        content = parse_content(str(kept.get("library")), f"of {asked.key} in {self._store.path}")
        found = FoundIntervals(tuple(content.intervals), tuple(content.rows), stopped=False)
        done = kept.get("measurements")
        return found, done if isinstance(done, int) else 0

    def add(self, asked: WeightRange, settings: Mapping[str, Any], gpu: str, found: FoundIntervals, done: int) -> None:
        """Keep what was found for a weight whose search was not stopped.

        Args:
            asked: the weight and its range.
            settings: those of the search.
            gpu: short name of the GPU.
            found: the outcome.
            done: number of measurements.

        Raises:
            RecordError: the store cannot be written. Earlier records are intact.
        """
        library = Library(gpu, found.rows, {}, found.intervals).to_bytes().decode()
        outcome = {"settings": dict(settings), "measurements": done, "library": library}
        self._store.add_outcome(self._run_id, asked.key, outcome)
