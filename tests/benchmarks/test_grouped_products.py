"""benchmarks/grouped_products.py: candidates that suit a problem, right results, rivals and the closing table."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.kernels.grouped.grouped_kernel import candidates
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from support.gpus.known import H200
from support.helpers import ROOT, module_of_file

torch = pytest.importorskip("torch")


@pytest.fixture(name="bench")
def bench_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return module_of_file(ROOT / "benchmarks" / "grouped_products.py", monkeypatch)


def test_every_problem_has_candidates_near_its_groups(bench: Any) -> None:
    for one in bench.moe_suite():
        heights = {config.bn for config in candidates(one.problem) if bench.suits(one, config)}
        assert heights, one.key
        assert max(heights) <= 16 or one.tokens >= 64, one.key
        assert min(heights) >= 48 or one.tokens < 16384, one.key


def test_a_wrong_element_of_a_group_is_found(bench: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    made = bench.OperandSet.__new__(bench.OperandSet)
    made.rows = [3, 0, 5]
    made.a = torch.randn(8, 64, generator=generator).bfloat16()
    made.w = torch.randn(3, 16, 64, generator=generator).bfloat16()
    begins = [0, *itertools.accumulate(made.rows)]
    parts = [made.a[b:e] @ made.w[g].T for g, (b, e) in enumerate(itertools.pairwise(begins))]
    made.c = torch.cat(parts)
    assert made.wrong() == ""
    made.c[4, 7] += 0.5
    assert made.wrong().startswith("group 2 of 5 rows is off")
    made.c[4, 7] = float("nan")
    assert made.wrong()


def test_the_suite_has_sixty_problems_half_of_them_by_zipf(bench: Any) -> None:
    suite = bench.moe_suite()
    assert len({one.key for one in suite}) == 60
    assert Counter(one.routing for one in suite) == {"uniform": 30, "zipf": 30}
    assert {one.problem.bias for one in suite if one.model == "gpt-oss-20b"} == {True}
    for one in suite:
        assert one.problem.columns == one.problem.n


def test_every_token_goes_to_different_experts(bench: Any) -> None:
    rows_of_groups, model = bench.rows_of_groups, bench.MODELS["deepseek-v2-lite"]
    for routing in ("uniform", "zipf"):
        rows = rows_of_groups(model, 200, routing, 7)
        assert sum(rows) == 200 * model.top and max(rows) <= 200
        assert rows == rows_of_groups(model, 200, routing, 7) != rows_of_groups(model, 200, routing, 8)
    uniform, zipf = (max(rows_of_groups(model, 2000, routing, 7)) for routing in ("uniform", "zipf"))
    assert zipf > 3 * uniform


def test_the_floor_counts_only_weights_that_are_hit(bench: Any) -> None:
    problem = GroupedProblem(128, 1536, 2048)
    one, all_groups = [8, *[0] * 127], [1] * 128
    few, many = (bench.floor_us(problem, rows, H200) for rows in (one, all_groups))
    assert many == pytest.approx(128 * 1536 * 2048 * 2 / (H200.hbm_tbs * 1e6), rel=0.02) and few < many / 100
    assert bench.floor_us(problem, [4096] * 128, H200) == pytest.approx(2e-6 * 128 * 4096 * 1536 * 2048 / H200.tflops)


@pytest.fixture(name="rivals")
def rivals_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("rivals.grouped_rivals")


def test_padded_rows_come_back_in_their_order(rivals: Any) -> None:
    rows = [3, 0, 5, 4]
    *begins, total = rivals.padded_begins(rows, 4)
    assert (begins, total) == ([0, 4, 4, 12], 16)
    places = rivals.row_places(rows, begins)
    assert places.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 12, 13, 14, 15]
    assert rivals.group_of_rows(rows).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 3, 3, 3, 3]
    a = torch.randn(12, 8)
    padded = a.new_zeros(total, 8)
    padded[places] = a
    assert torch.equal(padded[places], a) and not padded[[3, 9, 10, 11]].any()
    assert rivals.row_places(rows, [0, 8, 16, 24]).tolist()[3:8] == [16, 17, 18, 19, 20]


def test_the_masked_form_expects_a_multiple_of_16_rows_and_no_more_than_there_are(rivals: Any) -> None:
    assert rivals.expected_rows(512, 128, 40) == 16
    assert rivals.expected_rows(4096, 128, 80) == 32
    assert rivals.expected_rows(8, 128, 1) == 1


class StandIn:
    """DeepGEMM's module, in torch on the CPU, with an alignment of groups."""

    def __init__(self, fitting: int) -> None:
        self.alignment, self.fitting, self.used = 8, fitting, []

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return self.alignment

    def set_mk_alignment_for_contiguous_layout(self, rows: int) -> None:
        self.alignment = rows

    def get_theoretical_mk_alignment_for_contiguous_layout(self, total: int, groups: int) -> int:
        return self.fitting

    def m_grouped_bf16_gemm_nt_contiguous(self, a: Any, w: Any, output: Any, groups: Any) -> None:
        self.used.append(self.alignment)
        for tile in range(0, len(a), self.alignment):
            rows = slice(tile, tile + self.alignment)
            assert set(groups[rows].tolist()) <= {-1, int(groups[tile])}, "a tile has rows of one group"
            output[rows] = a[rows] @ w[groups[tile]].T

    def m_grouped_bf16_gemm_nt_masked(self, a: Any, w: Any, output: Any, rows: Any, expected: int) -> None:
        for group, count in enumerate(rows.tolist()):
            output[group, :count] = a[group, :count] @ w[group].T


