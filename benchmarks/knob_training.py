"""Question: does a language model of 135M parameters learn to choose the knobs of fast kernels for new problems?

Command:

    python benchmarks/fetch_gguf.py smollm2-135m
    python benchmarks/knob_training.py [--gguf models/smollm2-135m.gguf] [--run runs/knob_training]

Result file: results/h200/knob_training.json, or ``--out``. Needs the extra ``train-llm`` and no GPU.

The model writes the knobs of a kernel as JSON (language ``config`` of ``outblas train-llm``). All its weights are
trained in fp32: first supervised, on the fastest recorded kernel of each training problem, then by GRPO. The reward
replays the H200 recording of grid1000, launches without PDL. A tenth of the extents is held out by the seed, in both
layouts. Before and after each stage the model answers held-out problems, ``--samples`` times each at temperature 1.

Speeds are the time of the fastest recorded kernel of a problem over that of the answer. An answer that is not recorded
counts as 0, though it may be fast. Intervals are of 95%: Wilson's for rates, a bootstrap over problems for speeds.

An interrupted run resumes: the same command goes on from the last checkpoint, with equal results on equal threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learners.resumable import resumable

from outblas.core.config import KernelConfig
from outblas.core.evaluation import Status
from outblas.core.files import write_json
from outblas.core.journal import check_same_settings
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas.core.stats import wilson_interval
from outblas.records.provenance import collect_provenance, script_command
from outblas_lab.llm.train.answer_judge import AnswerJudge, JudgedAnswer
from outblas_lab.llm.train.answer_language import Language
from outblas_lab.llm.train.base_models import load_model
from outblas_lab.llm.train.dataset import prompt_messages
from outblas_lab.llm.train.languages import language_of
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.stages import SUPERVISED_ROWS_PER_STEP, train
from outblas_lab.recordings.recording import Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.recordings.replay import LenientReplay

GPU, STAGES = "h200", ("supervised", "speed")
#: Part of the extents that is held out, and bootstrap samples of an interval.
HELD_OUT, RESAMPLES = 0.1, 2000
#: Prompts that are answered at once, and answers of a backward pass, which would else take 12 GB of memory.
PROMPTS_AT_ONCE, MICRO_BATCH = 10, 8
Rows = list[tuple[Problem, list[str]]]


@dataclass(frozen=True)
class Split:
    """Problems to learn from, and problems whose extents the training never meets."""

    training: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def split_problems(problems: Sequence[Problem], count: int, seed: int) -> Split:
    """Return a split by extents; ``count`` held-out problems are kept at most, with the layouts in turns."""
    extents = sorted({(p.m, p.n, p.k) for p in problems})
    random.Random(seed).shuffle(extents)
    held = extents[: math.ceil(HELD_OUT * len(extents))]
    layouts = sorted({p.layout for p in problems})
    wanted = [(*one, layouts[i % len(layouts)]) for i, one in enumerate(held[:count])]
    by_name = {(p.m, p.n, p.k, p.layout): p for p in problems}
    training = tuple(p for p in problems if (p.m, p.n, p.k) not in set(held))
    return Split(training, tuple(by_name[one] for one in wanted if one in by_name))


class KnobBench:
    """The recording, the split, and the judge of answers."""

    def __init__(self, recording: Recording, language: Language, split: Split, samples: int, seed: int) -> None:
        self.recording, self.language, self.split = recording, language, split
        self.samples, self.seed = samples, seed
        self._judge = AnswerJudge(LenientReplay(recording), language, timed=True, batch_seconds=math.inf)

    def best(self, problem: Problem) -> tuple[KernelConfig, float]:
        """Return the fastest recorded kernel without PDL, and its time in microseconds."""
        found = self.recording.best(problem, pdl=False)
        assert found is not None, "every problem of the packaged recording has one"
        return found

    def said(self, problem: Problem, config: KernelConfig) -> str:
        text = self.language.write(problem, config)
        assert text is not None, "the language expresses every kernel without PDL"
        return text

    def write_archive(self, path: Path) -> None:
        """Write the lesson of the supervised stage: the fastest kernel of each training problem."""
        rows = [{"problem": p.key, "answer": self.said(p, self.best(p)[0])} for p in self.split.training]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rivals(self) -> dict[str, Rows]:
        """Return answers that need no model.

        These are recorded kernels by chance, and the most frequent winners of the training problems. The last are the
        winners of the nearest training problems of the same layout.
        """
        draw, count = random.Random(self.seed), self.samples
        often = Counter(self.best(p)[0] for p in self.split.training)
        frequent = [config for config, _ in often.most_common(count)]
        found: dict[str, Rows] = {"random_recorded": [], "most_frequent": [], "nearest_problem": []}
        for problem in self.split.held_out:
            chosen = {
                "random_recorded": draw.choices(self._recorded(problem), k=count),
                "most_frequent": frequent,
                "nearest_problem": [self.best(p)[0] for p in self._nearest(problem)[:count]],
            }
            for name, configs in chosen.items():
                found[name].append((problem, [self.said(problem, config) for config in configs]))
        return found

    def _recorded(self, problem: Problem) -> list[KernelConfig]:
        recording, row = self.recording, self.recording.row(problem)
        passed = recording.status[row] == STATUS_CODES[Status.PASSED]
        return [c for c, ok in zip(recording.catalogue, passed, strict=True) if ok and not c.pdl]

    def _nearest(self, problem: Problem) -> list[Problem]:
        def distance(other: Problem) -> float:
            return sum(math.log(getattr(problem, x) / getattr(other, x)) ** 2 for x in "mnk")

        return sorted((p for p in self.split.training if p.layout == problem.layout), key=distance)

    def figures(self, rows: Rows) -> dict[str, Any]:
        """Return rates and speeds of answers, each as [value, low, high]."""
        judged = self._judge.judge([(problem, text) for problem, texts in rows for text in texts])
        outcomes = [one.outcome for one in judged]
        unparsed = [outcome.startswith("refused") for outcome in outcomes]
        speeds, place = list[list[float]](), 0
        for problem, texts in rows:
            best_us = self.best(problem)[1]
            speeds.append([speed_of(one, best_us) for one in judged[place : place + len(texts)]])
            place += len(texts)
        recorded = [speed for row in speeds for speed in row if speed]
        return {
            "answers": len(judged),
            "parsed": rate([not each for each in unparsed]),
            "legal": rate([not bad and o != Status.ILLEGAL for bad, o in zip(unparsed, outcomes, strict=True)]),
            "recorded": rate([outcome == Status.PASSED for outcome in outcomes]),
            "first_speed": bootstrap([row[0] for row in speeds], self.seed),
            "mean_speed": bootstrap([statistics.fmean(row) for row in speeds], self.seed),
            "best_of_samples_speed": bootstrap([max(row) for row in speeds], self.seed),
            "mean_speed_of_recorded": statistics.fmean(recorded) if recorded else None,
            "mean_reward": statistics.fmean(one.parts.total for one in judged if one.parts is not None),
        }


def speed_of(judged: JudgedAnswer, best_us: float) -> float:
    return best_us / judged.us if judged.outcome == Status.PASSED and judged.us else 0.0


def rate(hits: Sequence[bool]) -> list[float]:
    low, high = wilson_interval(sum(hits), len(hits))
    return [sum(hits) / len(hits), low, high]


def bootstrap(values: Sequence[float], seed: int) -> list[float]:
    """Return the mean and its 95% interval over resampled values."""
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return [statistics.fmean(values), means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]]


def sampled(model: str, bench: KnobBench) -> Iterator[tuple[Problem, list[str], int]]:
    """Yield each held-out problem with the model's answers, and their tokens."""
    import torch

    # The first stage has none before it, whose model would be loaded instead.
    settings = TrainSettings(model, (), "supervised", language=bench.language.name, archive="unused")
    loaded = load_model(Path(), settings, bf16=False)
    tokenizer, network = loaded.tokenizer, loaded.model.eval()
    torch.manual_seed(bench.seed)
    problems = bench.split.held_out
    for start in range(0, len(problems), PROMPTS_AT_ONCE):
        part = problems[start : start + PROMPTS_AT_ONCE]
        texts = [prompt_messages(bench.language.prompt(p), chat=False) for p in part]
        asked = tokenizer(texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            made = network.generate(
                asked["input_ids"], attention_mask=asked["attention_mask"], do_sample=True, temperature=1.0, top_k=0,
                top_p=1.0, num_return_sequences=bench.samples, max_new_tokens=bench.language.max_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        written = made[:, asked["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(written, skip_special_tokens=True)
        tokens = int((written != tokenizer.pad_token_id).sum())
        for i, problem in enumerate(part):
            yield problem, answers[i * bench.samples :][: bench.samples], tokens if i == len(part) - 1 else 0


class Progress:
    """Says each line with the time, and keeps the seconds of each part over interruptions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self._last = time.monotonic()

    def say(self, part: str, text: str) -> None:
        now = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now
        write_json(self.path, self.seconds)
        print(f"{sum(self.seconds.values()) / 60:.1f} min, {part}: {text}", flush=True)


def evaluated(name: str, model: str, bench: KnobBench, run: Path, progress: Progress) -> dict[str, Any]:
    """Return the figures of a model on held-out problems; a finished evaluation is read from its file."""
    path = run / f"answers_{name}.json"
    part = f"evaluation {name}"
    if not path.exists():
        rows, tokens = list[Any](), 0
        for problem, texts, count in sampled(model, bench):
            rows.append([problem.key, texts])
            tokens += count
            if count:
                progress.say(part, f"{len(rows)} of {len(bench.split.held_out)} problems")
        write_json(path, {"tokens": tokens, "rows": rows})
    kept = read_object(path, "the answers of an evaluation", "remove the file")
    found = bench.figures([(Problem.from_key(key), texts) for key, texts in kept["rows"]])
    progress.say(part, line_of(found))
    return {**found, "tokens": kept["tokens"]}


def line_of(figures: Mapping[str, Any]) -> str:
    names = ("parsed", "legal", "recorded", "mean_speed", "best_of_samples_speed")
    return ", ".join(f"{name} {figures[name][0]:.3f}" for name in names)


def stage_settings(arguments: argparse.Namespace, stage: str, bench: KnobBench, archive: Path) -> TrainSettings:
    shared = {"stage": stage, "language": "config", "seed": arguments.seed, "cpu": True}
    model, every = str(arguments.gguf), arguments.save_every
    if stage == "supervised":
        return TrainSettings(model, (), steps=arguments.supervised_steps, archive=str(archive), save_every=every,
                             lr=arguments.supervised_lr, **shared)  # fmt: skip
    return TrainSettings(
        model, bench.split.training, steps=arguments.speed_steps, group=arguments.group, prompts=arguments.prompts,
        device=f"replay:{GPU}", lr=arguments.speed_lr, kl=0.0, micro_batch=min(MICRO_BATCH, arguments.group),
        save_every=every, **shared,
    )  # fmt: skip


def curve(run: Path, stage: str) -> list[dict[str, Any]]:
    """Return the log of a stage, a row per step."""
    wanted = {
        "step": "step", "loss": "loss", "token_accuracy": "token_accuracy", "entropy": "entropy",
        "share_compiled": "share_legal", "share_passed": "share_recorded", "answer_tokens_mean": "answer_tokens_mean",
    }  # fmt: skip
    rows = []
    for line in (run / stage / "log.jsonl").read_text().splitlines():
        found = json.loads(line)
        rows.append({ours: found[theirs] for theirs, ours in wanted.items() if theirs in found})
        if "rewards" in found:
            rows[-1]["reward"] = found["rewards"]["total"]["mean"]
    return rows


def sha_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def run_bench(arguments: argparse.Namespace, bench: KnobBench, wanted: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate in turns; return the result file's content."""
    run, archive = arguments.run, arguments.run / "archive.jsonl"
    progress = Progress(run / "seconds.json")
    bench.write_archive(archive)
    evaluations = {name: bench.figures(rows) for name, rows in bench.rivals().items()}
    for name, found in evaluations.items():
        progress.say(name, line_of(found))
    evaluations["base"] = evaluated("base", str(arguments.gguf), bench, run, progress)
    weights = {"base": sha_of(arguments.gguf)}
    for stage in STAGES:
        settings = stage_settings(arguments, stage, bench, archive)
        trained = train(run, settings, bench.language, True, lambda text, stage=stage: progress.say(stage, text))
        evaluations[stage] = evaluated(stage, str(trained.final), bench, run, progress)
        weights[stage] = sha_of(trained.final / "model.safetensors")
    curves = {stage: curve(run, stage) for stage in STAGES}
    written = [row["answer_tokens_mean"] * arguments.group * arguments.prompts for row in curves["speed"]]
    return {
        "settings": wanted,
        "problems": {"training": len(bench.split.training), "held_out": [p.key for p in bench.split.held_out]},
        "weights_sha256": weights,
        "evaluations": evaluations,
        "curves": curves,
        "seconds": progress.seconds,
        "training_rows": {"supervised": arguments.supervised_steps * SUPERVISED_ROWS_PER_STEP, "speed": len(written)
                          * arguments.group * arguments.prompts},
        "answer_tokens": {"speed": round(sum(written))},
        "provenance": collect_provenance(script_command("benchmarks/knob_training.py"), None),
    }  # fmt: skip


def claim_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings, after a comparison with those of an interrupted run in the same folder.

    Raises:
        UsageError: that run had others, by which its answers would be of another experiment.
    """
    import torch

    own = {name: value for name, value in vars(arguments).items() if name not in ("out", "run", "gguf", "save_every")}
    wanted = {**own, "weights": sha_of(arguments.gguf), "threads": torch.get_num_threads()}
    path = arguments.run / "settings.json"
    if path.exists():
        was = read_object(path, "the settings of a run", "pass another --run")
        check_same_settings(f"{arguments.run} has other settings", was, wanted, "repeat them, or pass another --run")
    write_json(path, wanted)
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=Path("models/smollm2-135m.gguf"))
    parser.add_argument("--supervised-steps", type=int, default=400, help="of 8 answers each")
    parser.add_argument("--supervised-lr", type=float, default=2e-4)
    parser.add_argument("--speed-steps", type=int, default=60, help="of group x prompts answers each")
    parser.add_argument("--speed-lr", type=float, default=5e-6)
    parser.add_argument("--group", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step")
    parser.add_argument("--held-out", type=int, default=100, help="held-out problems that are asked, at most")
    parser.add_argument("--samples", type=int, default=8, help="answers to a held-out problem")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=25, help="steps between checkpoints of 1.6 GB")
    parser.add_argument("--run", type=Path, default=Path("runs/knob_training"))
    parser.add_argument("--out", type=Path, default=Path("results/h200/knob_training.json"))
    arguments = parser.parse_args()
    with resumable("the last checkpoint is in the run's folder"):
        recording = Recording.load(GPU)
        split = split_problems(recording.problems, arguments.held_out, arguments.seed)
        bench = KnobBench(recording, language_of("config"), split, arguments.samples, arguments.seed)
        arguments.run.mkdir(parents=True, exist_ok=True)
        wanted = claim_run(arguments)
        write_json(arguments.out, run_bench(arguments, bench, wanted))
    print(f"result: {arguments.out}")


if __name__ == "__main__":
    main()
