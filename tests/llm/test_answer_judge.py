"""The judge: each kernel is evaluated once per run, in time; answers without candidates; stored evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outblas.core.config import config_name
from outblas.core.errors import DeviceError, RecordError, UsageError
from outblas.core.evaluation import Evaluation, Speedup, Status, Timing
from outblas.core.problem import Problem
from outblas.core.roofline import floor_us
from outblas.records.store import Store
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.llm.train import training_folder
from outblas_lab.llm.train.answer_judge import AnswerJudge, evaluator_of
from outblas_lab.llm.train.dataset import completion_text, prompt_messages, prompt_rows, supervised_rows
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.llm.train.languages import CudaAnswers, language_of
from outblas_lab.llm.train.reward_functions import RewardFunctions
from outblas_lab.llm.train.rewards import RefusedAnswer
from outblas_lab.llm.train.settings import TrainSettings, claim_folder
from outblas_lab.llm.train.training_folder import drop_later_lines, last_checkpoint, publish_folder
from support.free_fixture import host_text
from support.gpus.known import H200

PROBLEM = Problem(512, 512, 512)
FAST, SLOW = "bm=128 bn=128 stages=4 consumers=2", "bm=64 bn=32 stages=2 consumers=1"
#: Two consumers cannot share a tile of 64 rows.
ILLEGAL = "bm=64 bn=256 stages=4 consumers=2"


class Scripted:
    """An evaluator whose answers a test orders; counts what it is asked."""

    gpu, source = H200, "scripted"

    def __init__(self, us: float = 5.0, fail_after: int | None = None) -> None:
        self.us, self.fail_after = us, fail_after
        self.asked: list[str] = []
        self.closed = 0
        self.statuses: dict[str, Status] = {}

    def evaluate(self, pairs: Iterable[tuple[Problem, Any]]) -> Iterator[Evaluation]:
        try:
            for problem, config in pairs:
                if self.fail_after is not None and len(self.asked) >= self.fail_after:
                    raise DeviceError("the GPU is gone", "a GPU", "resume")
                self.asked.append(config_name(config))
                status = self.statuses.get(config_name(config), Status.PASSED)
                timing = Timing("offline", (self.us,), self.us, 0.0) if status is Status.PASSED else None
                found = Speedup("torch", 1.2, 1.1, 1.3) if status is Status.PASSED else None
                yield Evaluation(problem, config, status, timing=timing, speedup=found)
        finally:
            self.closed += 1


def name_of(sentence: str) -> str:
    return config_name(KnobWords().read(PROBLEM, sentence))


def test_a_kernel_is_evaluated_once_per_group_and_once_per_run(tmp_path: Path) -> None:
    first = Scripted()
    with Store(tmp_path / "s.sqlite") as store:
        judge = AnswerJudge(first, KnobWords(), True, store)
        found = judge.judge([(PROBLEM, FAST), (PROBLEM, SLOW), (PROBLEM, f"  {FAST} ")])
        judge.judge([(PROBLEM, SLOW)])
    assert first.asked == [name_of(FAST), name_of(SLOW)]
    assert [j.name for j in found] == [name_of(FAST), name_of(SLOW), name_of(FAST)]
    assert found[0].parts == found[2].parts and found[0].speedup == 1.1
    again = Scripted()
    with Store(tmp_path / "s.sqlite") as store:
        resumed = AnswerJudge(again, KnobWords(), True, store).judge([(PROBLEM, FAST)])
    assert again.asked == [] and resumed == [found[0]]


def test_what_may_have_been_the_machines_fault_is_asked_again_by_a_resumed_run(tmp_path: Path) -> None:
    broken = Scripted()
    broken.statuses[name_of(FAST)] = Status.LAUNCH_ERROR
    with Store(tmp_path / "s.sqlite") as store:
        assert AnswerJudge(broken, KnobWords(), True, store).judge([(PROBLEM, FAST)])[0].outcome == "launch_error"
    mended = Scripted()
    with Store(tmp_path / "s.sqlite") as store:
        assert AnswerJudge(mended, KnobWords(), True, store).judge([(PROBLEM, FAST)])[0].outcome == "passed"
    assert mended.asked == [name_of(FAST)]


def test_what_no_candidate_is_costs_no_evaluation() -> None:
    evaluator = Scripted()
    for text in ("", "bm=64", "I am sorry", f"{FAST} bm=64", "bm=65 bn=32 stages=2 consumers=1"):
        (found,) = AnswerJudge(evaluator, KnobWords(), True).judge([(PROBLEM, text)])
        assert found.outcome == "refused:malformed" and found.parts is not None and found.parts.format < 0
    assert evaluator.asked == []


def test_a_batch_out_of_time_leaves_the_rest_unjudged_and_ends_the_evaluators_work() -> None:
    seconds = iter([0.0, 1.0, 11.0, 12.0])
    evaluator = Scripted()
    judge = AnswerJudge(evaluator, KnobWords(), True, batch_seconds=10.0, clock=lambda: next(seconds))
    third = "bm=256 bn=32 stages=2 consumers=2"
    found = judge.judge([(PROBLEM, FAST), (PROBLEM, SLOW), (PROBLEM, third)])
    assert [j.outcome for j in found] == ["passed", "passed", "unjudged"]
    assert found[2].parts is None and evaluator.closed == 1


def test_what_was_answered_before_the_gpu_was_lost_is_stored(tmp_path: Path) -> None:
    with Store(tmp_path / "s.sqlite") as store:
        judge = AnswerJudge(Scripted(fail_after=1), KnobWords(), True, store)
        with pytest.raises(DeviceError):
            judge.judge([(PROBLEM, FAST), (PROBLEM, SLOW)])
        assert [config_name(e.config) for e in store.evaluations()] == [name_of(FAST)]


def test_a_time_below_the_floor_is_called_a_broken_rule() -> None:
    (found,) = AnswerJudge(Scripted(us=floor_us(PROBLEM, H200) / 2), KnobWords(), True).judge([(PROBLEM, FAST)])
    assert found.outcome == "rule_broken" and found.parts is not None and found.parts.total < -1
    assert found.speedup is None


def test_reward_functions_agree_with_each_other_and_write_every_answer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate (pip install './lab[train-llm]')")
    evaluator = Scripted()
    evaluator.statuses[name_of(SLOW)] = Status.WRONG
    log = tmp_path / "answers.jsonl"
    rewards = RewardFunctions(AnswerJudge(evaluator, KnobWords(), True), (PROBLEM,), 2, log=log)
    learned, *others = rewards.functions()
    told = {"completions": [FAST, SLOW], "problem": [0, 0]}
    assert learned(**told) == rewards.learned() == [2.0, -2.0]
    logged = {f.__name__: f(**told) for f in others}
    assert list(logged) == ["format", "compiled", "static", "correct", "speed", "total"]
    assert logged["total"] == pytest.approx([sum(logged[n][i] for n in list(logged)[:-1]) for i in range(2)])
    assert rewards.weights() == [1.0] + [0.0] * 6
    assert rewards.best == 1.1
    assert len(log.read_text().splitlines()) == 2 and '"wrong"' in log.read_text()


def test_only_what_passed_counts_as_the_best() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate (pip install './lab[train-llm]')")
    rewards = RewardFunctions(AnswerJudge(Scripted(us=floor_us(PROBLEM, H200) / 2), KnobWords(), True), (PROBLEM,), 2)
    rewards.functions()[0](completions=[FAST, SLOW], problem=[0, 0])
    assert rewards.best is None


def test_compile_answers_illegal_compiled_and_broken() -> None:
    text = (
        '/* outblas-launch {"form": "device", "entry": "gemm", "acc": "fp32", "grid": [1, 1, 1], '
        '"block": [32, 1, 1]} */\n#include <cuda_fp16.h>\nextern "C" __global__ void gemm(const half* A, '
        "const half* B, half* C, int M, int N, int K, void* w) { C[0] = A[0] BROKEN }"
    )
    good, odd = KnobWords().read(PROBLEM, SLOW), KnobWords().read(PROBLEM, ILLEGAL)
    pairs = [(PROBLEM, good), (PROBLEM, odd), (PROBLEM, FreeKernel.parse(text))]
    with evaluator_of("compile") as evaluator:
        found = {config_name(e.config): e for e in evaluator.evaluate(pairs)}
    assert found[name_of(SLOW)].status is Status.LEFT_OUT and found[name_of(SLOW)].counters["registers"] > 0
    assert found[name_of(ILLEGAL)].status is Status.ILLEGAL
    assert found[FreeKernel.parse(text).name].status is Status.COMPILE_ERROR


def test_a_device_that_is_none() -> None:
    with pytest.raises(UsageError, match="--device"), evaluator_of("tpu"):
        pass
    with pytest.raises(UsageError, match="--proof"), evaluator_of("compile", "none"):
        pass


def test_sentences_are_read_as_they_are_written() -> None:
    language = KnobWords()
    config = language.read(PROBLEM, FAST)
    assert language.write(PROBLEM, config) == FAST
    assert language.write(PROBLEM, type(config)(128, 8)) is None  # a value that has no word
    with pytest.raises(UsageError):
        KnobWords({"schedule": (1,)})
    with pytest.raises(UsageError):
        language_of("latin")


def test_answers_with_a_block_are_read_as_they_are_written() -> None:
    language = CudaAnswers(H200)
    config = KnobWords().read(PROBLEM, FAST)
    written = language.write(PROBLEM, config)
    assert written is not None and language.read(PROBLEM, f"Here it is.\n{written}\nDone.") == config
    assert isinstance(language.read(PROBLEM, "I can't help with that."), RefusedAnswer)
    assert isinstance(language.read(PROBLEM, ""), RefusedAnswer)
    messages = language.prompt(PROBLEM)
    assert [m["role"] for m in messages] == ["system", "user"] and "512" in messages[1]["content"]


def test_a_training_neither_asks_for_nor_takes_code_that_could_forge_its_reward() -> None:
    language, kernel = CudaAnswers(H200), FreeKernel.parse(host_text(""))
    refused = language.read(PROBLEM, f"```cuda\n{kernel.text}\n```")
    assert isinstance(refused, RefusedAnswer) and refused.kind == "contract" and 'form "host"' in refused.reason
    assert language.write(PROBLEM, kernel) is None
    asked = language.prompt(PROBLEM)
    assert not isinstance(asked, str) and 'form "device"' in asked[1]["content"] and "host" not in asked[1]["content"]


def test_prompts_are_messages_where_the_model_takes_them() -> None:
    assert prompt_messages("hello", chat=True) == [{"role": "user", "content": "hello"}]
    assert (
        prompt_messages([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], chat=False)
        == "a\n\nb\n"
    )
    assert completion_text([{"role": "assistant", "content": "x"}]) == "x" and completion_text("y") == "y"
    rows = prompt_rows([KnobWords().prompt(p) for p in (PROBLEM, Problem(64, 64, 64))], chat=False, least=3)
    assert [row["problem"] for row in rows] == [0, 1, 0, 1]


def test_an_archive_gives_the_fastest_that_passed(tmp_path: Path) -> None:
    language = KnobWords()
    with Store(tmp_path / "s.sqlite") as store:
        for sentence, us, status in (
            (SLOW, 9.0, Status.PASSED),
            (FAST, 5.0, Status.PASSED),
            (ILLEGAL, 0, Status.WRONG),
        ):
            timing = Timing("offline", (us,), us, 0.0) if status is Status.PASSED else None
            store.append("r", Evaluation(PROBLEM, language.read(PROBLEM, sentence), status, timing=timing))
    rows = supervised_rows(tmp_path / "s.sqlite", language, chat=False)
    assert [row["completion"] for row in rows] == [FAST, SLOW]
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"problem": "512_512_512", "answer": "' + FAST + '"}\n')
    assert supervised_rows(lines, language, chat=False) == rows[:1]


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b'{"problem": "512_512_512", "answer": "nonsense"}', b'{"status": "passed"}', b"\xff", b"[" * 99_999],
    ids=["cut", "list", "nonsense", "fields", "binary", "deep"],
)
def test_a_damaged_archive_is_refused_with_its_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"problem": "512_512_512", "answer": "%b"}\n%b\n' % (FAST.encode(), line))
    with pytest.raises(RecordError, match="line 2"):
        supervised_rows(path, KnobWords(), chat=False)


def test_an_archive_without_anything_to_learn(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no training data"):
        supervised_rows(tmp_path / "a.jsonl", KnobWords(), chat=False)
    with pytest.raises(RecordError, match="does not exist"):
        supervised_rows(tmp_path / "b.jsonl", KnobWords(), chat=False)


def test_a_checkpoint_that_was_cut_off_is_not_resumed_from(tmp_path: Path) -> None:
    for step, state in ((2, '{"global_step": 2}'), (10, '{"global_step": 10}'), (12, '{"glob'), (14, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert not (tmp_path / "checkpoint-12").exists() and not (tmp_path / "checkpoint-14").exists()


def test_logs_of_steps_that_are_taken_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\n{"step": 2}\n{"step": 3}\n{"st')
    drop_later_lines(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_folder_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    def whole(folder: Path) -> None:
        (folder / "a").write_text("new")

    def broken(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    publish_folder(tmp_path / "final", whole)
    publish_folder(tmp_path / "final", whole)
    with pytest.raises(RecordError, match="No space"):
        publish_folder(tmp_path / "final", broken)
    assert [p.name for p in tmp_path.iterdir()] == ["final"] and (tmp_path / "final" / "a").read_text() == "new"


def test_a_process_that_is_killed_while_it_publishes_leaves_no_half_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, **_: object) -> None:
        for file in path.glob("a") if path.exists() else ():
            file.unlink()
            raise KeyboardInterrupt

    def save(text: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            for name in ("a", "b"):
                (folder / name).write_text(text)

        return write

    publish_folder(tmp_path / "final", save("old"))
    monkeypatch.setattr(training_folder.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        publish_folder(tmp_path / "final", save("new"))
    assert {p.name: p.read_text() for p in (tmp_path / "final").iterdir()} == {"a": "new", "b": "new"}


def test_a_stage_is_gone_on_with_only_if_asked_and_only_with_its_settings(tmp_path: Path) -> None:
    begun = TrainSettings("random:tiny", (PROBLEM,), steps=4)
    claim_folder(tmp_path, begun, resume=False, begun=False)
    with pytest.raises(UsageError, match="--resume"):
        claim_folder(tmp_path, begun, resume=False, begun=True)
    claim_folder(
        tmp_path, TrainSettings("random:tiny", (PROBLEM,), steps=8, batch_seconds=5.0), resume=True, begun=True
    )
    with pytest.raises(UsageError, match="group"):
        claim_folder(tmp_path, TrainSettings("random:tiny", (PROBLEM,), group=4), resume=True, begun=True)


def test_settings_that_cannot_be_read_are_one_error(tmp_path: Path) -> None:
    begun = TrainSettings("random:tiny", (PROBLEM,), steps=4)
    for damaged in ("{", "7"):
        (tmp_path / "settings.json").write_text(damaged)
        with pytest.raises(RecordError, match="settings.json cannot be read"):
            claim_folder(tmp_path, begun, resume=True, begun=True)


@pytest.mark.parametrize(
    "odd",
    [
        {"stage": "third"}, {"steps": 0}, {"group": 1}, {"prompts": 0}, {"temperature": 0.0}, {"lora": -1},
        {"memory_fraction": 0.0}, {"batch_seconds": 0.0}, {"save_every": 0}, {"stage": "supervised"}, {"problems": ()},
        {"temperature": math.nan}, {"kl": -0.1}, {"kl": math.nan}, {"least_std": 0.0}, {"clip": 0.0}, {"lr": 0.0},
        {"max_tokens": 0}, {"micro_batch": 0},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(odd: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TrainSettings(**{"model": "m", "problems": (PROBLEM,), **odd})
