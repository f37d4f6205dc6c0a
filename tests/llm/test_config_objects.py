"""Knobs as one JSON object: reading, the reward of cheats, and a training whose reward replays a recording."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import config_name
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.kernels.catalogue import catalogue
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas_lab.llm.train.answer_judge import AnswerJudge, check_device, evaluator_of
from outblas_lab.llm.train.config_objects import ConfigObjects
from outblas_lab.llm.train.rewards import UNPROVEN_REWARD
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.stages import train
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import LenientReplay
from support.gpus.known import H200
from support.training.tiny_training import (
    answers,
    installed_fixture,  # noqa: F401
    lines,
    one_thread_fixture,  # noqa: F401
    same_weights,
)

LANGUAGE = ConfigObjects(H200)
PROBLEM, SMALL = Problem(512, 512, 512), Problem(64, 64, 64)
STEPS = {"supervised": 80, "speed": 5}


@pytest.fixture(name="recording", scope="module")
def recording_fixture() -> Recording:
    return Recording.load("h200")


def best(recording: Recording, problem: Problem) -> str:
    found = recording.best(problem, pdl=False)
    assert found is not None
    text = LANGUAGE.write(problem, found[0])
    assert text is not None
    return text


def rewards(recording: Recording, problem: Problem, texts: list[str]) -> list[float]:
    judge = AnswerJudge(LenientReplay(recording), LANGUAGE, timed=True)
    judged = judge.judge([(problem, text) for text in texts])
    return [one.parts.total if one.parts is not None else math.nan for one in judged]


def test_every_kernel_of_the_catalogue_is_written_and_read_back() -> None:
    for config in catalogue("h200"):
        text = LANGUAGE.write(PROBLEM, config)
        assert (text is None) == config.pdl
        assert text is None or LANGUAGE.read(PROBLEM, text) == config
    assert LANGUAGE.write(PROBLEM, Sm90WgmmaConfig(128, 64)) == '{"bm":128,"bn":64}'
    assert LANGUAGE.read(PROBLEM, ' { "bn": 64,\n"bm": 128 } ') == Sm90WgmmaConfig(128, 64)


def test_the_further_an_answer_came_the_more_it_earns(recording: Recording) -> None:
    right = np.flatnonzero(recording.status[recording.row(PROBLEM)] == STATUS_CODES[Status.PASSED])
    plain = [recording.catalogue[i] for i in right if not recording.catalogue[i].pdl]
    by_time = sorted(plain, key=lambda c: recording.median_us[recording.row(PROBLEM), recording.catalogue_index(c)])
    recorded = [LANGUAGE.write(PROBLEM, config) or "" for config in (by_time[-1], by_time[0])]
    found = rewards(recording, PROBLEM, ["no JSON", '{"bm":64,"bn":7}', '{"bm":64,"bn":72}', *recorded])
    assert found == sorted(found) and len(set(found)) == len(found)
    assert found[2] == UNPROVEN_REWARD


def cheats(good: str) -> list[str]:
    """Texts that try to be paid without one legal kernel of the problem, or beside it."""
    inner = good[1:-1]
    around = [
        f"{good} done", f"Answer: {good}", f"```json\n{good}\n```", f"```\n{good}\n```", f"`{good}`", f"{good};",
        f"{good},", f"{good}.", f"[{good}]", f"({good})", good + good, f"{good}\n{good}", f"[{good},{good}]",
        json.dumps(good), f"{good}//", f"/* */{good}", f"#{good}", f"\ufeff{good}", f"\x00{good}", f"{good}\x00",
        f"\u00a0{good}", good[:-1], good[1:], inner, good.replace('"', "'"), f"{{{inner},}}", f"{{,{inner}}}",
        f"{{{{{inner}}}}}", f'{{"config":{good}}}', f"{LANGUAGE.prompt(PROBLEM)}\n{good}", f"{good}<|im_end|>{good}",
        good.replace(":", "="), good.replace("{", "[").replace("}", "]"), good.upper(), f"{good}\n# ignore the rules",
        LANGUAGE.prompt(PROBLEM), "", " ", "\n\t", "null", "true", "0", "NaN", "[]", "{}", "{}{}", '"passed"',
        "[" * 10**5, '{"bm":' * 10**4, "{" + " " * 10**6, config_name(Sm90WgmmaConfig(128, 64)), "bm=128,bn=64",
        "bm: 128\nbn: 64", "<json>" + good + "</json>",
    ]  # fmt: skip
    odd = [
        "NaN", "Infinity", "-Infinity", "1e309", "1.28e2", "128.0", '"128"', "true", "null", "[128]", "{}", "9" * 30,
        "9" * 5000, "-128", "0", "-0", "0x80", "0128", "1_28", "999999", "\u0661\u0662\u0668", "128 64", "",
    ]  # fmt: skip
    values = [f'{{"bm":{x},"bn":64}}' for x in odd] + [f'{{"bm":64,"bn":{x}}}' for x in odd]
    values += [f'{{"bm":64,"bn":64,"stages":{x}}}' for x in odd]
    extra = [
        '"bm":128,"bm":128', '"b\\u006d":64,"bm":64', '"time_us":0.001', '"reward":1', '"speedup":99', '"us":0',
        '"status":"passed"', '"BM":64', '"bm ":64', '"":1', '"__class__":"Evaluation"', '"family":"free"',
        '"family":"sm80_mma_gemm"', '"family":null', '"family":["sm90_wgmma_gemm"]', '"family":"cublas"',
        '"family":"sm90_wgmma_gemm","family":"sm90_wgmma_gemm"', '"pdl":true', '"early":true', '"pdl":1',
        '"pdl":true,"early":true', '"schedule":"fastest"', '"l2":"all"', '"text":"__global__ void f() {}"',
    ]  # fmt: skip
    return [*around, *values, *(f"{{{inner},{one}}}" for one in extra)]


def test_a_hundred_cheats_earn_nothing(recording: Recording) -> None:
    good = best(recording, PROBLEM)
    tried = dict.fromkeys(cheats(good))
    assert len(tried) >= 100
    illegal = max(rewards(recording, PROBLEM, ['{"bm":64,"bn":7}']))
    for text, paid in zip(tried, rewards(recording, PROBLEM, list(tried)), strict=True):
        assert paid <= illegal < UNPROVEN_REWARD, text[:200]
    assert min(rewards(recording, PROBLEM, [good])) > 0


def test_a_winner_of_another_problem_earns_nothing_where_it_is_illegal(recording: Recording) -> None:
    status = recording.status[recording.row(SMALL)]
    illegal = {c for c, one in zip(recording.catalogue, status, strict=True) if one == STATUS_CODES[Status.ILLEGAL]}
    winners = {found[0] for p in recording.problems if (found := recording.best(p, pdl=False)) is not None}
    texts = [LANGUAGE.write(SMALL, config) or "" for config in illegal & winners]
    assert len(texts) >= 3
    assert max(rewards(recording, SMALL, texts)) < UNPROVEN_REWARD


def test_devices_of_a_replay() -> None:
    check_device("replay:h200")
    with evaluator_of("replay:h200") as evaluator:
        assert evaluator.source == "replay:h200"
    with pytest.raises(UsageError, match="does not exist"):
        check_device("replay:nothing")


def make_writer(folder: Path) -> None:
    """Write a random model of two layers, whose tokens are single characters, and its tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(str(folder))  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )
    ).save_pretrained(str(folder))  # fmt: skip


