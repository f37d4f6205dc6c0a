"""benchmarks/llm_answers.py without a model: prompts, the holes of a kernel, and what a transcript replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages.study_blocks import answers_block

from outblas.core.errors import RecordError
from outblas.core.gpu_records import packaged_gpu
from outblas_lab.jail.offline_evaluators import CompileOnlyEvaluator
from outblas_lab.llm.answer import fenced
from outblas_lab.llm.evaluators import WithTemplates
from support.helpers import ROOT, module_of_file

H200 = packaged_gpu("h200")
LOAD = """for (int i = thread; i < BM * BK; i += THREADS) {
  const int row = i / BK, k = i % BK;
  a_tile[row * PITCH + k] = m0 + row < M && k0 + k < K ? A[(size_t)(m0 + row) * K + k0 + k] : 0;
  b_tile[row * PITCH + k] = n0 + row < N && k0 + k < K ? B[(size_t)(n0 + row) * K + k0 + k] : 0;
}"""
MULTIPLY = """for (int kk = 0; kk < BK; kk += 16) {
  for (int i = 0; i < 2; ++i) {
    const u16* at = a_tile + (warp_m + i * 16 + lane / 4) * PITCH + kk + 2 * (lane % 4);
    const u32 a[4] = {*(const u32*)at, *(const u32*)(at + 8 * PITCH), *(const u32*)(at + 8),
                      *(const u32*)(at + 8 * PITCH + 8)};
    for (int j = 0; j < 4; ++j) {
      const u16* bt = b_tile + (warp_n + j * 8 + lane / 4) * PITCH + kk + 2 * (lane % 4);
      mma_f32<BF16>(sums[i][j], a, *(const u32*)bt, *(const u32*)(bt + 8));
    }
  }
}"""
STORE = """for (int i = 0; i < 2; ++i)
  for (int j = 0; j < 4; ++j)
    for (int half = 0; half < 2; ++half) {
      const int row = m0 + warp_m + i * 16 + lane / 4 + 8 * half, column = n0 + warp_n + j * 8 + 2 * (lane % 4);
      const u32 pair = pack2<BF16>(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
      if (row < M && column < N) C[(size_t)row * N + column] = pair & 0xFFFF;
      if (row < M && column + 1 < N) C[(size_t)row * N + column + 1] = pair >> 16;
    }"""
FILLED = "".join(f"Here:\n```cuda\n{part}\n```\n" for part in (LOAD, MULTIPLY, STORE))


@pytest.fixture(name="bench")
def bench_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return module_of_file(ROOT / "benchmarks" / "llm_answers.py", monkeypatch)


@pytest.fixture(name="prompts")
def prompts_fixture(bench: Any) -> Any:
    return bench.Prompts(H200, None)


def test_problems_are_drawn_from_small_and_large_ones(bench: Any) -> None:
    drawn = bench.drawn_problems(20, 0)
    assert drawn == bench.drawn_problems(20, 0) != bench.drawn_problems(20, 1)
    assert len(set(drawn)) == 20 and {p.layout for p in drawn} == {"TN"}
    assert sum(p.flops < 1e9 for p in drawn) == 6 and sum(p.flops > 3e10 for p in drawn) == 6


@pytest.mark.parametrize("mode", ["knobs", "holes", "free"])
def test_aids_are_added_to_the_same_question(bench: Any, prompts: Any, mode: str) -> None:
    (problem,) = bench.drawn_problems(3, 0)[:1]
    bare, aided = (prompts.question(problem, mode, aid).messages[-1]["content"] for aid in bench.AIDS)
    assert f"M = {problem.m}" in bare and f"M = {problem.m}" in aided
    assert len(aided) > len(bare) + 500, "near kernels and lessons"
    assert ("The slower: " in aided) == (mode != "holes") and "The slower: " not in bare
    assert "$" not in bare


def test_filled_holes_make_a_kernel_that_compiles(bench: Any, prompts: Any) -> None:
    question = prompts.question(bench.drawn_problems(3, 0)[0], "holes", "bare")
    evaluator = WithTemplates(CompileOnlyEvaluator(H200), ())
    answer = bench.read(question, FILLED, "stop", H200)
    assert bench.judged(question, answer, evaluator) == ("compiled", "")
    wrong = bench.read(question, FILLED.replace("a_tile[row", "nothing[row"), "stop", H200)
    kind, words = bench.judged(question, wrong, evaluator)
    assert kind == "compile" and "nothing" in words
    assert bench.read(question, "```cuda\nx;\n```", "stop", H200).kind == "malformed"
    assert bench.read(question, "```cuda\nx;\n```", "length", H200).kind == "cut"


def test_another_kind_of_answer_is_malformed(bench: Any, prompts: Any) -> None:
    problem = bench.drawn_problems(3, 0)[0]
    knobs = '```json\n{"family": "sm90_wgmma_gemm", "bm": 64, "bn": 64}\n```'
    asked = {mode: prompts.question(problem, mode, "bare") for mode in ("knobs", "free")}
    assert bench.read(asked["knobs"], knobs, "stop", H200).kind == "candidate"
    assert bench.read(asked["free"], knobs, "stop", H200).kind == "malformed"


def test_a_copy_of_a_kernel_in_the_prompt_is_not_the_models_own(bench: Any, prompts: Any, tmp_path: Path) -> None:
    problem = bench.drawn_problems(3, 0)[0]
    out, evaluator = bench.Transcript(tmp_path / "answers.jsonl"), WithTemplates(CompileOnlyEvaluator(H200), ())
    for mode in ("free", "knobs"):
        question = prompts.question(problem, mode, "aided")
        blocks = [f"```{language}\n{body}\n```" for language, body in fenced(question.messages[-1]["content"])]
        copied = next(b for b in blocks if "outblas-launch" in b or (mode == "knobs" and '"family": "sm' in b))
        own = copied.replace("sum = 0.0f", "sum = 0.f")
        out.add({"row": "prompt", "prompt": question.key, "messages": list(question.messages)})
        bench.one_answer(question, 0, Scripted(copied), evaluator, prompts, out)
        if mode == "free":
            bench.one_answer(question, 1, Scripted(own), evaluator, prompts, out)
            continue
        changed = copied.replace('"group": 8', '"group": 4')
        assert changed != copied
        bench.one_answer(question, 1, Scripted(changed), evaluator, prompts, out)
    found = [
        (row["prompt"].split("/")[1], row["seed"], bench.knobs_changed(candidate, shown))
        for row, candidate, shown in bench.own_answers(out)
    ]
    assert found == [("free", 1, None), ("knobs", 1, 1)]


class Scripted:
    """A model whose answers are known."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.seen = [*texts], list[Any]()

    def ask(self, messages: Any, tokens: int, seed: int) -> dict[str, Any]:
        self.seen.append(messages)
        return {"text": self.texts.pop(0), "finish": "stop", "read": 9, "cached": 0, "written": 5}


def test_an_aided_answer_gets_a_second_turn_and_the_transcript_says_so(
    bench: Any, prompts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, evaluator = bench.Transcript(tmp_path / "answers.jsonl"), WithTemplates(CompileOnlyEvaluator(H200), ())
    out.begin({"weights": "w"})
    problem = bench.drawn_problems(3, 0)[0]
    model = Scripted("nothing", FILLED, "nothing")
    for aid in bench.AIDS:
        question = prompts.question(problem, "holes", aid)
        out.add({"row": "prompt", "prompt": question.key, "messages": list(question.messages)})
    bench.one_answer(prompts.question(problem, "holes", "aided"), 0, model, evaluator, prompts, out)
    bench.one_answer(prompts.question(problem, "holes", "bare"), 0, model, evaluator, prompts, out)
    again = bench.Transcript(out.path)
    found = [(row["turn"], row["last"], row["outcome"]) for row in again.of_kind("answer")]
    assert found == [(0, False, "malformed"), (1, True, "compiled"), (0, True, "malformed")]
    assert "not three blocks" in model.seen[1][-1]["content"] and model.seen[1][-2]["content"] == "nothing"
    with pytest.raises(RecordError, match="settings"):
        again.begin({"weights": "other"})
    capsys.readouterr()
    again.add(
        {"row": "verdict", "prompt": f"{problem.key}/holes/aided", "seed": 0, "turn": 1, "speedup": [2, 1.9, 2.1]}
    )
    bench.table(type("Arguments", (), {"out": out.path}))
    aided, bare, _ = capsys.readouterr().out.splitlines()
    assert aided.startswith("holes aided 1 answers: parses 1 (21% to 100%), compiles 1") and "faster 1" in aided
    assert bare.startswith("holes bare 1 answers: parses 0 (0% to 79%), compiles 0")
    first, second = json.loads(out.path.with_suffix(".json").read_text())["rows"]
    assert (first["best"], first["tokens"], first["unjudged"]) == (2, 10, 0) and second["best"] is None
    again.add(
        {"row": "judge", "provenance": {"gpu": "NVIDIA H200", "driver": "1", "date": "2026-01-01", "commit": "c"}}
    )
    again.rows[0]["settings"] |= {"model": "m", "problems": 1, "temperature": 0.7}
    again.path.write_text("".join(json.dumps(row) + "\n" for row in again.rows))
    bench.table(type("Arguments", (), {"out": out.path}))
    block = answers_block(out.path.with_suffix(".json"))
    assert "| three parts of a kernel | all | 1 | 1 (21% to 100%) |" in block and "| 2× | 0 | 10 |" in block
