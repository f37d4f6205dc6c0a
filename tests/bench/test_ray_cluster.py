"""A pool joins a Ray cluster and counts its GPUs. Ray is a fake here."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.errors import DeviceError, UsageError
from outblas_lab.pool import worker_plan
from outblas_lab.pool.transport import EvaluateTask, EvaluatorSpec, Event, QuestionTask, WorkerAbout
from support.gpus.known import H200


class FakeRay:
    """A cluster of some GPUs, which notes how it was joined."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, gpus: int = 4, joined: bool = False, refuses: Exception | None = None) -> None:
        self.gpus, self.joined, self.refuses, self.asked, self.left = gpus, joined, refuses, [], 0

    def is_initialized(self) -> bool:
        return self.joined

    def init(self, **how: Any) -> None:
        self.asked.append(how)
        if self.refuses is not None:
            raise self.refuses

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": float(self.gpus)} if self.gpus else {}

    def shutdown(self) -> None:
        self.left += 1

    def get(self, word: Any) -> Any:
        return word

    def remote(self, kind: Any) -> Any:
        return SimpleNamespace(options=lambda **options: options)


def transport(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, size: int | None, gpus: int) -> Any:
    monkeypatch.setattr(worker_plan, "needed", lambda *names: ray)
    return worker_plan.RayTransport(EvaluatorSpec("support.pool_workers:Many"), size, gpus, "here")


@pytest.mark.parametrize(
    ("size", "gpus", "there", "workers"),
    [(None, 1, 4, 4), (None, 0, 4, 4), (3, 1, 4, 3), (4, 1, 4, 4), (3, 0, 4, 3), (9, 0, 4, 9), (2, 0, 0, 2)],
)
def test_a_worker_has_a_gpu_of_the_cluster_unless_it_needs_none(
    monkeypatch: pytest.MonkeyPatch, size: int | None, gpus: int, there: int, workers: int
) -> None:
    assert transport(monkeypatch, FakeRay(there), size, gpus).size == workers


@pytest.mark.parametrize(
    ("size", "there", "error", "words"),
    [(5, 4, UsageError, "at most 4"), (1, 0, DeviceError, "no GPU"), (None, 0, DeviceError, "no GPU")],
)
def test_more_workers_than_gpus_are_refused_and_the_cluster_is_left(
    monkeypatch: pytest.MonkeyPatch, size: int | None, there: int, error: type[Exception], words: str
) -> None:
    ray = FakeRay(there)
    with pytest.raises(error, match=words):
        transport(monkeypatch, ray, size, 1)
    assert ray.left == 1


@pytest.mark.parametrize("joined", [False, True])
def test_a_cluster_is_left_by_who_has_joined_it(monkeypatch: pytest.MonkeyPatch, joined: bool) -> None:
    ray = FakeRay(joined=joined)
    transport(monkeypatch, ray, 1, 1).close()
    assert ray.left == (0 if joined else 1)
    assert ray.asked == ([] if joined else [{"address": "here", "log_to_driver": False}])


@pytest.mark.parametrize("error", [ConnectionError("nobody\nhome"), RuntimeError("nobody"), ValueError("nobody")])
def test_a_cluster_that_does_not_answer_is_one_line(error: Exception) -> None:
    with pytest.raises(DeviceError, match=r"no Ray cluster responds at 'there' \(nobody\)"):
        worker_plan._join(FakeRay(refuses=error), "there")
    ray = FakeRay()
    assert worker_plan._join(ray, "local") is True
    assert ray.asked == [{"address": "local", "log_to_driver": False, "include_dashboard": False}]


def test_after_an_answer_the_actor_goes_on_and_after_its_last_word_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = transport(monkeypatch, FakeRay(), 2, 1)
    sent: list[Any] = []
    monkeypatch.setattr(made, "send", lambda worker, task: sent.append((worker, task)))
    for word, more in ((("answer", 7), [(1, None)]), (("end", None), []), (("ready", 3), []), (("error", 4), [])):
        made._words[word] = 1
        sent.clear()
        assert made._heard(word) == Event(1, *word) and sent == more


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (WorkerAbout(H200, "cuda:0", "here", "1"), "gpu"), (EvaluateTask(()), "pairs"),
        (QuestionTask("candidates"), "method"),
    ],
    ids=["about", "task", "question"],
)  # fmt: skip
def test_what_is_sent_does_not_change(record: Any, field: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(record, field, None)
