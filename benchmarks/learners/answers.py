"""Questions to a language model, and the reading of its answers: for llm_answers.py."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from string import Template
from typing import Any

from outblas.core.config import config_to_json
from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.core.suites import suite
from outblas_lab.llm.answer import CODE, CONFIG, Answer, fenced, read_answer
from outblas_lab.llm.archive import Archive, ArchiveShape, Entry
from outblas_lab.llm.gguf_server import GgufServer
from outblas_lab.llm.known_counters import KnownCounters, load_counters
from outblas_lab.llm.near_problems import NearProblems
from outblas_lab.llm.prompt import Asked, describe_gpu, first_prompt, follow_up
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUSES
from outblas_lab.recordings.replay import ReplayEvaluator

HERE = Path(__file__).parent
#: A question asks for knobs of a template family, for the holes of a template, or for a whole kernel.
MODES = ("knobs", "holes", "free")
#: Without anything but the problem; or with near kernels and lessons, a contrastive pair with counters, and a repair.
AIDS = ("bare", "aided")
#: Tokens of a first prompt without its aids, and of an answer of each mode.
PROMPT_TOKENS, ANSWER_TOKENS = 3000, {"knobs": 400, "holes": 800, "free": 1000}
HOLES = ("load", "multiply", "store")
Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """A first prompt, and the problem and mode to which it belongs."""

    problem: Problem
    mode: str
    aid: str
    messages: tuple[Message, ...]

    @property
    def key(self) -> str:
        """Its name: problem, mode and aid."""
        return f"{self.problem.key}/{self.mode}/{self.aid}"


def drawn_problems(count: int, seed: int) -> list[Problem]:
    """Return problems of grid1000 in TN by a seed: a third below 1e9 FLOP, and a third above 3e10."""
    known = sorted((p for p in suite("grid1000") if p.layout == "TN"), key=lambda p: p.key)
    draw = random.Random(seed)
    small = [p for p in known if p.flops < 1e9]
    large = [p for p in known if p.flops > 3e10]
    rest = [p for p in known if 1e9 <= p.flops <= 3e10]
    parts = (count // 3, count // 3, count - 2 * (count // 3))
    return [p for pool, part in zip((small, large, rest), parts, strict=True) for p in draw.sample(pool, part)]


class Prompts:
    """First prompts for a GPU, from the packaged recording and library, and the counters that are published."""

    def __init__(self, gpu: Gpu, counters: Path | None) -> None:
        self.gpu, self._replay = gpu, ReplayEvaluator(Recording.load(gpu.name))
        self._counters = KnownCounters() if counters is None else load_counters(counters, gpu)
        self._near, self._none = NearProblems(gpu, 3), Archive(ArchiveShape())

    def baselines(self, problem: Problem) -> Mapping[str, float]:
        return self._replay.baselines(problem)

    def pair(self, problem: Problem) -> tuple[list[Entry], dict[str, str]]:
        """Return two recorded kernels, the slower first, of which one takes about twice as long; and facts on them."""
        cells = [one for one in self._replay.evaluate((problem, c) for c in self._recorded(problem)) if one.timing]
        cells.sort(key=lambda one: one.timing.median_us)
        best = cells[0]
        slower = min(cells[1:], key=lambda one: abs(log(one.timing.median_us / best.timing.median_us) - log(2)))
        entries, facts = [], {}
        for one in (slower, best):
            entry = Entry(problem.key, 0, one.config.name, config_to_json(one.config), log(one.speedup.low),
                          one.timing.median_us, 0)  # fmt: skip
            entries.append(entry)
            facts[entry.name] = self._counters.words(one, self.gpu)
        return entries, facts

    def _recorded(self, problem: Problem) -> Iterator[Any]:
        recording = self._replay.recording
        for config in self._replay.candidates(problem):
            column = recording.catalogue_index(config)
            if STATUSES[recording.status[recording.row(problem), column]] is Status.PASSED:
                yield config

    def question(self, problem: Problem, mode: str, aid: str) -> Question:
        aided, kinds = aid == "aided", (CONFIG,) if mode == "knobs" else (CODE,)
        parents, facts = self.pair(problem) if aided else ([], {})
        near = self._near.text(problem, self._none, kinds) if aided else ""
        if mode == "holes":
            return Question(problem, mode, aid, tuple(self._holes(problem, near)))
        baselines = self.baselines(problem)
        asked = Asked(kinds, host_form=False, tokens=PROMPT_TOKENS + 900 * aided)
        messages = first_prompt(problem, self.gpu, baselines, None, parents, facts, asked)
        text = messages[1]["content"].replace("# Your answer", f"{near}# Your answer", 1)
        return Question(problem, mode, aid, ({**messages[0]}, {"role": "user", "content": text}))

    def _holes(self, problem: Problem, near: str) -> Iterator[Message]:
        element = "half" if problem.dtype == "fp16" else "bfloat16"
        text = Template((HERE / "holes.md").read_text()).substitute(
            element=element, gpu=describe_gpu(self.gpu), m=problem.m, n=problem.n, k=problem.k,
            template=(HERE / "holes.cu").read_text().strip(), known=f"\n{near}\n" if near else "",
        )  # fmt: skip
        yield {"role": "user", "content": text}


def filled(text: str) -> str:
    """Return an answer to a question of holes as one answer of code; the answer itself if it has not three blocks."""
    parts = [body for language, body in fenced(text) if language in ("cuda", "cpp", "c++", "c", "cu")]
    if len(parts) != len(HOLES):
        return text
    kernel = (HERE / "holes.cu").read_text()
    for name, part in zip(HOLES, parts, strict=True):
        kernel = kernel.replace(f"// HOLE {name}", part.strip())
    return f"```cuda\n{kernel}\n```"


def read(question: Question, text: str, finish: str, gpu: Gpu) -> Answer:
    """Return what an answer is. Holes count as malformed unless there are three blocks."""
    if question.mode == "holes" and "HOLE" not in text:
        made = filled(text)
        if made is text:
            return Answer("cut" if finish == "length" else "malformed", CODE, words="not three blocks of statements")
        text = made
    answer = read_answer(text, finish, question.problem, gpu)
    wanted = CONFIG if question.mode == "knobs" else CODE
    if answer.candidate is not None and answer.answer != wanted:
        return Answer("malformed", answer.answer, words="another kind of answer was asked for")
    return answer


def shown_kernels(messages: Sequence[Message], problem: Problem, gpu: Gpu) -> dict[str, Any]:
    """Return the kernels that a prompt shows, by name. A copy of one is no kernel of the model's own."""
    blocks = [block for message in messages for block in fenced(message["content"])]
    answers = [read_answer(f"```{language}\n{body}\n```", "stop", problem, gpu) for language, body in blocks]
    return {answer.candidate.name: answer.candidate for answer in answers if answer.candidate is not None}


