"""A pool of real GPUs: each worker has one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.phase_times import sum_totals  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.records.store import Store  # noqa: E402
from outblas.runtime.device import gpu_count  # noqa: E402
from outblas.tune.agents.agent_registry import make_agent  # noqa: E402
from outblas.tune.tune import tune  # noqa: E402
from outblas_lab.pool.worker_plan import make_plan, open_pool  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_two_gpus_tune_together(tmp_path: Path, kind: str) -> None:
    if gpu_count() < 2:
        pytest.skip(f"needs two GPUs, here are {gpu_count()}")
    if kind == "ray":
        pytest.importorskip("ray")
        plan = make_plan("ray", count=2, ray_address="local")
    else:
        plan = make_plan("local", gpus=(0, 1))
    problems = [Problem(64 * m, 512, 1024) for m in range(1, 7)]
    with open_pool(plan) as pool, Store(tmp_path / "s.sqlite") as store:
        assert len(pool.workers) == 2 and pool.source == "cuda"
        library = tune(problems, make_agent("heuristic", 0, pool.gpu), 4, pool, store, "r")
        tried = list(store.evaluations("r"))
        assert pool.lost == 0 and len(pool.provenance("test")["workers"]) == 2
        gpus = [pool.accounts()[f"worker {index}: gpu"] for index in (0, 1)]
    assert all(gpu.seconds["start"] > 0 and gpu.counts["workers lost"] == 0 for gpu in gpus)
    counts = sum_totals(gpus).counts
    assert (counts["candidates"], counts["desks"], counts["chunks"]) == (len(tried), len(problems), len(problems))
    assert len(problems) <= counts["algorithms chosen"] <= 2 * len(problems)
    assert 0 < counts["kernels proved"] <= counts["kernels loaded"] <= len(tried)
    assert [row.problem for row in library.rows] == problems
    assert len(tried) == len({(e.problem, e.config) for e in tried}) == 4 * len(problems)
    assert sum(e.status is Status.PASSED for e in tried) >= 3 * len(problems), [e.detail for e in tried]
    assert all(row.baseline for row in library.rows)


def test_one_gpu_is_a_pool_too(tmp_path: Path) -> None:
    problems = [Problem(64, 512, 1024), Problem(128, 512, 1024)]
    with open_pool(make_plan("local", gpus=(0,))) as pool, Store(tmp_path / "s.sqlite") as store:
        library = tune(problems, make_agent("heuristic", 0, pool.gpu), 2, pool, store, "r")
        assert {e.status for e in store.evaluations("r")} == {Status.PASSED}
    assert [row.problem for row in library.rows] == problems
