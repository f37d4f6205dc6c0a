"""The values that each knob may have."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates, catalogue
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas_lab.pool.knobs import all_knobs, knobs_of
from support.gpus.known import H200

KNOBS = all_knobs()
#: Few tokens, few rows, odd rows, no tiling that fits, large, long K; layouts and types.
PROBLEMS = (
    *(Problem(8, 4096, 4096), Problem(24, 4096, 8192), Problem(33, 777, 100), Problem(200, 328, 64)),
    *(Problem(4096, 4096, 4096, "NN"), Problem(64, 64, 16384, "TN", "bf16"), Problem(512, 512, 512, acc="fp16")),
)


def pool_of(problem: Problem) -> Any:
    kernels = dict.fromkeys((*catalogue("pool"), *candidates(problem, H200, early=True, even=True)))
    early = (config.with_knobs(early=True) for config in kernels if config.pdl)
    return [c for c in dict.fromkeys((*kernels, *early)) if why_illegal(problem, c, H200) is None]


def test_every_field_of_every_record_is_a_knob_once() -> None:
    names = [knob.name for knob in KNOBS]
    assert len(set(names)) == len(names)
    for family, known in FAMILIES.items():
        assert {f.name for f in fields(known.config)} == {k.name for k in KNOBS if family in k.families}
    assert all(len(set(knob.values)) == len(knob.values) > 0 for knob in KNOBS)
    by_name = {knob.name: knob.values for knob in KNOBS}
    assert 0 not in by_name["stages"] and {1, 2, 16} <= set(by_name["split_k"]) and by_name["pdl"] == (False, True)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.key)
def test_every_offered_kernel_has_listed_values(problem: Problem) -> None:
    pool = pool_of(problem)
    assert set(candidates(problem, H200, early=True, even=True)) <= set(pool)
    for config in pool:
        assert all(getattr(config, knob.name) in knob.values for knob in KNOBS if config.family in knob.families)


def test_a_list_can_be_made_of_a_few_kernels() -> None:
    few = {knob.name: knob.values for knob in knobs_of([Sm90WgmmaConfig(64, 40, 64, 5), Sm80MmaConfig(16, 8)])}
    assert few["bn"] == (8, 40) and few["bm"] == (16, 64) and few["pdl"] == (False, True)
