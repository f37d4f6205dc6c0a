"""Question: which learner finds the fastest kernels with 4, 8 and 16 measurements of a problem?

Command:

    python benchmarks/equal_budgets.py [--recording h200] [--gguf models/qwen2.5-coder-1.5b.gguf] [--seconds S]

Result file: results/h200/equal_budgets.json, or ``--out``. Beside it, a journal of the same name (.jsonl) has every
search, every question and every answer. Needs the extras of the agents, ``gguf`` for ``--gguf``, and no GPU.

``--problems 40`` are drawn from a recording by ``--seed``, stratified by regime, and searched in its launch option with
the most kernels. ``--chosen random`` offers only the cells of that choice. Each learner proposes 4 kernels, hears their
times, and proposes the next 4. Those that learn across shapes learn from the other (M, N, K) of the recording.

- ``llm``: the language model sees the problem, the knobs with their values, and what was measured.
- ``llm+list``: it also sees the 10 best candidates of the regressor.
- ``fill``: what the agent of the two makes of an empty answer: the order of the ranking model.

A kernel that is not offered becomes the nearest one, and missing ones are filled. So the rows ``as written`` count only
kernels that the answer names exactly; the other measurements are lost. Until one has passed, the slowest counts.

An interrupted run resumes: the same command asks no question twice. ``--seconds`` ends it. Without ``--gguf`` the
answers of the journal are replayed. The table has the problems that every learner has finished.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from figures.budget_table import FORMAT, budget_lines
from learners.answers import Chat, sha_of_file
from learners.knob_questions import (
    ANSWER_TOKENS,
    LISTED,
    ORIGINS,
    PROMPT_TOKENS,
    KnobChooser,
    NoAnswer,
    Transcript,
)
from learners.resumable import resumable

from outblas.core.config import launch_of
from outblas.core.errors import UsageError, unknown_name
from outblas.core.evaluation import Status
from outblas.core.files import write_json
from outblas.core.journal import Journal
from outblas.core.stats import bootstrap_geomean, geomean
from outblas.core.suites import sample
from outblas.records.provenance import collect_provenance, script_command, source_commit
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent
from outblas_lab.compare.compare_run import about_recording
from outblas_lab.compare.held_out import LAUNCHES, HeldOutTask, search_times, tasks_of
from outblas_lab.llm.evolve import EvolveSettings
from outblas_lab.llm.gguf_server import serving_gguf
from outblas_lab.recordings.recording import Recording, TrainingPart, recording_sha
from outblas_lab.recordings.recording_files import CHOICE_CODES, STATUS_CODES
from outblas_lab.recordings.replay import ReplayEvaluator

BUDGETS, BATCH, TEMPERATURE = (4, 8, 16), 4, 0.0
#: Learner -> its agent.
RIVALS = {"fill": "heuristic"} | {
    name: name
    for name in ("regressor", "surrogate", "nvmmh", "tpe", "kt-genetic", "kt-annealing", "kt-diffevo", "random-legal")
}
MODELS, AS_WRITTEN = ("llm", "llm+list"), " as written"
#: Learners whose difference tells what the first has and the second has not.
PAIRS = (("llm", "fill"), ("llm", "random-legal"), ("llm+list", "llm"), ("llm+list", "regressor"))
#: A kernel within 1% of the best.
NEAR = 1 / 1.01
Search = dict[str, Any]


def drawn_tasks(recording: Recording, count: int, seed: int, chosen: str = "") -> list[HeldOutTask]:
    """Return the tasks of drawn problems, in a random order; all have the launch option with the most passed cells.

    Args:
        chosen: only cells that were chosen in this way are offered; empty: all.
    """
    if chosen and chosen not in CHOICE_CODES:
        raise unknown_name("choice", chosen, CHOICE_CODES, "pass one of them as --chosen")
    cells = recording.status == STATUS_CODES[Status.PASSED]
    if chosen:
        cells &= recording.chosen == CHOICE_CODES[chosen]
    columns = np.array([launch_of(config) for config in recording.catalogue])
    launch = max(LAUNCHES, key=lambda name: cells[:, columns == name].sum())
    usable = [p for p, row in zip(recording.problems, cells[:, columns == launch], strict=True) if row.any()]
    if not 1 <= count <= len(usable):
        raise UsageError(f"--problems is {count}", f"1 to {len(usable)}", "pass another --problems or --chosen")
    drawn = sample(usable, count, seed, gpu=recording.gpu)
    random.Random(seed).shuffle(drawn)  # else a run that ends early has the first ones of the recording
    tasks = [task for problem in drawn for task in tasks_of(recording, problem) if task.launch == launch]
    return [_only(task, recording, CHOICE_CODES[chosen]) for task in tasks] if chosen else tasks


def _only(task: HeldOutTask, recording: Recording, code: int) -> HeldOutTask:
    row = recording.row(task.problem)
    columns = [i for c in task.candidates if recording.chosen[row, i := recording.catalogue_index(c)] == code]
    us = recording.median_us[row, columns]
    kept = tuple(recording.catalogue[i] for i in columns)
    return replace(task, candidates=kept, best_us=float(np.nanmin(us)), worst_us=float(np.nanmax(us)), left_out=())


class TimeUp(Exception):
    """The time of ``--seconds`` is over."""


class Run:
    """Searches of all learners on some tasks, in a journal.

    Attributes:
        until: time after which no search begins.
        seeds: learner -> number of seeds: 1 if they make no difference.
    """

    def __init__(
        self, recording: Recording, tasks: Sequence[HeldOutTask], journal: Journal, seeds: int, until: float
    ) -> None:
        self.tasks, self.journal, self.until = tasks, journal, until
        agents = {learner: make_agent(name, 0, recording.gpu) for learner, name in RIVALS.items()}
        differ = {learner for learner, agent in agents.items() if agent.draws or agent.learns}
        self.seeds = {learner: seeds if learner in differ else 1 for learner in (*RIVALS, *MODELS)}
        self._gpu, self._replay, self._commit = recording.gpu, ReplayEvaluator(recording), source_commit()
        held = {(t.problem.m, t.problem.n, t.problem.k) for t in tasks}
        training = tuple(p for p in recording.problems if (p.m, p.n, p.k) not in held)
        if not training:
            raise UsageError("no problem is left to learn from", "other (M, N, K)", "pass fewer --problems")
        self._part = TrainingPart(recording.restricted_to(training), training)

    def searches(self) -> list[Search]:
        return [entry for entry in self.journal.entries if entry["kind"] == "search"]

    def left(self, learner: str, seed: int = 0) -> list[HeldOutTask]:
        done = {e["problem"] for e in self.searches() if (e["learner"], e["seed"]) == (learner, seed)}
        return [task for task in self.tasks if task.problem.key not in done]

    def prepared(self, agent: Agent, learner: str) -> Agent:
        self.check_time()
        print(f"{learner}, seed {agent.seed}: {len(self._part.problems)} problems to learn from", flush=True)
        agent.prepare_across([self._part])
        return agent

    def check_time(self) -> None:
        if time.monotonic() > self.until:
            raise TimeUp("the time is up; the same command goes on")

    def rivals(self) -> None:
        for learner, name in RIVALS.items():
            for seed in range(self.seeds[learner]):
                if left := self.left(learner, seed):
                    agent = self.prepared(make_agent(name, seed, self._gpu), learner)
                    for task in left:
                        self.search(learner, seed, agent, task)
                    print(f"{learner}, seed {seed}: {len(left)} problems searched", flush=True)

    def models(self, transcript: Transcript) -> None:
        left = {learner: self.left(learner) for learner in MODELS}
        if not any(left.values()):
            return
        regressor = self.prepared(make_agent("regressor", 0, self._gpu), "the list of llm+list")
        agents = {name: KnobChooser(self._gpu, transcript, regressor if "list" in name else None) for name in MODELS}
        for name, agent in agents.items():
            self.prepared(agent, name)
        for number, task in enumerate(self.tasks, 1):
            for learner in (name for name in MODELS if task in left[name]):
                self.search(learner, 0, agents[learner], task)
                print(f"{learner}: {number} of {len(self.tasks)} problems", flush=True)

    def search(self, learner: str, seed: int, agent: Agent, task: HeldOutTask) -> None:
        """Search a task and write it down."""
        self.check_time()
        account = agent.account if isinstance(agent, KnobChooser) else None
        first = 0 if account is None else len(account)
        us = search_times(agent, task, self._replay, BUDGETS[-1], BATCH)[: BUDGETS[-1]]
        origins = {} if account is None else {"origins": account[first:][: len(us)]}
        head = {"kind": "search", "learner": learner, "seed": seed, "problem": task.problem.key}
        self.journal.append({**head, "us": us, **origins, "commit": self._commit})


@contextmanager
def asking(transcript: Transcript, gguf: Path | None, questions: int) -> Iterator[None]:
    """Give the transcript a model until the block ends, and say how long its answers take at most."""
    if gguf is None or not questions:
        yield
        return
    settings = EvolveSettings(parallel=1, max_tokens=ANSWER_TOKENS, prompt_tokens=PROMPT_TOKENS)
    with serving_gguf(gguf, settings) as server:
        read, written = server.rates()
        hours = questions * (PROMPT_TOKENS / read + ANSWER_TOKENS / written) / 3600
        print(f"the model reads {read:.0f} and writes {written:.0f} tokens/s: at most {questions} questions of "
              f"{PROMPT_TOKENS} + {ANSWER_TOKENS} tokens, so at most {hours:.1f} h", flush=True)  # fmt: skip
        transcript.chat = Chat(server, TEMPERATURE)
        yield


def with_written(searches: Iterable[Search]) -> Iterator[Search]:
    """Yield the searches, and of a language model's those with nothing but what its answers name exactly."""
    for one in searches:
        yield one
        if "origins" in one:
            own = [us if origin in ("written", "copied") else None
                   for us, origin in zip(one["us"], one["origins"], strict=True)]  # fmt: skip
            yield {**one, "learner": one["learner"] + AS_WRITTEN, "us": own}


