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
``table`` writes the rates to results/h200/llm_answers.json.

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
from collections.abc import Iterator, Sequence
from dataclasses import replace
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

from outblas.core.config import KernelConfig
from outblas.core.errors import RecordError
from outblas.core.files import write_json
from outblas.core.gpu_records import packaged_gpu
from outblas.core.problem import Problem
from outblas.core.stats import wilson_interval
from outblas.records.provenance import collect_provenance, script_command
from outblas_lab.agents.evolution import knob_distance
from outblas_lab.jail.offline_evaluators import CompileOnlyEvaluator
from outblas_lab.llm.evaluators import WithTemplates
from outblas_lab.llm.evolve import EvolveSettings
from outblas_lab.llm.gguf_server import serving_gguf

FORMAT, TABLE_FORMAT = "outblas-llm-answers-1", "outblas-llm-answers-table-1"
TEMPERATURE = 0.7


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


def own_answers(out: Transcript) -> Iterator[tuple[dict[str, Any], Any, dict[str, Any]]]:
    """Yield (row, candidate, shown) of each answer that compiled and is no copy of a kernel that its prompt shows."""
    gpu = packaged_gpu("h200")
    prompts = {row["prompt"]: row["messages"] for row in out.of_kind("prompt")}
    for row in out.of_kind("answer"):
        key, mode, aid = row["prompt"].split("/")
        problem = Problem.from_key(key)
        if row["outcome"] == "compiled":
            candidate = read(Question(problem, mode, aid, ()), row["text"], row["finish"], gpu).candidate
            shown = shown_kernels(prompts[row["prompt"]], problem, gpu)
            if candidate is not None and candidate.name not in shown:
                yield row, candidate, shown


def knobs_changed(candidate: Any, shown: dict[str, Any]) -> int | None:
    """Return how many knobs differ from the nearest config of a prompt; None for CUDA or without a config."""
    configs = [one for one in shown.values() if isinstance(one, KernelConfig)]
    if not configs or not isinstance(candidate, KernelConfig):
        return None
    return min(knob_distance(candidate, one) for one in configs)


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
    pending = [(row, candidate) for row, candidate, _ in own_answers(out) if place_of(row) not in known]
    if not pending:
        return  # the provenance of the last judge is that of the verdicts
    device = parse_evaluator(arguments.device)
    with open_chosen_evaluator(device) as evaluator:
        made = collect_provenance(script_command("benchmarks/llm_answers.py"), device.gpu_index)
        out.add({"row": "judge", "provenance": made})
        for row, candidate in pending:
            place = place_of(row)
            (found,) = evaluator.evaluate([(Problem.from_key(row["prompt"].split("/")[0]), candidate)])
            verdict = {"row": "verdict", **dict(zip(("prompt", "seed", "turn"), place, strict=True))}
            speedup = None if found.speedup is None else [found.speedup.ratio, found.speedup.low, found.speedup.high]
            out.add({**verdict, "status": found.status.value, "detail": found.detail[:500], "speedup": speedup})
            print(*place, found.status.value, speedup, flush=True)


def rates(out: Transcript) -> list[dict[str, Any]]:
    """Return what became of the answers of each mode with and without aids, turns of repair included.

    ``stages`` has (count, low, high) of each stage, with Wilson's intervals of 95%. A stage includes those before.
    ``best`` is the largest speed-up over the fastest cuBLASLt, None if no kernel was proven. ``knobs_changed`` has, for
    each proven choice of knobs, how many differ from the nearest kernel of its prompt, the smallest number first.
    ``unjudged`` own kernels have no verdict yet.
    """
    verdicts = {place_of(row): row for row in out.of_kind("verdict")}
    own = {place_of(row): knobs_changed(candidate, shown) for row, candidate, shown in own_answers(out)}
    turns = out.of_kind("answer")
    found = []
    for group in sorted({group_of(row) for row in turns if row["last"]}):
        mine = [row for row in turns if group_of(row) == group]
        ends = [row for row in mine if row["last"]]
        places = [place_of(row) for row in ends]
        speedups = [verdicts.get(place, {}).get("speedup") for place in places]
        changed = [own[place] for place, speedup in zip(places, speedups, strict=True) if speedup is not None]
        reached = {
            "parses": [row["outcome"] not in ("malformed", "cut", "empty", "refusal") for row in ends],
            "compiles": [place in own for place in places],
            "proven": [speedup is not None for speedup in speedups],
            "faster": [speedup is not None and speedup[1] > 1 for speedup in speedups],
        }
        counts = {stage: sum(each) for stage, each in reached.items()}
        found.append({
            "mode": group[0], "aids": group[1], "answers": len(ends),
            "stages": {name: [count, *wilson_interval(count, len(ends))] for name, count in counts.items()},
            "seconds": sum(row["seconds"] for row in mine), "tokens": sum(row["written"] for row in mine),
            "best": max((speedup[0] for speedup in speedups if speedup is not None), default=None),
            "knobs_changed": sorted(n for n in changed if n is not None),
            "unjudged": sum(place in own and place not in verdicts for place in places),
        })  # fmt: skip
    return found


def table(arguments: argparse.Namespace) -> None:
    """Write the rates of each mode and aid to the JSON file beside the transcript, and print them."""
    out = Transcript(arguments.out)
    run, judged_by = out.rows[0], out.of_kind("judge")
    made = {
        "format": TABLE_FORMAT, "settings": run["settings"], "asked": run["provenance"],
        "judged": judged_by[-1]["provenance"] if judged_by else None, "rows": rates(out),
        "provenance": collect_provenance(script_command("benchmarks/llm_answers.py"), None),
    }  # fmt: skip
    path = arguments.out.with_suffix(".json")
    write_json(path, made)
    for row in made["rows"]:
        parts = [f"{stage} {n} ({low:.0%} to {high:.0%})" for stage, (n, low, high) in row["stages"].items()]
        each = row["seconds"] / row["answers"]
        print(f"{row['mode']} {row['aids']} {row['answers']} answers: {', '.join(parts)}; {each:.0f} s an answer")
    print(f"table: {path}")


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
