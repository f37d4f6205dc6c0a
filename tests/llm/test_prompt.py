from __future__ import annotations

import json
import re

import pytest

from outblas.core.config import config_to_json
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas_lab.custom.contract import _Device, _Host, _Map
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.offline_evaluators import CompileOnlyEvaluator
from outblas_lab.llm.answer import CODE, CONFIG
from outblas_lab.llm.archive import Entry
from outblas_lab.llm.feedback import OUTCOME_KINDS, clipped, feedback_text, kind_of, score_of
from outblas_lab.llm.prompt import (
    CUTS,
    FOLLOW_UPS,
    LISTED_HEADERS,
    Asked,
    answer_rules,
    first_prompt,
    follow_up,
    header_listing,
    notes_of,
    skeleton,
    tokens_of,
)
from support.gpus.known import H200
from support.helpers import ROOT
from support.llm_kernels import PROBLEM, failed, kernel, passed


def entry(number: int, score: float, us: float) -> Entry:
    return Entry(PROBLEM.key, 0, kernel(number).name, config_to_json(kernel(number)), score, us, number)


def prompt(problem: Problem = PROBLEM, parents: tuple[Entry, ...] = (), kinds: tuple[str, ...] = (CODE, CONFIG)) -> str:
    counters = {kernel(2).name: "registers 64"}
    return first_prompt(problem, H200, {"lt_auto": 4.0, "torch": 5.0}, 3.5, parents, counters, Asked(kinds))[-1][
        "content"
    ]


def test_a_prompt_holds_what_is_known() -> None:
    text = prompt(parents=(entry(1, 0.05, 3.9), entry(2, 0.1, 3.5)))
    for known in (
        "C[512, 512] = A[512, 512] @ B", "132 SMs", "outblas-launch", "family sm80_mma_gemm", "lt_auto 4.00 us",
        f"floor of this problem is {floor_us(PROBLEM, H200):.2f} us", kernel(1).text.strip(), "The faster: 3.50 us",
        "1.105x of the fastest baseline", "registers 64", "3.50x the floor",
    ):  # fmt: skip
        assert known in text, known
    assert text.index(kernel(1).text.strip()) < text.index(kernel(2).text.strip())
    assert "$" not in text.replace(kernel(1).text, "")


def test_a_limit_of_tokens_leaves_parts_out_in_order() -> None:
    marks = ("a near one", "rows of a C tile", "ptx/wgmma.cuh:", "as long as a launch", kernel(1).text.strip())
    parents, found, most = (entry(1, 0.05, 3.9), entry(2, 0.1, 3.5)), [], 10**6
    for _ in range(len(CUTS) + 1):
        messages = first_prompt(PROBLEM, H200, {}, 3.5, parents, {}, Asked(tokens=most), "a near one")
        text, most = messages[1]["content"], tokens_of(messages) - 1
        found.append([mark in text for mark in marks])
        assert most < 10**6 and "# A free kernel: the entry contract" in text and "    stages: 2, 3" in text
        assert ("outblas_launch(" in text) == ("ptx/wgmma.cuh:" in text) == (skeleton(PROBLEM) not in text)
    assert found == [[False] * n + [True] * (len(CUTS) - n) for n in range(len(CUTS) + 1)]
    with pytest.raises(UsageError, match=rf"--prompt-tokens {most} is too small; expected at least {most + 1} for"):
        first_prompt(PROBLEM, H200, {}, 3.5, parents, {}, Asked(tokens=most))


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize(("dtype", "acc"), [("fp16", "fp32"), ("fp16", "fp16"), ("bf16", "fp32")])
def test_the_kernel_of_short_prompts_meets_the_contract(layout: str, dtype: str, acc: str) -> None:
    problem = Problem(512, 512, 512, layout, dtype, acc)  # type: ignore[arg-type]
    shown = FreeKernel.parse(skeleton(problem))
    assert shown.launch.why_not(problem, H200) is None and "$" not in shown.text
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (extra compile)")
    (found,) = CompileOnlyEvaluator(H200).evaluate([(problem, shown)])
    assert found.status is Status.LEFT_OUT, found.detail


def test_dollars_in_a_kernel_are_left_alone() -> None:
    odd = Entry("p", 0, "k", {"family": "free", "text": "// $floor_us ${x} $$"}, 0.1, 1.0, 1)
    assert "// $floor_us ${x} $$" in prompt(parents=(odd,))


def test_only_what_is_asked_for_is_explained() -> None:
    assert "outblas-launch" not in prompt(kinds=(CONFIG,)) and "family sm80" not in prompt(kinds=(CODE,))
    assert "```json" not in prompt(kinds=(CODE,)).partition("# Your answer")[2]


@pytest.mark.parametrize("kind", FOLLOW_UPS)
def test_every_follow_up_asks_for_an_answer(kind: str) -> None:
    text = follow_up(kind, "the reason why", PROBLEM, H200, 3.5, 1000)
    assert "```cuda" in text and "$" not in text
    assert ("the reason why" in text) == (kind not in ("cut", "empty", "refusal"))


def test_only_kinds_that_nothing_can_follow_end_a_chain() -> None:
    assert set(OUTCOME_KINDS) - set(FOLLOW_UPS) == {"compiled", "unanswered"}


def test_the_functions_that_prompts_list_are_all_there_are() -> None:
    for name in LISTED_HEADERS:
        text = (ROOT / "src" / "outblas" / "kernels" / "cuda" / "ptx" / f"{name}.cuh").read_text()
        functions = re.findall(r"__device__ __forceinline__ \w+ (\w+)\(", text)
        assert functions or name == "types"
        for function in functions:
            assert re.search(rf"^  .*\b{function}\(", header_listing(), re.M), function


