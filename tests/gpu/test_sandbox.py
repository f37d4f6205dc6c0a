"""The whole path on a real GPU, in the sandbox."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.core.rivals import RIVALS  # noqa: E402
from outblas.judge.bench_cell import Options  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.tune.live_evaluator import LiveEvaluator  # noqa: E402
from support.gpus.known import H200  # noqa: E402

pytestmark = pytest.mark.gpu
GOOD, ALSO, ILLEGAL = Sm90WgmmaConfig(64, 64), Sm80MmaConfig(64, 64), Sm90WgmmaConfig(64, 7)


def test_a_batch_is_evaluated_and_a_bad_config_is_only_a_status():
    problem, odd = Problem(256, 256, 512), Problem(127, 1001, 333)
    pairs = [(problem, GOOD), (problem, ILLEGAL), (problem, ALSO), (odd, GOOD)]
    with LiveEvaluator(0, Options(0, H200, level="cell", rounds=3)) as evaluator:
        found = {(e.problem, e.config): e for e in evaluator.evaluate(pairs)}
        assert set(found) == set(pairs)
        for config in (GOOD, ALSO):
            good = found[problem, config]
            assert good.status is Status.PASSED, good.detail
            assert good.timing.median_us > 0 and len(good.timing.samples_us) == 3
            assert set(RIVALS) <= set(good.baselines_us) and good.speedup.baseline in RIVALS
        assert found[problem, ILLEGAL].status is Status.ILLEGAL
        assert found[odd, GOOD].status is Status.ILLEGAL  # rows that TMA cannot read
        assert set(RIVALS) <= set(evaluator.baselines(odd))
        assert evaluator.baseline_detail(problem, "lt_auto").startswith("index=")
        assert evaluator.sandbox.lost == 0


def test_the_full_level_proves_on_representatives():
    with LiveEvaluator(0, Options(0, H200, level="full", rounds=3, baselines=("cublas",))) as evaluator:
        evaluator.start()
        warm = evaluator.accounts()["gpu"]
        assert warm.seconds["start"] > 0 and warm.counts == {"workers lost": 0}, "nothing was asked yet"
        (one,) = evaluator.evaluate([(Problem(256, 256, 256), GOOD)])
        assert one.status is Status.PASSED, one.detail
        assert "rules" in one.verdict.gates
        spent = evaluator.accounts()["gpu"]
        assert spent.counts == {
            "workers lost": 0,
            "desks": 1,
            "candidates": 1,
            "kernels loaded": 1,
            "kernels proved": 1,
            "chunks": 1,
        }
        assert {
            "start",
            "idle",
            "operands",
            "load",
            "prove",
            "cell",
            "capture",
            "time",
            "recheck",
        } <= spent.seconds.keys()
