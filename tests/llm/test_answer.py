from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from outblas.core.errors import ConfigError
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.llm.answer import read_answer
from outblas.llm.compact import describe, describe_offered, read_config, write_config
from support.gpus.known import H200
from support.llm_kernels import answer, config_answer, kernel

PROBLEM = Problem(512, 512, 512)


def read(text: str, finish: str = "stop", problem: Problem = PROBLEM) -> tuple[str, str, str]:
    found = read_answer(text, finish, problem, H200)
    assert (found.candidate is not None) == (found.kind == "candidate")
    return found.kind, found.answer, found.words


def test_a_free_kernel() -> None:
    found = read_answer(answer(kernel(3).text), "stop", PROBLEM, H200)
    assert found.kind == "candidate" and found.answer == "code" and found.candidate == kernel(3)


@pytest.mark.parametrize("mark", ["cuda", "cpp", "CUDA", "c++", "cu"])
def test_fences_of_either_kind(mark: str) -> None:
    text = kernel(1).text
    assert read(f"~~~{mark}\n{text}\n~~~")[0] == "candidate"
    assert read(f"````{mark} gemm.cu\n{text}\n// ```\n````\nDone.")[0] == "candidate"


def test_pieces_of_an_explanation_are_not_the_answer() -> None:
    text = f"First ```cuda\nint x;\n``` no.\n```cuda\nmma(a, b);\n```\n```json\n[1]\n```\n{answer(kernel(1).text)}"
    assert read(text)[0] == "candidate"


def test_the_same_kernel_twice_is_one() -> None:
    assert read(answer(kernel(1).text) * 2)[0] == "candidate"
    assert read(answer(kernel(1).text) + answer(kernel(2).text))[0] == "malformed"
    assert read(answer(kernel(1).text) + config_answer(family="sm80_mma_gemm", bm=64, bn=64))[0] == "malformed"


def test_knobs_that_are_left_out_are_at_their_defaults() -> None:
    found = read_answer(config_answer(family="sm80_mma_gemm", bm=64, bn=64), "stop", PROBLEM, H200)
    assert found.candidate == Sm80MmaConfig(64, 64) and found.answer == "config"


@pytest.mark.parametrize(
    "knobs, words",
    [
        ({"family": "sm80_mma_gemm", "bm": 64, "bn": 63}, "not legal"),
        ({"family": "sm80_mma_gemm", "bm": 64, "bn": 64, "turbo": True}, "turbo"),
        ({"family": "sm80_mma_gemm", "bm": "64", "bn": 64}, "type int"),
        ({"family": "sm80_mma_gemm", "bm": 64}, "bn"),
        ({"family": "sm80_mma_gemm", "bm": 64, "bn": 64, "wm": 0}, ""),
        ({"family": "sm80_mma_gemm", "bm": 64, "bn": 64, "bk": 0}, ""),
        ({"family": "sm80_mma_gemm", "bm": 64, "bn": 10**30}, ""),
        ({"family": "sm80_mma_gemm", "bm": 64, "bn": 64, "pdl": True}, "plain launches"),
        ({"family": "free", "text": "int x;"}, "unknown kernel family"),
        ({"family": ["x"]}, "unknown kernel family"),
    ],
)
def test_bad_knobs_are_told_why(knobs: dict, words: str) -> None:
    kind, kind_of_answer, said = read(config_answer(**knobs))
    assert (kind, kind_of_answer) == ("illegal", "config") and words in said and said


def test_what_breaks_the_contract_is_told_why() -> None:
    kind, of, words = read("```cuda\n__global__ void gemm() {}\n```")
    assert (kind, of) == ("contract", "code") and words
    other = Problem(512, 512, 512, acc="fp16")
    kind, _, words = read(answer(kernel(1).text), problem=other)
    assert kind == "contract" and "fp16" in words


@pytest.mark.parametrize(
    "text, finish, kind",
    [
        ("", "stop", "empty"),
        (" \n\t", "length", "empty"),
        ("I'm sorry, but I can't help with that.", "stop", "refusal"),
        ("I cannot assist with this request.", "stop", "refusal"),
        ("anything", "refusal", "refusal"),
        ("anything", "content_filter", "refusal"),
        ("Let me think about tiles.", "stop", "malformed"),
        ("```python\nprint(1)\n```", "stop", "malformed"),
        ("```cuda\nunfinished", "length", "cut"),
        ("```cuda\nunfinished", "stop", "malformed"),
        ("```json\n{]\n```", "stop", "malformed"),
        ("```json\n[]\n```", "stop", "illegal"),
        ('```json\n{"family": 1e999}\n```', "stop", "illegal"),
        ("```json\n" + "[" * 100_000 + "\n```", "stop", None),
    ],
)
def test_no_answer_is_an_outcome_of_its_own(text: str, finish: str, kind: str | None) -> None:
    found, _, _ = read(text, finish)
    assert found != "candidate" and kind in (None, found)


def test_an_apology_before_a_kernel_is_no_refusal() -> None:
    assert read(f"I'm sorry, I can't do better.\n{answer(kernel(1).text)}")[0] == "candidate"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["`" * 500_000, "```\n````\n" * 50_000, " " * 500_000 + "```", "```json\n" * 50_000])
def test_walls_of_fences_are_read_in_no_time(text: str) -> None:
    assert read(text)[0] in ("malformed", "illegal")


def test_knobs_of_any_size_are_refused_or_legal() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    knobs = {(family, f.name): f for family, known in FAMILIES.items() for f in fields(known.config)}
    values = st.sampled_from([-1, 0, 1, 2, 3, 7, 8, 16, 64, 128, 256, 10**6, 10**12, 2**64, True, "coop", "workspace"])

    @hypothesis.given(st.sampled_from(sorted(FAMILIES)), st.data())
    @hypothesis.settings(max_examples=150)
    def check(family: str, data: Any) -> None:
        names = [name for of, name in knobs if of == family]
        chosen = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=4))
        assert read(config_answer(family=family, **{"bm": 64, "bn": 64, **chosen}))[0] in ("candidate", "illegal")

    check()


def test_no_text_raises() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    marks = ["```", "cuda", "json", "\n", "{", "}", '"family"', ":", "outblas-launch", "/*", "*/", "[", "1e400"]
    pieces = st.sampled_from([*marks, "\0", "\ud800", "sm80_mma_gemm", kernel(1).text])
    texts = st.lists(pieces | st.text(max_size=5), max_size=12).map("".join)

    @hypothesis.given(texts, st.sampled_from(["stop", "length"]))
    @hypothesis.settings(max_examples=200)
    def check(text: str, finish: str) -> None:
        read(text, finish)

    check()


def test_the_compact_language_goes_both_ways() -> None:
    for config in candidates(PROBLEM, H200):
        short = write_config(config)
        assert read_config(json.loads(json.dumps(short))) == config
    with pytest.raises(ConfigError):
        read_config([])


def test_knobs_are_described_with_their_values() -> None:
    text = describe()
    assert "family sm90_wgmma_gemm" in text and "schedule: coop, stagger, pingpong, default coop" in text
    assert "pdl: false" not in text  # a launch option, not the kernel's
    assert "stages: pipeline depth" in text  # the meaning, from the record's own docstring
    offered = describe_offered([Sm80MmaConfig(64, 64), Sm80MmaConfig(128, 64, pdl=True)])
    assert "bm: 64, 128" in offered and "pdl: false, true" in offered and "sm90_wgmma_gemm" not in offered