def test_the_contract_of_prompts_is_that_of_the_parser() -> None:
    """Both launch blocks parse, and between them and the words around them every key is named, and no other."""
    text = prompt(kinds=(CODE,))
    device = re.search(r"/\* outblas-launch\n.*?\*/", text, re.S)
    host = re.search(r"Its block is (\{.*?\})", text)
    assert device and host
    blocks = [device[0], f"/* outblas-launch {host[1]} */"]
    launches = [FreeKernel.parse(block + ' extern "C"').launch for block in blocks]
    assert [launch.form for launch in launches] == ["device", "host"]
    assert launches[0].why_not(PROBLEM, H200) is None and len(launches[0].tensor_maps) == 1
    keys = [set(json.loads(block[block.index("{") : -2])) for block in blocks]
    assert keys[0] | {"uses"} == set(_Device.model_fields) and keys[1] == set(_Host.model_fields)
    assert set(json.loads(device[0][20:-2])["tensor_maps"][0]) == set(_Map.model_fields)
    optional = re.search(r"([a-z_, ]+) and uses may be left out", " ".join(text.split()))
    assert optional
    left_out = {name.strip() for name in optional[1].split(",")} | {"uses"}
    assert left_out == {name for name, field in _Device.model_fields.items() if not field.is_required()}


def test_the_contract_of_the_documentation_is_that_of_the_parser() -> None:
    page = (ROOT / "docs" / "judge" / "free-kernels.md").read_text(encoding="utf-8")
    text = page.partition("## The contract")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| (both|device|) ?\|", text, re.M)
    named = {key for keys, _ in rows for key in re.findall(r"`(\w+)`", keys)}
    assert named == set(_Device.model_fields)
    both = {key for keys, form in rows if form != "device" for key in re.findall(r"`(\w+)`", keys)}
    assert both == set(_Host.model_fields)


TMA = """/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": [1, 1, 1], "block": [128, 1, 1],
 "tensor_maps": [{"operand": "A", "box": [64, 64], "swizzle": 128}]}
*/
HEADERS
extern "C" __global__ void gemm(const half* A, const half* B, half* C, int M, int N, int K, void* workspace,
                                const __grid_constant__ TensorMap map) {
  tma_prefetch(&map);
  u32 a[4] = {0, 0, 0, 0};
  float d[4] = {0, 0, 0, 0};
  mma_f32<OUTBLAS_BF16>(d, a, 0, 0);
  wgmma_fence();
  C[threadIdx.x] = __float2half(d[0]);
}
"""


def test_what_the_contract_says_of_headers_is_so() -> None:
    pytest.importorskip("cuda.bindings")
    headers = [f'#include "ptx/{name}.cuh"' for name in LISTED_HEADERS]
    text = TMA.replace("HEADERS", "\n".join(["#include <cuda_fp16.h>", *headers]))
    (found,) = CompileOnlyEvaluator(H200).evaluate([(PROBLEM, FreeKernel.parse(text))])
    assert found.status is Status.LEFT_OUT, found.log
    assert found.counters["hmma"] == 1


def test_notes_are_of_the_regime() -> None:
    assert notes_of(Problem(64, 64, 64), H200)[0] == "launch"
    assert notes_of(Problem(8192, 8192, 8192), H200)[0] == "compute"
    assert notes_of(Problem(16, 16384, 16384), H200) == ["memory", "few_rows"]
    assert notes_of(Problem(16384, 16, 16384), H200) == ["memory"], "its rows are many"
    assert "long_k" in notes_of(Problem(128, 128, 16384), H200)
    assert "tails" in notes_of(Problem(128 * 10, 128 * 14, 4096), H200)
    assert "ragged" in notes_of(Problem(100, 101, 103), H200)


def test_a_wrong_kernel_is_told_where_and_how_far() -> None:
    wrong = failed(kernel(1), Status.WRONG, "gate exact: 3 of 4096 elements", log="row 63, column 5: 7 for 8")
    assert kind_of(wrong, H200) == "wrong" and score_of(wrong) is None
    words = feedback_text(wrong, H200)
    assert "3 of 4096" in words and "17" in words and "row 63, column 5" in words and "static" in words


def test_faster_than_the_floor_is_a_cheat_until_proven_otherwise() -> None:
    us = floor_us(PROBLEM, H200) * 0.9
    swift = passed(kernel(1), us)
    assert kind_of(swift, H200) == "cheat" and "faster than the hardware" in feedback_text(swift, H200)
    assert kind_of(passed(kernel(1), 3.0), H200) == "proven"


def test_every_status_is_of_a_kind() -> None:
    for status in Status:
        if status is not Status.PASSED:
            assert kind_of(failed(kernel(1), status, "why"), H200) in OUTCOME_KINDS


def test_a_figure_without_baseline_has_no_score() -> None:
    timing = Timing("offline", (3.0,) * 3, 3.0, 0.0)
    alone = Evaluation(PROBLEM, kernel(1), Status.PASSED, timing=timing)
    assert score_of(alone) is None and kind_of(alone, H200) == "proven"
    zero = Evaluation(PROBLEM, kernel(1), Status.PASSED, timing=timing, speedup=Speedup("x", 1.0, 0.0, 2.0))
    assert score_of(zero) is None


def test_long_logs_keep_both_ends() -> None:
    text = clipped("a" * 5000 + "END", 300)
    assert len(text) < 400 and text.startswith("aaa") and text.endswith("END") and "left out" in text


@pytest.mark.parametrize(
    ("kinds", "words"),
    [((), "no kind of answer was passed; expected code, config or both"), ((CODE, "prose"), "prose")],
)
def test_an_answer_of_no_known_kind_is_not_asked_for(kinds: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        answer_rules(kinds)
