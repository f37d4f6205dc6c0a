"""The stage of small general kernels on the tiny model, proved by a stand-in on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.records.store import Store
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.offline_evaluators import CompileOnlyEvaluator
from outblas_lab.jail.small_tasks import TASK_NAMES, SmallTask, TaskRun, prove_task, task_evaluation
from outblas_lab.llm.train import stages
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.llm.train.languages import CudaAnswers
from outblas_lab.llm.train.rewards import RefusedAnswer
from outblas_lab.llm.train.stages import train
from outblas_lab.llm.train.task_judge import FreeKernelsOnly, TaskJudge, task_evaluator, tasks_on
from support.gpus.known import H200
from support.llm_kernels import answer, config_answer, kernel
from support.training.tiny_training import (
    PROBLEM,
    go,
    installed_fixture,  # noqa: F401
    lines,
    one_thread_fixture,  # noqa: F401
    settings,
)  # fmt: skip

COPY = """/* outblas-launch
{"form": "device", "entry": "copy", "acc": "fp32", "grid": ["ceil(M * K, 256)", 1, 1], "block": [256, 1, 1]} */
#include <cuda_fp16.h>
extern "C" __global__ void copy(const half* A, const half* B, half* C, int M, int N, int K, void*) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < M * K) C[i] = A[i + MISTAKE];
}
"""


class Copies(KnobWords):
    """Sentences of one word: a copy that is right if the word's number is a multiple of 16."""

    def __init__(self) -> None:
        super().__init__({"bm": (16, 24, 32, 40)})

    def task_prompt(self, task: SmallTask) -> str:
        return self.prompt(task.problem)

    def read(self, problem: Problem, answer: str) -> Any:
        config = super().read(problem, answer)
        if isinstance(config, RefusedAnswer):
            return config
        return FreeKernel.parse(COPY.replace("MISTAKE", f"{config.bm % 16} * {config.bm}"))


class OnTheCpu:
    """A stand-in for the GPU: it knows by the text what a kernel does, and proves that against the task's reference."""

    gpu, source = H200, "cpu"

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0

    def evaluate(self, pairs: Iterable[tuple[Problem, Any]]) -> Iterator[Evaluation]:
        for problem, candidate in pairs:
            self.asked += 1
            right = "A[i + 0" in candidate.text

            def run(problem: Problem, a: Any, b: Any, poison: float, right: bool = right) -> TaskRun:
                return TaskRun(a.reshape(-1)[: problem.m * problem.n] + (0 if right else 1), a, b)

            verdict = prove_task([SmallTask.of(self.name, problem)], run)
            yield task_evaluation(problem, candidate, verdict)


def test_the_tiny_model_is_trained_on_proofs_of_general_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "task_evaluator", lambda name, device: OnTheCpu(name))
    small = {"stage": "general", "steps": 3, "prompts": 2, "group": 4}
    train(tmp_path, settings(**small), Copies(), say=lambda text: None)
    rows = lines(tmp_path / "general" / "answers.jsonl")
    assert len(rows) == 24 and {row["problem"] for row in rows} <= {f"{name}_512_512" for name in TASK_NAMES}
    copies = [row for row in rows if row["problem"] == "copy_512_512"]
    for row in rows:
        right = row["problem"] == "copy_512_512" and int(row["answer"].partition("=")[2]) % 16 == 0
        assert row["outcome"] == ("passed" if right else "wrong")
        assert (row["parts"]["total"] == 0.0) is right and row["parents"] == []
    assert copies or len({row["problem"] for row in rows}) > 1
    with Store(tmp_path / "tasks.sqlite") as store:
        runs = {run.run_id: run.evaluations for run in store.runs()}
    assert set(runs) == {f"{row['problem'].removesuffix('_512_512')}:cpu" for row in rows}
    assert not (tmp_path / "store.sqlite").exists()  # whose kernels are products


def test_equal_texts_are_judged_for_each_task(tmp_path: Path) -> None:
    made: dict[str, OnTheCpu] = {}
    with Store(tmp_path / "tasks.sqlite") as store:
        judge = TaskJudge(lambda name: made.setdefault(name, OnTheCpu(name)), Copies(), store, 60.0)
        tasks = [SmallTask(name, 8, 8) for name in ("copy", "softmax", "copy")]
        verdicts = judge.judge([(task, "bm=16") for task in tasks])
        assert [v.outcome for v in verdicts] == ["passed", "wrong", "passed"]
        assert verdicts[0].name == verdicts[1].name and verdicts[0].parts is not None
        assert [one.asked for one in made.values()] == [1, 1]


def test_a_configuration_is_no_answer_to_a_task() -> None:
    language = FreeKernelsOnly(CudaAnswers(H200))
    refused = language.read(PROBLEM, config_answer(family="sm80_mma_gemm", bm=64, bn=64))
    assert isinstance(refused, RefusedAnswer) and refused.kind == "contract"
    assert language.read(PROBLEM, answer(kernel(1).text)) == kernel(1)


@pytest.mark.parametrize("name", TASK_NAMES)
def test_a_prompt_says_the_task_and_the_contract(name: str) -> None:
    task = SmallTask(name, 512, 384)
    system, user = CudaAnswers(H200).task_prompt(task)
    assert task.says in user["content"] and "M = 512, K = 384" in user["content"]
    assert "outblas-launch" in user["content"] and "```cuda" in user["content"] and "```json" not in user["content"]
    assert "Nothing is timed" in system["content"] and "$" not in user["content"] + system["content"]


def test_without_a_gpu_kernels_of_tasks_are_compiled() -> None:
    evaluator = task_evaluator("copy", "compile")
    assert isinstance(evaluator, CompileOnlyEvaluator)
    text = FreeKernel.parse(COPY.replace("MISTAKE", "0"))
    (found,) = evaluator.evaluate([(SmallTask("copy", 512, 384).problem, text)])
    assert found.status is Status.LEFT_OUT, found.log


def test_what_the_stage_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--language cuda"):
        go(tmp_path, stage="general")
    (tmp_path / "file.jsonl").write_text("")
    with pytest.raises(UsageError, match="compile, or cuda:N"):
        task_evaluator("copy", str(tmp_path / "file.jsonl"))
    with pytest.raises(UsageError, match="fp16"):
        tasks_on([Problem(512, 512, 512, dtype="bf16")])
    with pytest.raises(UsageError, match="M and K up to 4096"):
        tasks_on([Problem(512, 8192, 512), Problem(512, 512, 8192)])