def judged(question: Question, answer: Answer, evaluator: Any) -> tuple[str, str]:
    """Return (outcome, words) of a read answer: compiled, or why not."""
    if answer.candidate is None:
        return answer.kind, answer.words
    (found,) = evaluator.evaluate([(question.problem, answer.candidate)])
    if found.status in (Status.LEFT_OUT, Status.PASSED):
        return "compiled", ""
    kinds = {Status.COMPILE_ERROR: "compile", Status.STATIC_REJECTED: "static", Status.ILLEGAL: "illegal"}
    return kinds.get(found.status, found.status.name.lower()), found.detail


def repair(question: Question, reply: str, kind: str, words: str, gpu: Gpu, best_us: float) -> list[Message]:
    """Return the messages of a second turn: the first prompt, the answer, and what is wrong with it."""
    words = words[:3000]
    if question.mode == "holes":
        text = f"{words or kind}\n\nWrite the three blocks again: load, multiply, store."
    else:
        kinds = (CONFIG,) if question.mode == "knobs" else (CODE,)
        text = follow_up(kind, words, question.problem, gpu, best_us, ANSWER_TOKENS[question.mode], kinds)
    return [*question.messages, {"role": "assistant", "content": reply}, {"role": "user", "content": text}]


class Chat:
    """Questions to the model of a server, at one temperature."""

    def __init__(self, server: GgufServer, temperature: float) -> None:
        self._server, self._temperature = server, temperature

    def ask(self, messages: Sequence[Message], tokens: int, seed: int) -> dict[str, Any]:
        """Return ``text``, ``finish``, and the tokens that were read, taken from the cache, and written."""
        body = {"messages": list(messages), "max_tokens": tokens, "seed": seed, "temperature": self._temperature,
                "cache_prompt": True}  # fmt: skip
        found = self._server.request("/v1/chat/completions", json.dumps(body).encode(), 3600.0)
        choice, timings = found["choices"][0], found.get("timings", {})
        return {
            "text": choice["message"]["content"] or "", "finish": choice["finish_reason"],
            "read": timings.get("prompt_n"), "cached": timings.get("cache_n"), "written": timings.get("predicted_n"),
        }  # fmt: skip


def sha_of_file(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
