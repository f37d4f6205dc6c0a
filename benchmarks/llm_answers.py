"""Question: which kernels does a small language model write, if it chooses knobs, fills in a kernel, or writes one?

Command:

    python benchmarks/llm_answers.py ask --gguf models/qwen2.5-coder-1.5b.gguf [--seconds S]
    python benchmarks/llm_answers.py judge [--device cuda:0]
    python benchmarks/llm_answers.py table

Options of all: ``--out``. Of ``ask``: ``--problems 20``, ``--seeds 3`` and ``--counters results/h200/ncu.json``.

Result file: results/h200/llm_answers.jsonl. Its first line has the model's SHA-256 and the settings. A line follows for
each prompt, and one for each answer with its text, so ``judge`` and ``table`` need no model. ``ask`` needs the extra
``gguf`` and no GPU. It reads and compiles each answer at once. An interrupted run resumes, and ``--seconds`` ends it.
``judge`` proves and times the compiled ones on a GPU.

Problems are drawn from grid1000 in TN. On each, every mode is asked with and without aids, with the same temperature
and seeds:

- *knobs*: the knobs of a template family as JSON.
- *holes*: three parts of a kernel that is there otherwise: loads, products, stores.
- *free*: a whole kernel.

The aids are kernels of near problems, lessons, and two recorded kernels of the problem with times and counters. After
an answer that does not compile, there is a second turn. A copy of a kernel in the prompt counts as not compiled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

from learners.answers import (
    AIDS,
    ANSWER_TOKENS,
    MODES,
    PROMPT_TOKENS,
    Chat,
    Prompts,
    Question,
    drawn_problems,
    judged,
    read,
    repair,
    sha_of_file,
    shown_kernels,
)
from learners.resumable import resumable

from outblas.core.errors import RecordError
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.records.provenance import collect_provenance, script_command
from outblas_lab.jail.offline_evaluators import CompileOnlyEvaluator
from outblas_lab.llm.evaluators import WithTemplates
from outblas_lab.llm.evolve import EvolveSettings
from outblas_lab.llm.gguf_server import serving_gguf

FORMAT = "outblas-llm-answers-1"
TEMPERATURE = 0.7
#: Stages of an answer, each of which includes those before.
STAGES = ("parses", "compiles", "proven", "faster")


def wilson_interval(count: int, of: int) -> tuple[float, float]:
    """Return the 95% interval of a rate (Wilson, Probable inference, JASA 1927)."""
    z2, rate = 1.96**2, count / of
    middle, width = rate + z2 / (2 * of), 1.96 * sqrt(rate * (1 - rate) / of + z2 / (4 * of * of))
    return (middle - width) / (1 + z2 / of), (middle + width) / (1 + z2 / of)


class Transcript:
    """The result file: read once, and appended."""

    def __init__(self, path: Path) -> None:
        self.path, lines = path, path.read_text().splitlines() if path.exists() else []
        try:
            self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        except ValueError as error:
            raise RecordError(
                f"{path} has a broken line ({error})", "a line of JSON each", "delete that line"
            ) from error

    def add(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        self.rows.append(row)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["row"] == kind]

    def begin(self, settings: dict[str, Any]) -> None:
        """Write the first line, or check that an earlier run had the same settings."""
        if not self.rows:
            provenance = collect_provenance(script_command("benchmarks/llm_answers.py"), None)
            self.add({"row": "run", "format": FORMAT, "settings": settings, "provenance": provenance})
        elif self.rows[0].get("settings") != settings:
            known = self.rows[0].get("settings")
            raise RecordError(f"{self.path} has the settings {known}", f"{settings}", "pass the same, or another --out")


def own_answers(out: Transcript) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield (row, candidate) of each answer that compiled and is no copy of a kernel in its prompt."""
    gpu = packaged_gpu("h200")
    prompts = {row["prompt"]: row["messages"] for row in out.of_kind("prompt")}
    for row in out.of_kind("answer"):
        key, mode, aid = row["prompt"].split("/")
        problem = Problem.from_key(key)
        if row["outcome"] == "compiled":
            candidate = read(Question(problem, mode, aid, ()), row["text"], row["finish"], gpu).candidate
            if candidate is not None and candidate.name not in shown_kernels(prompts[row["prompt"]], problem, gpu):
                yield row, candidate