@pytest.fixture(name="operands")
def operands_fixture() -> Any:
    rows, generator = [3, 0, 9, 1], torch.Generator().manual_seed(1)
    a = torch.randn(13, 16, generator=generator).bfloat16()
    w = torch.randn(4, 24, 16, generator=generator).bfloat16()
    return SimpleNamespace(rows=rows, a=a, w=w, c=torch.full((13, 24), 777.0).bfloat16())


@pytest.mark.parametrize(("fitting", "used"), [(4, 4), (16, 8), (0, 8)])
def test_deep_gemm_gives_the_rows_of_the_loop(
    rivals: Any, operands: Any, monkeypatch: pytest.MonkeyPatch, fitting: int, used: int
) -> None:
    module = StandIn(fitting)
    monkeypatch.setattr(rivals, "deep_gemm", lambda: module)
    loop = rivals.loop_call(None, operands).enqueue()
    for name in ("deep_gemm", "deep_gemm_masked"):
        call = rivals.RIVALS[name](None, operands)
        assert torch.allclose(call.rows(call.enqueue()), loop, rtol=2.0**-7, atol=2.0**-7), name
        assert call.note
    assert module.used == [used] and module.alignment == 8, "the alignment of others is as before"


def test_triton_gets_the_layers_config_and_a_token_for_each_row(
    bench: Any, rivals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, launched = [], []

    def config_of(*arguments: Any) -> dict[str, int]:
        asked.append(arguments)
        return {"BLOCK_SIZE_M": 16}

    blocks = (torch.zeros(1), torch.ones(1), torch.tensor([16]))
    module = SimpleNamespace(
        try_get_optimal_moe_config=config_of,
        get_moe_configs=lambda *_: None,
        _prepare_expert_assignment=lambda ids, *rest: asked.append((ids.tolist(), *rest)) or blocks,
        invoke_fused_moe_triton_kernel=lambda *tensors, **settings: launched.append((tensors, settings)),
        tl=SimpleNamespace(bfloat16="bf16"),
    )
    monkeypatch.setattr(rivals.importlib, "import_module", lambda name: module)
    one = bench.MoeProblem("mixtral-8x7b", "down", 2, "uniform")
    rows = [0, 1, 0, 2, 0, 0, 1, 0]
    operands = SimpleNamespace(rows=rows, a=torch.zeros(4, 32), w=torch.zeros(8, 24, 32), c=torch.zeros(4, 24))
    call = rivals.triton_call(one, operands)
    assert asked[0] == ((8, 2 * 14336, 4096), (8, 4096, 14336), 2, None, 2)
    assert asked[1] == ([[1], [3], [3], [6]], {"BLOCK_SIZE_M": 16}, 4, 1, 8, None)
    assert call.enqueue() is operands.c and call.note.startswith("default config")
    (((a, w, c), settings),) = launched
    assert a is operands.a and w is operands.w and c.shape == (4, 1, 24) and c.stride(1) == 24
    assert settings["top_k"] == 1 and settings["sorted_token_ids"] is blocks[0] and not settings["mul_routed_weight"]


def test_a_rival_that_raises_is_absent_and_one_that_is_wrong_has_no_graph(
    bench: Any, operands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'vllm'")

    def wrong(_: Any, each: Any) -> Any:
        return bench.RivalCall(lambda: each.c.zero_())

    made = bench.OperandSet.__new__(bench.OperandSet)
    made.__dict__.update(vars(operands))
    good = bench.RIVALS["loop"]
    monkeypatch.setattr(bench, "RIVALS", {"loop": good, "triton": missing, "deep_gemm": wrong})
    monkeypatch.setattr(bench, "graph_of", len)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    one = bench.MoeProblem("mixtral-8x7b", "down", 512, "uniform")
    found = bench.field_of(one, [made], ["loop", "triton", "deep_gemm"])
    assert found.graphs == {"loop": 1} and len(found.kept) == 1
    assert found.absent == {"triton": "ModuleNotFoundError: No module named 'vllm'"}
    assert found.wrong["deep_gemm"].startswith("group 0 of 3 rows is off")


def test_the_masked_form_is_for_few_tokens(bench: Any) -> None:
    few, many = (bench.MoeProblem("mixtral-8x7b", "down", tokens, "uniform") for tokens in (512, 4096))
    assert bench.rivals_of(few, ["torch", "deep_gemm_masked"]) == ["torch", "deep_gemm_masked"]
    assert bench.rivals_of(many, ["torch", "deep_gemm_masked"]) == ["torch"]


def test_ratios_name_the_fastest_rival_and_torch(bench: Any) -> None:
    assert bench.ratios_to_rivals(2.0, {"torch": 6.0, "triton": 3.0}) == {"speedup": 1.5, "over_torch": 3.0}
    assert bench.ratios_to_rivals(2.0, {"triton": 3.0}) == {"speedup": 1.5}
    assert bench.ratios_to_rivals(2.0, {}) == {}


def test_rivals_are_chosen_by_name(bench: Any) -> None:
    assert bench.chosen_names("torch,deep_gemm", bench.RIVALS, "rival") == ["torch", "deep_gemm"]
    with pytest.raises(bench.OutblasError, match="did you mean triton"):
        bench.chosen_names("torch,tritn", bench.RIVALS, "rival")


def test_the_summary_counts_lost_rows_and_lists_both_ends(bench: Any) -> None:
    def row(name: str, tokens: int, least: int, torch_ratio: float, fastest: float) -> dict[str, Any]:
        ratios = {"over_torch": torch_ratio, "speedup": fastest, "tflops": 700.4, "of_floor": 0.81}
        return {"problem": name, "tokens": tokens, "least_rows": least, **ratios}

    rows = [row("a", 8, 0, 2.0, 0.9), row("b", 8, 0, 0.5, 1.6), row("c", 4096, 300, 1.0, 1.0)]
    failed = {"problem": "d", "tokens": 4096, "least_rows": 400, "ours": None}
    lines = list(bench.summary([*rows, failed]))
    assert [line.split() for line in lines[1:4]] == [
        ["8", "2", "1.000", "1.200", "1", "1"],
        ["4096", "2", "1.000", "1.000", "0", "0"],
        ["all", "4", "1.000", "1.129", "1", "1"],
    ]
    assert lines[4:] == [
        "TFLOP/s, groups of 256 rows or more:",
        "  c: 700",
        "share of HBM bandwidth, 64 tokens or fewer, mean 0.810:",
        "  a: 0.81",
        "  b: 0.81",
    ]
    assert list(bench.summary([]))[1].split() == ["all", "0", "-", "-", "0", "0"]
