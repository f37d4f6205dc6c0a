"""The end of work that is done in steps."""

from __future__ import annotations

from typing import Any


def result_of(steps: Any) -> Any:
    """Run a generator to its end; return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
