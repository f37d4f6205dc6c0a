"""A live comparison on a real GPU: a few agents on two small problems."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from outblas.records.store import Store  # noqa: E402
from outblas.runtime.device import Device  # noqa: E402
from outblas.search.live_compare import live_run  # noqa: E402
from outblas.search.live_compare.live_result import read_live  # noqa: E402
from outblas.search.live_compare.live_run import LiveRequest, LiveSettings, run_live  # noqa: E402
from outblas.search.live_compare.unseen_problems import unseen_problems  # noqa: E402

pytestmark = pytest.mark.gpu


def test_agents_share_measurements_and_choices_are_judged_against_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = lambda count, *how: [p for p in unseen_problems(20, *how) if p.flops < 1e10][:count]  # noqa: E731
    monkeypatch.setattr(live_run, "unseen_problems", small)
    out = tmp_path / "live.parquet"
    settings = LiveSettings(("random-legal", "heuristic", "ppo"), "catalogue", False, (2, 4), seeds=2, problems=2)
    request = LiveRequest(settings, Device(gpu_index=0), (0,), out, "test", gpu_seconds=600)
    said: list[str] = []
    assert run_live(request, say=said.append) == 0, said
    result = read_live(out)
    assert len(result.problems) == 2 and not result.meta["rehearsal"] and result.meta["totals"]["gpu_s"] > 0
    # With two measurements an agent may have asked for kernels only that the compiler spills.
    assert [row for row in result.rows if not row["found"] and row["budget"] == 4] == [], said
    assert [row for row in result.rows if not row["low"] <= row["speedup"] <= row["high"]] == []
    assert {row["baseline"] for row in result.rows} <= {"torch", "cublas", "lt_heuristic", "lt_auto"}
    with Store(f"{out}.sqlite") as store:
        pairs = [(e.problem, e.config) for e in store.evaluations()]
    assert len(pairs) == len(set(pairs)) == result.meta["totals"]["kernels"]
