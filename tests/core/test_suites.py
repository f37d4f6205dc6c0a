"""The named suites: how many problems, which, and in which order."""

from __future__ import annotations

from collections import Counter

import pytest

from outblas.core.errors import ProblemError, UsageError
from outblas.core.roofline import regime
from outblas.core.suites import (
    GRID_EXTENTS,
    LLM_LAYERS,
    LLM_M,
    SUITES,
    TP_DEGREES,
    TP_MODELS,
    Table,
    capture_sizes,
    engine_weights,
    sample,
    suite,
)  # fmt: skip
from support.gpus.known import H200


def test_grid1000_is_the_whole_cube_once_each() -> None:
    problems = suite("grid1000")
    assert len(problems) == len(set(problems)) == 1000
    assert {p.m for p in problems} == {p.n for p in problems} == {p.k for p in problems} == set(GRID_EXTENTS)
    assert problems[0].mnk == "64_64_64"
    assert problems[-1].mnk == "16384_16384_16384"


def test_llm_has_every_layer_with_every_m_once() -> None:
    problems = suite("llm")
    layers = {nk for model in LLM_LAYERS.values() for nk in model}
    assert {(p.n, p.k) for p in problems} == layers
    assert len(problems) == len(set(problems)) == len(layers) * len(LLM_M)
    assert min(LLM_M) == 1
    assert max(LLM_M) == 16384


def test_llm_tp_has_the_part_of_each_weight_that_one_gpu_holds() -> None:
    problems = suite("llm_tp")
    weights = list(dict.fromkeys((p.n, p.k) for p in problems))
    assert len(weights) == 29 and len(problems) == len(set(problems)) == 29 * len(LLM_M)
    assert [p.m for p in problems[: len(LLM_M)]] == list(LLM_M)
    # Llama 3 70B on 2 and on 8 GPUs: qkv, gate/up, attention output, down
    assert {(5120, 8192), (28672, 8192), (8192, 4096), (8192, 14336)} <= set(weights)
    assert {(1280, 8192), (7168, 8192), (8192, 1024), (8192, 3584)} <= set(weights)


@pytest.mark.parametrize("name", TP_MODELS)
def test_each_split_weight_is_the_whole_one_over_its_gpus(name: str) -> None:
    weights = {(p.n, p.k) for p in suite("llm_tp")}
    qkv, output, gate_up, down = TP_MODELS[name]
    hidden, heads = output
    assert qkv == (heads + 2 * 8 * 128, hidden) and gate_up == (2 * down[1], hidden) and down[0] == hidden
    for degree in TP_DEGREES:
        for n, k in (qkv, gate_up):
            assert n % degree == 0 and (n // degree, k) in weights
        for n, k in (output, down):
            assert k % degree == 0 and (n, k // degree) in weights
        assert (qkv[0] // degree) % 128 == 0  # whole heads


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize(("dtype", "acc"), [("fp16", "fp32"), ("fp16", "fp16"), ("bf16", "fp32")])
def test_a_suite_is_what_was_asked_for_in_a_fixed_order(name: str, layout: str, dtype: str, acc: str) -> None:
    problems = suite(name, layout, dtype, acc)
    assert {(p.layout, p.dtype, p.acc) for p in problems} == {(layout, dtype, acc)}
    assert problems == suite(name, layout, dtype, acc)
    assert [p.mnk for p in problems] == [p.mnk for p in suite(name)]


@pytest.mark.parametrize("name", ["", "grid", "GRID1000", "grid1000 "])
def test_an_unknown_suite_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(UsageError, match="grid1000, llm, llm_tp or engine"):
        suite(name)


def test_an_unsupported_combination_is_refused() -> None:
    with pytest.raises(ProblemError):
        suite("grid1000", dtype="bf16", acc="fp16")
    with pytest.raises(ProblemError):
        suite("llm", layout="NT")


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("count", [1, 7, 100])
def test_a_sample_has_each_regimes_share_in_the_suites_order(name: str, count: int) -> None:
    problems = suite(name)
    drawn = sample(problems, count, gpu=H200)
    assert len(drawn) == len(set(drawn)) == count
    assert [p for p in problems if p in set(drawn)] == drawn
    whole, part = (Counter(regime(p, H200) for p in some) for some in (problems, drawn))
    for where, size in whole.items():
        assert abs(part[where] - count * size / len(problems)) < 1


def test_a_sample_is_the_same_every_time_and_in_every_layout() -> None:
    drawn = [p.mnk for p in sample(suite("grid1000"), 100, gpu=H200)]
    assert drawn == [p.mnk for p in sample(suite("grid1000"), 100, seed=0, gpu=H200)]
    assert drawn == [p.mnk for p in sample(suite("grid1000", "NN", "bf16"), 100, gpu=H200)]
    assert drawn != [p.mnk for p in sample(suite("grid1000"), 100, seed=1, gpu=H200)]
    assert sample(suite("llm"), len(suite("llm")), gpu=H200) == suite("llm")


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_sample_of_another_size_than_there_is_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match="1 to 1000;"):
        sample(suite("grid1000"), count, gpu=H200)


def test_a_table_is_named_in_four_words() -> None:
    table = Table.parse("LLM:nn:BF16:fp32")
    assert (str(table), table.stem) == ("llm:NN:bf16:fp32", "llm_nn_bf16_fp32")
    assert table.problems() == suite("llm", "NN", "bf16", "fp32") and Table.parse(str(table)) == table


@pytest.mark.parametrize("text", ["llm", "llm:NN:bf16", "llm:NN:bf16:fp32:x", "grid:TN:fp16:fp32"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Table.parse(text)
    with pytest.raises(ProblemError):
        Table.parse("llm:TN:bf16:fp16")


def test_suite_engine_has_the_sizes_of_the_engines_graphs() -> None:
    problems = suite("engine", "TN", "bf16")
    by_weight: dict[tuple[int, int], list[int]] = {}
    for problem in problems:
        by_weight.setdefault((problem.n, problem.k), []).append(problem.m)
    assert list(by_weight) == list(engine_weights()) and len(by_weight) >= 40 and len(problems) == len(set(problems))
    assert by_weight[6144, 4096] == capture_sizes() and by_weight[128256, 4096] == capture_sizes(128)


def test_the_sizes_are_vllms() -> None:
    """``_set_cudagraph_sizes`` of vLLM 0.26.0."""
    assert len(capture_sizes()) == 51 and capture_sizes()[:5] == [1, 2, 4, 8, 16] and capture_sizes()[-1] == 512
    assert capture_sizes(2) == [1, 2, 4] and capture_sizes(64)[-1] == 128 and capture_sizes(1024)[-1] == 512
