"""How a gate of the proof says no."""

from __future__ import annotations

from outblas.evaluation import Status


class Rejected(Exception):
    """A gate was not passed: the status that it means, one line, and |error| / bound where there is one."""

    def __init__(self, status: Status, detail: str, ratio: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.ratio = status, detail, ratio
