"""Measuring parts of a row worker without a GPU: module-level, so that a spawned worker can import them."""

from __future__ import annotations

import os
from typing import Any

from rivals.row_worker import RowRequest, serving


class FakeRows:
    """Answers at once; a kernel of CUDA-L2 ends the process on problems with 128 rows, and 256 rows always do."""

    def warm(self) -> None:
        """Nothing to start."""

    def measure(self, request: RowRequest) -> dict[str, Any]:
        rows = request.problem.m
        if rows == 256 or (rows == 128 and request.theirs is not None):
            os._exit(3)
        if rows == 512:
            return {"problem": request.problem.key, "us": float("nan")}
        return {
            "problem": request.problem.key,
            "ours": len(request.ours),
            "theirs": request.theirs is not None,
            "refused": dict(request.refused),
        }


def make_handler() -> Any:
    return serving(FakeRows())
