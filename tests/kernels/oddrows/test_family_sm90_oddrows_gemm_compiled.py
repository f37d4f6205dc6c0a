"""The kernel family sm90_oddrows_gemm compiles without spills, and its machine code is what its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outblas.core.problem import Problem
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import make_source
from support.gpus.known import H200

pytest.importorskip("cuda.bindings")

from outblas.runtime.nvrtc import compile_source  # noqa: E402
from outblas.runtime.sass import check_static  # noqa: E402

pytestmark = pytest.mark.long

TN = Problem(513, 511, 4097)
NN = replace(TN, layout="NN", dtype="bf16")
FEW = replace(TN, m=13)
C = Sm90OddrowsConfig
#: Kernels whose registers are the most, in each way in which kernels differ.
SAMPLE: dict[str, tuple[Problem, Sm90OddrowsConfig]] = {
    "largest": (TN, C(128, 256, stages=4, consumers=2)),
    "largest_nn": (NN, C(128, 256, stages=4, consumers=2)),
    "tallest": (TN, C(256, 128, stages=4, consumers=2)),
    "deep_nn": (NN, C(128, 128, 128, 3, consumers=2)),
    "two_wide_ctas": (TN, C(64, 192, stages=3, min_blocks=2)),
    "three_ctas_nn": (NN, C(64, 64, stages=4, min_blocks=3)),
    "three_few_rows_nn": (replace(NN, m=13), C(64, 64, stages=5, a_rows=16, split_k=4, min_blocks=3)),
    "one_consumer_nn": (NN, C(64, 256, stages=5)),
    "three_ctas": (TN, C(64, 64, stages=4, min_blocks=3)),
    "two_ctas_nn": (NN, C(64, 128, stages=4, min_blocks=2)),
    "split": (TN, C(128, 256, stages=4, consumers=2, split_k=2)),
    "split_nn": (NN, C(128, 256, stages=4, consumers=2, split_k=2)),
    "few_rows": (FEW, C(64, 256, stages=5, a_rows=16, split_k=4)),
    "early_nn": (NN, C(128, 256, stages=4, consumers=2, pdl=True, early=True)),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_it_compiles_without_spills(name: str) -> None:
    problem, config = SAMPLE[name]
    assert why_illegal(problem, config, H200) is None
    source = make_source(problem, config)
    cubin = compile_source(source, cache=None)
    assert check_static(cubin.facts, source, cubin) is None
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.static_smem) == (0, 0, 0)
    # One load for each comb of A and of B, of B in NN for each 64 columns. Early loads of B are a loop of their own.
    loads_of_b = 8 * (config.bn // 64 if problem.layout == "NN" else 1) * (1 + config.early)
    assert cubin.facts.utmaldg == (8 + loads_of_b) * config.bk // 64
    assert cubin.facts.accumulators == ("fp32",)