def place_of(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["prompt"], row["seed"], row["turn"]


def group_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the mode and the aid of an answer."""
    return tuple(row["prompt"].split("/")[1:])


def questions(prompts: Prompts, problems: Sequence[Problem]) -> Iterator[Question]:
    for problem in problems:
        for mode in MODES:
            for aid in AIDS:
                yield prompts.question(problem, mode, aid)


def ask(arguments: argparse.Namespace) -> None:
    gpu, out = packaged_gpu("h200"), Transcript(arguments.out)
    problems = drawn_problems(arguments.problems, arguments.seed)
    out.begin({
        "weights": sha_of_file(arguments.gguf), "model": arguments.gguf.stem, "problems": arguments.problems,
        "seed": arguments.seed, "temperature": TEMPERATURE, "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS, "counters": str(arguments.counters or ""),
    })  # fmt: skip
    done = {(row["prompt"], row["seed"]) for row in out.of_kind("answer") if row["last"]}
    asked = {row["prompt"] for row in out.of_kind("prompt")}
    evaluator, prompts = WithTemplates(CompileOnlyEvaluator(gpu), ()), Prompts(gpu, arguments.counters)
    settings = replace(EvolveSettings(), parallel=1, max_tokens=max(ANSWER_TOKENS.values()), prompt_tokens=8000)
    begun = time.monotonic()
    with serving_gguf(arguments.gguf, settings) as server:
        chat = Chat(server, TEMPERATURE)
        for question in questions(prompts, problems):
            for seed in range(arguments.seeds):
                if (question.key, seed) in done:
                    continue
                if arguments.seconds is not None and time.monotonic() - begun > arguments.seconds:
                    print("the time is up; the same command goes on")
                    return
                if question.key not in asked:
                    asked.add(question.key)
                    out.add({"row": "prompt", "prompt": question.key, "messages": list(question.messages)})
                one_answer(question, seed, chat, evaluator, prompts, out)


def one_answer(question: Question, seed: int, chat: Chat, evaluator: Any, prompts: Prompts, out: Transcript) -> None:
    """Ask, read and compile; with aids once more after an answer that does not compile. Write both turns."""
    messages = list(question.messages)
    for turn in range(2 if question.aid == "aided" else 1):
        begun = time.monotonic()
        reply = chat.ask(messages, ANSWER_TOKENS[question.mode], seed)
        seconds = time.monotonic() - begun
        kind, words = judged(question, read(question, reply["text"], reply["finish"], prompts.gpu), evaluator)
        last = turn == 1 or kind == "compiled" or question.aid == "bare"
        row = {"row": "answer", "prompt": question.key, "seed": seed, "turn": turn, "last": last, "outcome": kind}
        out.add({**row, "words": words[:1000], "seconds": round(seconds, 2), **reply})
        print(f"{question.key} {seed}.{turn}: {kind}, {reply['written']} tokens in {seconds:.0f} s", flush=True)
        if last:
            return
        best = min(prompts.baselines(question.problem).values())
        messages = repair(question, reply["text"], kind, words, prompts.gpu, best)


def judge(arguments: argparse.Namespace) -> None:
    """Prove and time the answers that compiled, as ``outblas evolve`` does."""
    from outblas_lab.llm.evaluators import open_chosen_evaluator, parse_evaluator

    out = Transcript(arguments.out)
    known = {place_of(row) for row in out.of_kind("verdict")}
    with open_chosen_evaluator(parse_evaluator(arguments.device)) as evaluator:
        for row, candidate in list(own_answers(out)):
            place = place_of(row)
            if place in known:
                continue
            (found,) = evaluator.evaluate([(Problem.from_key(row["prompt"].split("/")[0]), candidate)])
            verdict = {"row": "verdict", **dict(zip(("prompt", "seed", "turn"), place, strict=True))}
            speedup = None if found.speedup is None else [found.speedup.ratio, found.speedup.low, found.speedup.high]
            out.add({**verdict, "status": found.status.value, "detail": found.detail[:500], "speedup": speedup})
            print(*place, found.status.value, speedup, flush=True)


def table(arguments: argparse.Namespace) -> None:
    """Print rates of each mode and aid, with Wilson intervals of 95%."""
    out = Transcript(arguments.out)
    answers = [row for row in out.of_kind("answer") if row["last"]]
    verdicts = {place_of(row): row for row in out.of_kind("verdict")}
    own = {place_of(row) for row, _ in own_answers(out)}
    groups = sorted({group_of(row) for row in answers})
    for group in groups:
        mine = [row for row in answers if group_of(row) == group]
        found = Counter[str]()
        for row in mine:
            verdict = verdicts.get(place_of(row), {})
            parsed = row["outcome"] not in ("malformed", "cut", "empty", "refusal")
            speedup = verdict.get("speedup")
            reached = (parsed, place_of(row) in own, speedup is not None, speedup is not None and speedup[1] > 1)
            for stage, is_reached in zip(STAGES, reached, strict=True):
                found[stage] += is_reached
        seconds = sum(row["seconds"] for row in out.of_kind("answer") if group_of(row) == group)
        parts = []
        for stage in STAGES:
            low, high = wilson_interval(found[stage], len(mine))
            parts.append(f"{stage} {found[stage]} ({low:.0%} to {high:.0%})")
        print(" ".join(group), f"{len(mine)} answers:", ", ".join(parts), f"{seconds / len(mine):.0f} s an answer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    asking, judging, telling = (commands.add_parser(name) for name in ("ask", "judge", "table"))
    for each, run in ((asking, ask), (judging, judge), (telling, table)):
        each.set_defaults(run=run)
        each.add_argument("--out", type=Path, default=Path("results/h200/llm_answers.jsonl"))
    asking.add_argument("--gguf", type=Path, required=True)
    asking.add_argument("--problems", type=int, default=20)
    asking.add_argument("--seeds", type=int, default=3)
    asking.add_argument("--seed", type=int, default=0, help="of the draw of problems")
    asking.add_argument("--counters", type=Path)
    asking.add_argument("--seconds", type=float, help="begin no answer after this time")
    judging.add_argument("--device", default="cuda:0")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    with resumable("finished answers are in the result file"):
        main()
