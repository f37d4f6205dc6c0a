"""Answers to small general tasks -> evaluations and rewards: a judge of answers for each kind of task.

Equal texts may be kernels of several tasks, so each kind has a run of its own in the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator
from outblas.core.gpu_records import reference_gpu
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.judge.bench_cell import Options
from outblas.records.store import Store
from outblas.runtime.device import gpu_of_device
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.jailed_evaluator import FreeOptions, JailedEvaluator
from outblas_lab.jail.offline_evaluators import CompileOnlyEvaluator
from outblas_lab.jail.small_tasks import PROVEN, TASK_NAMES, SmallTask
from outblas_lab.jail.task_worker import task_factory
from outblas_lab.llm.evaluators import COMPILE_ONLY, parse_evaluator
from outblas_lab.llm.train.answer_judge import AnswerJudge, JudgedAnswer
from outblas_lab.llm.train.answer_language import Language, Read
from outblas_lab.llm.train.rewards import RefusedAnswer, RewardParts

#: Largest M and K of a task: its reference is computed on the host.
MAX_EXTENT = 4096
#: Seconds without a word of a worker that count as a hang.
_STEP_S = 60.0


def tasks_on(problems: Sequence[Problem]) -> list[SmallTask]:
    """Return every kind of task with the M and K of each problem.

    Raises:
        UsageError: a problem is not of half precision, or is larger than :data:`MAX_EXTENT`.
    """
    odd = [problem.key for problem in problems if problem.dtype != "fp16"]
    if odd:
        raise UsageError(f"no task supports {odd[0]}", "dtype fp16, as in the reference results", "pass --dtype fp16")
    large = [problem.key for problem in problems if max(problem.m, problem.k) > MAX_EXTENT]
    if large:
        wrong = f"problem {large[0]} is too large for a task"
        expected = f"M and K up to {MAX_EXTENT}, because the reference is computed on the host"
        raise UsageError(wrong, expected, "pass smaller extents")
    return [SmallTask.of(name, problem) for problem in problems for name in TASK_NAMES]


class TaskEvaluator(Evaluator):
    """Evaluate kernels of one kind of task on a GPU, in jailed workers. The problem of a pair gives the extents."""

    def __init__(self, name: str, gpu_index: int) -> None:
        self._options = Options(gpu_index, gpu_of_device(gpu_index), baselines=())
        # A spare worker for each kind would hold memory that the kinds do not use at once.
        self._jailed = JailedEvaluator(self._options, _STEP_S, FreeOptions(prepare=None), task_factory(name))

    @property
    def gpu(self) -> Gpu:
        return self._options.gpu

    @property
    def source(self) -> str:
        return f"cuda:{self._options.gpu_index}"

    def evaluate(self, pairs: Iterable[tuple[Problem, Any]]) -> Iterator[Evaluation]:
        """Yield one evaluation per pair; pairs of one problem share workers if they follow each other."""
        for problem, group in groupby(pairs, key=lambda pair: pair[0]):
            for evaluation, _ in self._jailed.evaluate(problem, [kernel for _, kernel in group]):
                yield evaluation


def task_evaluator(name: str, device: str) -> Evaluator:
    """Return the evaluator of one kind of task.

    Raises:
        UsageError: the device is a file, as answers to tasks are not recorded, or several GPUs.
        DeviceError: the GPU does not exist.
    """
    place = parse_evaluator(device)
    if place.gpu_index is not None:
        return TaskEvaluator(name, place.gpu_index)
    if place.name != COMPILE_ONLY:
        raise UsageError(f"--device {device} cannot run general kernels", "compile, or cuda:N", "pass one of them")
    return CompileOnlyEvaluator(reference_gpu())


class TaskJudge:
    """Judge batches of answers to small tasks, as :class:`outblas_lab.llm.train.answer_judge.AnswerJudge` does.

    Args:
        evaluator_of: name of a task -> its evaluator; called once for each kind.
        language: reads the answers. A configuration of a kernel family is refused.
        batch_seconds: time limit of the kernels of one kind in a batch.
    """

    def __init__(
        self, evaluator_of: Callable[[str], Evaluator], language: Language, store: Store, batch_seconds: float
    ) -> None:
        self._evaluator_of, self._language = evaluator_of, FreeKernelsOnly(language)
        self._store, self._batch_seconds = store, batch_seconds
        self._judges: dict[str, AnswerJudge] = {}

    def judge(self, answers: Sequence[tuple[SmallTask, str]]) -> list[JudgedAnswer]:
        """Return one verdict per answer (task, text), in order.

        Raises:
            DeviceError: raised by an evaluator; its earlier answers are in the store.
            ToolchainMissing: raised by an evaluator; its earlier answers are in the store.
        """
        found: dict[int, JudgedAnswer] = {}
        for name in dict.fromkeys(task.name for task, _ in answers):
            mine = [(i, task.problem, text) for i, (task, text) in enumerate(answers) if task.name == name]
            judged = self._judge_of(name).judge([(problem, text) for _, problem, text in mine])
            found |= {i: _paid(one) for (i, _, _), one in zip(mine, judged, strict=True)}
        return [found[i] for i in range(len(answers))]

    def _judge_of(self, name: str) -> AnswerJudge:
        if name not in self._judges:
            evaluator = self._evaluator_of(name)
            run_id = f"{name}:{evaluator.source}"
            self._store.begin(run_id, {"task": name, "device": evaluator.source})
            self._judges[name] = AnswerJudge(evaluator, self._language, False, self._store, run_id, self._batch_seconds)
        return self._judges[name]


def _paid(judged: JudgedAnswer) -> JudgedAnswer:
    """Return a proven kernel's verdict as ``passed``, with the reward of a proof: a task asks for no time."""
    if (judged.outcome, judged.detail) != (Status.LEFT_OUT.value, PROVEN):
        return judged
    return replace(judged, outcome=Status.PASSED.value, parts=RewardParts())


class FreeKernelsOnly:
    """A language whose answers are free kernels; the others are refused."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self.name, self.max_tokens = language.name, language.max_tokens
        self.prompt, self.task_prompt = language.prompt, language.task_prompt
        self.write, self.generation = language.write, language.generation
        self.follow_up = language.follow_up

    def read(self, problem: Problem, answer: str) -> Read:
        found = self._language.read(problem, answer)
        if isinstance(found, (RefusedAnswer, FreeKernel)):
            return found
        return RefusedAnswer("a kernel configuration, but a CUDA kernel is required", "contract")
