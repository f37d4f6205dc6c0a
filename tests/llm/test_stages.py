"""Stages of training on a tiny random model, with the compiler as the reward: variance, resuming, stages in order."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import DeviceError, RecordError, ToolchainMissing, UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.files import lock_folder
from outblas.core.problem import Problem
from outblas.records.store import Store
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.train import base_models, stages
from outblas_lab.llm.train.base_models import starting_model
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.llm.train.rewards import RefusedAnswer
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.stages import train
from outblas_lab.llm.train.training_folder import RANDOM_TINY
from support.training.tiny_training import (
    PROBLEM,
    STEPS,
    answers,
    go,
    installed_fixture,  # noqa: F401
    lines,
    one_thread_fixture,  # noqa: F401
    same_weights,
    settings,
    train_and_kill,
)

#: A free kernel with a hole; it compiles if that is filled with a multiple of 16.
TEMPLATE = """/* outblas-launch
{"form": "device", "entry": "gemm", "acc": "fp32", "grid": ["ceil(N, 16)", "ceil(M, 16)", 1], "block": [16, 16, 1]} */
#include <cuda_fp16.h>
static_assert(%d %% 16 == 0, "whole tiles");
extern "C" __global__ void gemm(const half* A, const half* B, half* C, int M, int N, int K, void*) {
    int m = blockIdx.y * 16 + threadIdx.y, n = blockIdx.x * 16 + threadIdx.x;
    if (m >= M || n >= N) return;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum += __half2float(A[m * K + k]) * __half2float(B[n * K + k]);
    C[m * N + n] = __float2half(sum);
}
"""


class Holes(KnobWords):
    """Sentences of one word that fill the hole of a free kernel."""

    def __init__(self) -> None:
        super().__init__({"bm": (16, 24, 32, 40)})

    def read(self, problem: Problem, answer: str) -> Any:
        config = super().read(problem, answer)
        return config if isinstance(config, RefusedAnswer) else FreeKernel.parse(TEMPLATE % config.bm)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole")
    assert go(run).taken == STEPS
    return run


def test_a_random_model_gets_rewards_of_which_some_differ(whole: Path) -> None:
    log = lines(whole / "correctness" / "log.jsonl")
    assert [row["step"] for row in log] == list(range(1, STEPS + 1))
    assert sum(row["rewards"]["total"]["std"] > 0 for row in log) >= STEPS // 2
    for row in log:
        parts = sum(row["rewards"][name]["mean"] for name in ("format", "compiled", "static", "correct", "speed"))
        assert parts == pytest.approx(row["rewards"]["total"]["mean"], abs=1e-5)
        assert row["rewards"]["total"]["mean"] < 0  # compiled only: nothing is proven
        assert {"loss", "kl", "answer_tokens_mean"} <= set(row)
    outcomes = {row["outcome"] for row in lines(whole / "correctness" / "answers.jsonl")}
    assert {"illegal", "left_out"} <= outcomes


def test_free_kernels_are_compiled_and_paid_for_it(tmp_path: Path) -> None:
    train(tmp_path, settings(steps=2), Holes(), say=lambda text: None)
    rows = lines(tmp_path / "correctness" / "answers.jsonl")
    assert all(row["kernel"].startswith("free_") for row in rows)
    paid = {row["answer"]: (row["outcome"], row["parts"]["compiled"]) for row in rows}
    assert len(paid) > 1
    for text, found in paid.items():
        compiles = int(text.partition("=")[2]) % 16 == 0
        assert found == (("left_out", 0.0) if compiles else ("compile_error", -0.25))


def test_a_kernel_is_evaluated_once_in_a_run(whole: Path) -> None:
    with Store(whole / "store.sqlite") as store:
        (run,) = store.runs()
        names = {row["kernel"] for row in lines(whole / "correctness" / "answers.jsonl")}
        assert run.evaluations == len(names) == len(store.recorded_pairs(run.run_id))


def test_the_trained_model_loads_and_differs_from_the_base(whole: Path) -> None:
    from transformers import AutoTokenizer

    final = whole / "correctness" / "final"
    assert AutoTokenizer.from_pretrained(final).convert_tokens_to_ids("bm=64") > 0
    assert not same_weights(whole / "base", final)


def test_killed_in_between_and_resumed_it_is_the_same_training(whole: Path, tmp_path: Path) -> None:
    train_and_kill(tmp_path, "correctness")
    assert not (tmp_path / "correctness" / "final").exists()
    with pytest.raises(UsageError, match="--resume"):
        go(tmp_path)
    resumed = go(tmp_path, resume=True)
    assert resumed.steps == STEPS and 0 < resumed.taken < STEPS
    assert [row["step"] for row in lines(tmp_path / "correctness" / "log.jsonl")] == list(range(1, STEPS + 1))
    assert answers(tmp_path) == answers(whole)
    assert same_weights(tmp_path / "correctness" / "final", whole / "correctness" / "final")
    with Store(tmp_path / "store.sqlite") as store:
        (run,) = store.runs()
        assert run.evaluations == len(store.recorded_pairs(run.run_id))  # nothing was evaluated again
    assert go(tmp_path, resume=True).taken == 0


def test_a_gpu_that_is_lost_ends_the_training_which_can_be_resumed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = stages.evaluator_of

    @contextlib.contextmanager
    def losing(device: str, proof: str) -> Iterator[Any]:
        with usual(device, proof) as evaluator:
            ask = evaluator.evaluate

            def evaluate(pairs: Iterable[Any]) -> Iterator[Evaluation]:
                if (tmp_path / "correctness" / "checkpoint-2").exists():
                    raise DeviceError("the GPU is gone", "a GPU", "run the command again with --resume")
                yield from ask(pairs)

            monkeypatch.setattr(evaluator, "evaluate", evaluate)
            yield evaluator

    with monkeypatch.context() as patch:
        patch.setattr(stages, "evaluator_of", losing)
        with pytest.raises(DeviceError, match="gone"):
            go(tmp_path)
    assert go(tmp_path, resume=True).steps == STEPS
    assert answers(tmp_path) == answers(whole)


def test_stages_go_on_from_each_other_and_a_stage_may_be_prolonged(tmp_path: Path) -> None:
    archive = tmp_path / "archive.jsonl"
    taught = ["bm=128 bn=128 stages=4 consumers=2", "bm=64 bn=128 stages=4 consumers=1"]
    archive.write_text("".join(json.dumps({"problem": "512_512_512", "answer": text}) + "\n" for text in taught))
    run = tmp_path / "run"
    supervised = {"stage": "supervised", "archive": str(archive), "lr": 0.02}
    assert go(run, **supervised, steps=8, save_every=8).steps == 8
    assert go(run, resume=True, **supervised, steps=12, save_every=8).taken == 4
    losses = [row["loss"] for row in lines(run / "supervised" / "log.jsonl")]
    assert len(losses) == 12 and losses[-1] < 0.5 * losses[0]
    assert starting_model(run, "correctness", RANDOM_TINY) == str(run / "supervised" / "final")
    go(run, steps=1, lora=4)
    assert all("bn=128 stages=4" in text for _, text in answers(run))  # what both that it was taught have
    assert starting_model(run, "speed", RANDOM_TINY) == str(run / "correctness" / "final")
    with pytest.raises(UsageError, match="unknown stage 'sped'; .*did you mean speed"):
        starting_model(run, "sped", RANDOM_TINY)
    with pytest.raises(UsageError, match="--lora"):
        go(run, stage="speed", steps=1)
    with pytest.raises(UsageError, match="--lora 8 does not match .* a LoRA adapter of rank 4; expected --lora 4"):
        go(run, stage="speed", steps=1, lora=8)
    go(run, stage="speed", steps=1, lora=4)
    assert (run / "speed" / "final" / "adapter_config.json").exists()


def test_the_settings_name_the_language_that_is_trained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the language is 'knobs', but the settings specify 'cuda'"):
        go(tmp_path / "run", language="cuda")
    assert not (tmp_path / "run").exists()


def test_answers_that_cannot_be_shared_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="micro"):
        go(tmp_path, micro_batch=3)


def test_a_model_that_is_none(tmp_path: Path) -> None:
    missing = TrainSettings(str(tmp_path / "nothing"), (PROBLEM,), language="knobs", cpu=True)
    with pytest.raises(UsageError, match="cannot be loaded"):
        train(tmp_path, missing, KnobWords(), say=lambda text: None)


def test_an_archive_that_teaches_nothing_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UsageError, match="no training data"):
        go(tmp_path / "run", stage="supervised", archive=str(tmp_path / "empty.jsonl"))
    assert not (tmp_path / "run").exists()


def test_two_trainings_in_one_run_are_refused(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(RecordError, match="in use by another process"):
        go(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".driver.lock"}


def test_what_is_not_installed_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_models, "_NEEDED", (*base_models._NEEDED, "no_such_package"))
    with pytest.raises(ToolchainMissing, match="no_such_package"):
        go(tmp_path / "run")
    assert not (tmp_path / "run").exists()