def quality(task: HeldOutTask, us: Sequence[float | None], budget: int) -> float:
    """Return best recorded time / best time of the first ``budget`` measurements; the slowest counts if none passed."""
    return task.best_us / min((one for one in us[:budget] if one is not None), default=task.worst_us)


def summary(
    tasks: Sequence[HeldOutTask], searches: Sequence[Search], seeds: Mapping[str, int]
) -> dict[str, Any] | None:
    """Return the table, the paired gains, the counts of answers and what is missing; None without 3 finished problems.

    A learner that has finished fewer is left out, and the problems are those that all others have finished.
    """
    found: dict[str, dict[str, list[Search]]] = {}
    for one in with_written(one for one in searches if one["seed"] < seeds[one["learner"]]):
        found.setdefault(one["learner"], {}).setdefault(one["problem"], []).append(one)
    count = {name: seeds[name.removesuffix(AS_WRITTEN)] for name in found}
    finished = {name: {key for key, s in mine.items() if len(s) == count[name]} for name, mine in found.items()}
    shown = [name for name, keys in finished.items() if len(keys) >= 3]
    common = [task for task in tasks if all(task.problem.key in finished[name] for name in shown)]
    if not shown or len(common) < 3:
        return None
    of = {
        (name, b): [[quality(task, s["us"], b) for s in found[name][task.problem.key]] for task in common]
        for name in shown for b in BUDGETS
    }  # fmt: skip
    means = {place: [geomean(q) for q in qualities] for place, qualities in of.items()}
    missing = {name: len(tasks) - len(finished.get(name, ())) for name in (*RIVALS, *MODELS)}
    return {
        "judged": [task.problem.key for task in common],
        "table": [
            {"learner": name, "seeds": count[name], "figures": {
                b: {**_mean(means[name, b]), "near": round(float(np.mean(np.array(of[name, b]) >= NEAR)), 4)}
                for b in BUDGETS
            }}
            for name in shown
        ],
        "gains": [
            {"learner": one, "over": other, "figures": {
                b: _mean([x / y for x, y in zip(means[one, b], means[other, b], strict=True)]) for b in BUDGETS
            }}
            for one, other in PAIRS if {one, other} <= set(shown)
        ],
        "answers": {
            name: _account([found[name][task.problem.key][0] for task in common]) for name in MODELS if name in shown
        },
        "missing": {name: lacking for name, lacking in missing.items() if lacking},
    }  # fmt: skip