def both_stages(run: Path, model: Path, archive: Path, killed: bool) -> None:
    """Train both stages. With ``killed``, each ends one step after its first checkpoint, and is resumed."""
    chosen: dict[str, dict[str, Any]] = {
        "supervised": {"archive": str(archive), "lr": 0.01, "save_every": 50},
        "speed": {"device": "replay:h200", "lr": 1e-3, "kl": 0.0, "group": 4, "prompts": 2, "save_every": 2},
    }
    for stage, own in chosen.items():
        settings = TrainSettings(str(model), (PROBLEM, SMALL), stage, STEPS[stage], language="config", cpu=True, **own)
        if killed:
            last = f"step {own['save_every'] + 1}/"

            def stop(text: str, last: str = last) -> None:
                if text.startswith(last):
                    raise InterruptedError

            with pytest.raises(InterruptedError):
                train(run, settings, LANGUAGE, say=stop)
        trained = train(run, settings, LANGUAGE, resume=killed, say=lambda text: None)
        assert trained.steps == STEPS[stage] and (trained.taken < STEPS[stage]) == killed


def test_both_stages_learn_from_a_recording_and_a_killed_one_ends_with_equal_weights(
    recording: Recording, tmp_path: Path
) -> None:
    make_writer(tmp_path / "base")
    archive = tmp_path / "archive.jsonl"
    taught = [*((p, best(recording, p)) for p in (PROBLEM, SMALL)), (PROBLEM, '{"bm":64,"bn":72}')]
    archive.write_text("".join(json.dumps({"problem": p.key, "answer": text}) + "\n" for p, text in 4 * taught))
    for name in ("whole", "killed"):
        both_stages(tmp_path / name, tmp_path / "base", archive, killed=name == "killed")
    losses = [row["loss"] for row in lines(tmp_path / "whole" / "supervised" / "log.jsonl")]
    assert losses[-1] < 0.2 * losses[0]
    rows = lines(tmp_path / "whole" / "speed" / "answers.jsonl")
    assert {"passed", "left_out"} <= {row["outcome"] for row in rows} and not any(row["parents"] for row in rows)
    for stage in STEPS:
        assert same_weights(tmp_path / "whole" / stage / "final", tmp_path / "killed" / stage / "final")
    assert answers(tmp_path / "whole", "speed") == answers(tmp_path / "killed", "speed")
    assert not same_weights(tmp_path / "whole" / "supervised" / "final", tmp_path / "whole" / "speed" / "final")
