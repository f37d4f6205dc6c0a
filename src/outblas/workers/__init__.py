"""Several workers behind one evaluator: processes of this machine, or actors of a Ray cluster, one per GPU.

``PoolEvaluator`` (pool.py) hands units of work (units.py) to workers through a ``Transport`` (transport.py; local.py,
ray_actors.py). In each worker lives a ``Host`` (host.py) with an evaluator of its own. ``plan.py`` makes a pool from
what the command line says. Only the driver writes the store. Each process accounts for its seconds (ledger.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outblas.workers.plan import WorkerPlan, make_plan, open_pool
    from outblas.workers.pool import PoolEvaluator

__all__ = ["PoolEvaluator", "WorkerPlan", "make_plan", "open_pool"]

#: Loaded at first use: what a single worker keeps of its seconds needs no pool.
_LATER = {"PoolEvaluator": "pool", "WorkerPlan": "plan", "make_plan": "plan", "open_pool": "plan"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"outblas.workers.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
