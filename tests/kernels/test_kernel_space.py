"""The enumerated space: its size and rule, and its legal members."""

from __future__ import annotations

import numpy as np
import pytest

from outblas.core.config import knob_schema
from outblas.core.problem import Problem
from outblas.kernels.catalogue import catalogue, with_launch
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.kernel_space import KernelSpace, kernel_space, one_knob_away, without_launch
from outblas.kernels.knobs import all_knobs
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool, pool_families
from support.gpus.known import H200

#: Families in the pool of the reference GPU.
OF_THE_POOL = {family.name for family in pool_families()}


def test_the_space_is_much_wider_than_the_pool_and_contains_it_and_the_catalogue() -> None:
    space = kernel_space()
    assert len(space.members) >= 20_000 > 10 * len(pool())
    assert len(set(space.members)) == len(space.members) == len(np.unique(space.vectors, axis=0))
    for config in (*pool(), *catalogue("h200")):
        assert space.place(config) is not None
    assert {config.family for config in space.members} == OF_THE_POOL


def test_every_knob_that_is_no_launch_option_varies_in_the_space() -> None:
    space = kernel_space()
    for name in OF_THE_POOL:
        family = FAMILIES[name]
        own = [config for config in space.members if config.family == name]
        for knob in knob_schema(family.config):
            values = {getattr(config, knob.name) for config in own}
            assert (len(values) == 1) == knob.launch_option, (name, knob.name)


def test_neighbours_differ_in_one_knob_and_in_no_launch_option() -> None:
    config = Sm80MmaConfig(64, 64, pdl=True)
    found = list(one_knob_away(config, all_knobs()))
    assert len(set(found)) == len(found)
    for near in found:
        ((name, _),) = set(near.knobs().items()) - set(config.knobs().items())
        assert name not in config.launch_knobs
    assert {c.split_k for c in found} > {1, 2, 4}


def test_launch_options_are_set_and_taken_off() -> None:
    plain = Sm90WgmmaConfig(64, 64)
    assert with_launch(plain, "plain") == plain
    assert with_launch(plain, "pdl") == plain.with_knobs(pdl=True)
    assert with_launch(plain, "weights") == plain.with_knobs(pdl=True, early=True)
    assert without_launch(with_launch(plain, "weights")) == plain and without_launch(plain) is plain
    direct = Sm80MmaConfig(64, 64, pdl=True, even=True)
    assert without_launch(direct) == Sm80MmaConfig(64, 64)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(16384, 16384, 64),
        Problem(7, 4096, 4100, "NN"),
        Problem(40, 4096, 65536),
        Problem(600_000, 64, 64),
        Problem(64, 64, 2000, "TN", "fp16", "fp16"),
    ],
    ids=lambda problem: problem.key,
)
def test_legal_members_are_those_of_the_predicate(problem: Problem) -> None:
    drawn = np.random.default_rng(1).permutation(len(kernel_space().members))[:1500]
    few = KernelSpace([kernel_space().members[i] for i in drawn], all_knobs())
    for launch in ("plain", "weights"):
        each = [why_illegal(problem, few.config(i, launch), H200) is None for i in range(len(few.members))]
        np.testing.assert_array_equal(few.legal(problem, H200, launch), each)
        assert any(each) and not all(each)
