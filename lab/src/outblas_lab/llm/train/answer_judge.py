"""Answers of a model -> evaluations and reward parts: each kernel judged once per run, a batch within a time limit.

The evaluator of a training (:func:`evaluator_of`) is ``compile``, ``cuda:0``, several GPUs as ``cuda:0,1``, a file of
recorded free kernels, or ``replay:h200``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Union, get_args

from outblas.core.config import Candidate, config_name, config_to_json
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.evaluator import Evaluator, closing_evaluations
from outblas.core.problem import Problem
from outblas.core.rivals import RIVALS
from outblas.judge.gates import ProofLevel
from outblas.records.store import Store
from outblas_lab.jail.plausibility import is_below_floor
from outblas_lab.llm.evaluators import open_chosen_evaluator, parse_evaluator
from outblas_lab.llm.feedback import feedback_text, kind_of
from outblas_lab.llm.train.answer_language import Language
from outblas_lab.llm.train.rewards import RefusedAnswer, RewardParts, reward_parts
from outblas_lab.recordings.recording import Recording, find_recordings
from outblas_lab.recordings.replay import LenientReplay

#: What may have been the machine's fault (memory that the training holds, say): asked again by a resumed run.
_ASKED_AGAIN = (Status.LAUNCH_ERROR,)
_Key = tuple[str, str]
#: Prefix of the device that replays a recording.
_REPLAY = "replay:"


@dataclass(frozen=True)
class JudgedAnswer:
    """A judged answer, as :meth:`AnswerJudge.judge` returns it.

    Attributes:
        name: canonical name of the candidate, empty for a refused answer.
        outcome: a status such as ``passed`` or ``wrong``, or ``refused:<kind>`` such as ``refused:empty``. A kernel
            faster than its problem's floor is ``rule_broken``. It is ``unjudged`` if the batch ran out of time.
        speedup: lower bound of the speed-up of a proven kernel that was timed beside a baseline; else None.
        us: median time of a timed kernel, microseconds; else None.
        candidate: the candidate as JSON values; None for a refused or an unjudged answer.
        kind: kind of outcome, of :data:`outblas_lab.llm.feedback.OUTCOME_KINDS`; "" for an unjudged answer.
    """

    name: str
    outcome: str
    detail: str = ""
    parts: RewardParts | None = None
    speedup: float | None = None
    us: float | None = None
    candidate: dict[str, Any] | None = field(default=None, repr=False)
    kind: str = ""
    words: str = field(default="", repr=False)


class AnswerJudge:
    """Judge batches of answers with ``judge(answers)``. The constructor evaluates nothing. It is no context manager.

    Args:
        store: store of evaluations under ``run_id``; None: none is kept on disk. A kernel is evaluated once per run,
            except that ``launch_error`` in the store is tried again.
        batch_seconds: after this time no new candidate begins, and the rest stays unjudged. A candidate in progress
            ends within the sandbox's own limits.
        clock: time in seconds; tests replace it.
    """

    def __init__(
        self, evaluator: Evaluator, language: Language, timed: bool, store: Store | None = None,
        run_id: str = "train-llm", batch_seconds: float = 600.0, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._evaluator, self._language, self._timed = evaluator, language, timed
        self._store, self._run_id = store, run_id
        self._batch_seconds, self._clock = batch_seconds, clock
        self._known: dict[_Key, Evaluation] = {}
        self._read: set[str] = set()
        #: Candidates that the evaluator was asked for, by this process.
        self.evaluated = 0

    def judge(self, answers: Sequence[tuple[Problem, str]]) -> list[JudgedAnswer]:
        """Return a list of one verdict per answer, in order.

        Equal kernels of a problem are evaluated once, also over several calls. No verdict is an error: a refused answer
        gets ``refused:<kind>``, one that was out of time ``unjudged``. A later call may judge that one.

        Raises:
            DeviceError: raised by the evaluator; its earlier answers are in the store.
            ToolchainMissing: raised by the evaluator; its earlier answers are in the store.
        """
        read = [(problem, self._language.read(problem, text)) for problem, text in answers]
        wanted = {_key(p, c): (p, c) for p, c in read if not isinstance(c, RefusedAnswer)}
        for problem in {p for p, _ in wanted.values()}:
            if self._store is None or problem.key in self._read:
                continue
            self._read.add(problem.key)
            for config, evaluation in self._store.recorded(self._run_id, problem, profiled=False).items():
                if evaluation.status not in _ASKED_AGAIN:
                    self._known.setdefault(_key(problem, config), evaluation)
        missing = [pair for key, pair in wanted.items() if key not in self._known]
        for evaluation in self._within_time(sorted(missing, key=lambda pair: (pair[0].key, pair[1].family))):
            self._known[_key(evaluation.problem, evaluation.config)] = evaluation
            if self._store is not None:
                self._store.append(self._run_id, evaluation)
        return [self._judged(problem, found) for problem, found in read]

    def _within_time(self, pairs: list[tuple[Problem, Candidate]]) -> Iterator[Evaluation]:
        if not pairs:
            return
        until = self._clock() + self._batch_seconds
        with closing_evaluations(self._evaluator.evaluate(pairs)) as answers:
            for evaluation in answers:
                self.evaluated += 1
                yield evaluation
                if self._clock() > until:
                    return

    def _judged(self, problem: Problem, found: Union[Candidate, RefusedAnswer]) -> JudgedAnswer:
        gpu = self._evaluator.gpu
        if isinstance(found, RefusedAnswer):
            paid = reward_parts(found, self._timed, gpu)
            return JudgedAnswer("", f"refused:{found.kind}", found.reason, paid, kind=found.kind, words=found.reason)
        key = _key(problem, found)
        evaluation = self._known.get(key)
        if evaluation is None:
            return JudgedAnswer(key[1], "unjudged", f"the batch exceeded its {self._batch_seconds:g} s")
        paid = reward_parts(evaluation, self._timed, gpu)
        kind, words = kind_of(evaluation, gpu), feedback_text(evaluation, gpu)
        if is_below_floor(evaluation, gpu):
            why = "faster than the floor of its problem"
            return JudgedAnswer(key[1], Status.RULE_BROKEN.value, why, paid, kind=kind, words=words)
        low = None if evaluation.speedup is None else evaluation.speedup.low
        us = None if evaluation.timing is None else evaluation.timing.median_us
        outcome, values = evaluation.status.value, config_to_json(found)
        return JudgedAnswer(key[1], outcome, evaluation.detail, paid, low, us, values, kind, words)


def _key(problem: Problem, candidate: Candidate) -> _Key:
    return problem.key, config_name(candidate)


def check_device(device: str) -> None:
    """Check the ``--device`` of a training and return None; a file is not read.

    Raises:
        UsageError: it is none of those that :func:`evaluator_of` opens.
        DeviceError: the GPU does not exist.
    """
    if device.startswith(_REPLAY):
        find_recordings(device.removeprefix(_REPLAY))
    else:
        parse_evaluator(device)


@contextmanager
def evaluator_of(device: str, proof: str = "full") -> Iterator[Evaluator]:
    """Open the evaluator of ``--device``; it is closed at the end of the context.

    It is a context manager: ``with evaluator_of("compile") as evaluator:``. A GPU's worker starts at once, so that the
    first candidate does not pay for imports and a CUDA context.

    Args:
        device: ``compile``, ``cuda:<index>``, ``cuda:<index>,<index>`` for several GPUs, the path of a recording of
            free kernels, or ``replay:<name or folder>`` for a recording of template kernels.
        proof: ``full`` or ``cell``, see :class:`outblas.judge.bench_cell.Options`. It counts on a GPU only.

    Raises:
        UsageError: the device is none of these, or ``proof`` is another word.
        DeviceError: the GPU does not exist.
        RecordError: the file is no recording.
    """
    if proof not in get_args(ProofLevel):
        raise UsageError(f"unknown --proof {proof!r}", " or ".join(get_args(ProofLevel)), "pass one of them")
    if device.startswith(_REPLAY):
        yield LenientReplay(Recording.load(device.removeprefix(_REPLAY)))
        return
    place = parse_evaluator(device)
    if place.workers is not None:
        from outblas.tune.judged_workers import Judging

        judging = Judging(proof, RIVALS)  # type: ignore[arg-type]  # checked above
        place = replace(place, workers=place.workers.judged(judging))
    if place.gpu_index is None:
        with open_chosen_evaluator(place) as evaluator:
            yield evaluator
        return
    from outblas.judge.bench_cell import Options
    from outblas.runtime.device import gpu_of_device
    from outblas.tune.live_evaluator import LiveEvaluator
    from outblas_lab.jail.jailed_evaluator import FreeOptions

    index = place.gpu_index
    options = Options(index, gpu_of_device(index), level=proof, baselines=RIVALS)  # type: ignore[arg-type]
    with LiveEvaluator(index, options, free=FreeOptions()) as live:
        live.start()
        yield live