def _mean(values: Sequence[float]) -> dict[str, float]:
    low, high = bootstrap_geomean(values)
    return {"mean": round(geomean(values), 6), "low": round(low, 6), "high": round(high, 6)}


def _account(searches: Sequence[Search]) -> dict[str, int]:
    """Return the numbers of answers, of those with a readable config, and of choices of each origin."""
    answers = [one["origins"][i : i + BATCH] for one in searches for i in range(0, len(one["origins"]), BATCH)]
    counts = Counter(origin for answer in answers for origin in answer)
    parsed = sum(set(answer) != {"filled"} for answer in answers)
    return {"answers": len(answers), "parsed": parsed, **{origin: counts[origin] for origin in ORIGINS}}


def run(arguments: argparse.Namespace) -> None:
    out, gguf = arguments.out, arguments.gguf
    if arguments.seeds < 1:
        raise UsageError(f"--seeds is {arguments.seeds}", "1 or more", "pass another --seeds")
    if out.suffix != ".json":
        raise UsageError(f"--out is {out}", "a path that ends in .json", "pass another --out")
    if gguf is not None and not gguf.is_file():
        raise UsageError(f"--gguf {gguf} is no file", "a GGUF file", "fetch one by benchmarks/fetch_gguf.py")
    recording = Recording.load(arguments.recording)
    tasks = drawn_tasks(recording, arguments.problems, arguments.seed, arguments.chosen)
    settings = {
        "format": FORMAT, "sha256": recording_sha(recording), "problems": [task.problem.key for task in tasks],
        "launch": tasks[0].launch, "chosen": arguments.chosen, "seed": arguments.seed, "budgets": BUDGETS,
        "batch": BATCH, "temperature": TEMPERATURE, "listed": LISTED, "tokens": [PROMPT_TOKENS, ANSWER_TOKENS],
    }  # fmt: skip
    weights = sha_of_file(gguf) if gguf else ""
    until = math.inf if arguments.seconds is None else time.monotonic() + arguments.seconds
    journal = Journal(out.with_suffix(".jsonl"), settings)
    try:
        transcript, work = Transcript(journal, weights), Run(recording, tasks, journal, arguments.seeds, until)
        try:
            work.rivals()
            questions = sum(len(work.left(name)) for name in MODELS) * math.ceil(BUDGETS[-1] / BATCH)
            with asking(transcript, gguf, questions):
                work.models(transcript)
        except (TimeUp, NoAnswer) as error:
            print(error, flush=True)
    finally:
        journal.close()
    made = summary(tasks, work.searches(), work.seeds)
    if made is None:
        print(f"too few problems are finished for a table; all searches are in {journal.path}")
        return
    provenance = collect_provenance(script_command("benchmarks/equal_budgets.py"), None)
    provenance["commit"] = "; ".join(dict.fromkeys(entry["commit"] for entry in work.searches()))
    about = {"recording": about_recording(arguments.recording, recording), "weights": transcript.weights}
    write_json(out, {**settings, "provenance": provenance, **about, **made})
    print("\n".join(budget_lines({**settings, **made})))
    print(f"written: {out}; transcript: {journal.path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", default="h200", help="name or path of a recording")
    parser.add_argument("--chosen", default="", help="offer only cells that were chosen in this way, e.g. random")
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the draw of problems")
    parser.add_argument("--seeds", type=int, default=3, help="of each learner that draws")
    parser.add_argument("--gguf", type=Path, help="language model; without it, answers of the journal are replayed")
    parser.add_argument("--seconds", type=float, help="begin no search after this time")
    parser.add_argument("--out", type=Path, default=Path("results/h200/equal_budgets.json"))
    run(parser.parse_args())


if __name__ == "__main__":
    with resumable("finished searches and answers are in the journal"):
        main()
