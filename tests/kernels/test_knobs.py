"""Configs as vectors of choices: there and back."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates, catalogue
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.knobs import FAMILY, all_knobs, knobs_of
from outblas.kernels.legality import why_illegal
from support.gpus.known import H200

KNOBS = all_knobs()
#: Few tokens, few rows, odd rows, no tiling that fits, large, long K; layouts and types.
PROBLEMS = (
    *(Problem(8, 4096, 4096), Problem(24, 4096, 8192), Problem(33, 777, 100), Problem(200, 328, 64)),
    *(Problem(4096, 4096, 4096, "NN"), Problem(64, 64, 16384, "TN", "bf16"), Problem(512, 512, 512, acc="fp16")),
)
vectors = st.tuples(*(st.integers(0, int(n) - 1) for n in KNOBS.nvec)).map(np.array)


@cache
def pool_of(problem: Problem) -> Any:
    kernels = dict.fromkeys((*catalogue("pool"), *candidates(problem, H200, early=True, even=True)))
    early = (config.with_knobs(early=True) for config in kernels if config.pdl)
    return [c for c in dict.fromkeys((*kernels, *early)) if why_illegal(problem, c, H200) is None]


def test_every_field_of_every_record_is_a_knob_once() -> None:
    names = [knob.name for knob in KNOBS.knobs]
    assert names[0] == FAMILY and len(set(names)) == len(names)
    for family, known in FAMILIES.items():
        assert {f.name for f in fields(known.config)} == {k.name for k in KNOBS.knobs[1:] if family in k.families}
    assert all(len(set(knob.values)) == len(knob.values) > 0 for knob in KNOBS.knobs)
    by_name = {knob.name: knob.values for knob in KNOBS.knobs}
    assert 0 not in by_name["stages"] and {1, 2, 16} <= set(by_name["split_k"]) and by_name["pdl"] == (False, True)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.key)
def test_whatever_is_offered_goes_there_and_back(problem: Problem) -> None:
    pool = pool_of(problem)
    assert set(candidates(problem, H200, early=True, even=True)) <= set(pool)
    for config in pool:
        vector = KNOBS.encode(config)
        assert KNOBS.decode(vector) == config and (vector >= 0).all() and (vector < KNOBS.nvec).all()
        assert (vector[~KNOBS.applies(config)] == 0).all()


@given(st.sampled_from(catalogue("pool")), st.data())
def test_a_knob_that_the_family_lacks_is_ignored(config: Any, data: st.DataObject) -> None:
    vector, other = KNOBS.encode(config), data.draw(vectors)
    assert KNOBS.decode(np.where(KNOBS.applies(config), vector, other)) == config


@given(vectors)
def test_every_vector_is_a_config_and_the_predicate_has_an_answer(vector: Any) -> None:
    config = KNOBS.decode(vector)
    again = KNOBS.encode(config)
    assert (again == np.where(KNOBS.applies(config), vector, 0)).all() and KNOBS.decode(again) == config
    for problem in PROBLEMS:
        assert why_illegal(problem, config, H200) != ""


@pytest.mark.parametrize(
    "action", [[0], KNOBS.nvec, -np.ones(len(KNOBS.nvec), int), np.zeros(len(KNOBS.nvec)), np.zeros((1, 31), int)]
)
def test_what_is_no_vector_of_choices_is_refused(action: Any) -> None:
    with pytest.raises(UsageError, match="action"):
        KNOBS.decode(action)


def test_a_value_that_is_not_in_the_list_is_named_and_a_list_can_be_made_of_it() -> None:
    config = Sm90WgmmaConfig(64, 40, 64, 5)
    with pytest.raises(UsageError, match="bn=40"):
        KNOBS.encode(config)
    few = knobs_of([config, Sm80MmaConfig(16, 8)])
    assert few.decode(few.encode(config)) == config
    assert next(k.values for k in few.knobs if k.name == "bn") == (8, 40)
    with pytest.raises(UsageError, match="bm=16"):
        knobs_of([config]).encode(Sm80GemvConfig(16, 40))
