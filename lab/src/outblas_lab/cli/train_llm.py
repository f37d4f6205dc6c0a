"""``outblas train-llm``: train a language model to write kernels, with rewards from the evaluator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outblas.cli.common import AccOption, DtypeOption, LayoutOption, integers, mnk_words, out, print_result

if TYPE_CHECKING:
    from outblas_lab.llm.train.answer_language import Language
    from outblas_lab.llm.train.settings import TrainSettings

LanguageOption = Annotated[
    str | None, typer.Option(help="cuda: kernels or configurations; knobs: a toy sentence (random:tiny's).")
]
AnswererOption = Annotated[
    str, typer.Option(help="Who answers: compile (no GPU), cuda:N, or a file of recorded kernels.")
]
GpusOption = Annotated[str | None, typer.Option(help="GPUs that time, e.g. 1,2; another one trains. No --device then.")]
ArchiveOption = Annotated[
    Path | None,
    typer.Option(help="A store or JSON lines of passing kernels: to learn from (supervised), or to show (GRPO)."),
]
ContrastOption = Annotated[
    bool, typer.Option(help="Prompts of GRPO show two earlier kernels, and ask why one is faster.")
]
VllmOption = Annotated[
    str | None, typer.Option(help="Address of a vLLM server that generates answers, e.g. http://localhost:8000.")
]
MemoryOption = Annotated[float, typer.Option(help="Of GPU memory, for training where it shares the GPU with timing.")]


def train_llm(
    model: Annotated[str, typer.Option(help="Name or folder of a causal language model, or random:tiny.")],
    problems: Annotated[str, typer.Option(help="Problems M_N_K, separated by commas.")] = "512_512_512",
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    stage: Annotated[str, typer.Option(help="supervised, general, correctness or speed.")] = "correctness",
    steps: Annotated[int, typer.Option(help="Optimiser steps in all.")] = 100,
    group: Annotated[int, typer.Option(help="Answers per prompt.")] = 8,
    prompts: Annotated[int, typer.Option(help="Prompts per step, over all processes.")] = 1,
    micro_batch: Annotated[int | None, typer.Option(help="Answers per pass of a process; by default all.")] = None,
    language: LanguageOption = None,
    device: AnswererOption = "compile",
    gpus: GpusOption = None,
    proof: Annotated[str, typer.Option(help="full, or cell: on the timed operands only.")] = "full",
    archive: ArchiveOption = None,
    contrast: ContrastOption = True,
    turns: Annotated[int, typer.Option(help="Turns of a conversation at most; each is a step of its own.")] = 1,
    vllm: VllmOption = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate; by default 1e-6, with LoRA 1e-5.")] = None,
    lora: Annotated[int, typer.Option(help="Rank of LoRA adapters; 0 trains all weights.")] = 0,
    kl: Annotated[float, typer.Option(help="Weight of the KL divergence from the first model.")] = 0.02,
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, tokens.")] = None,
    least_std: Annotated[float, typer.Option(help="Least std in the division of a group's rewards.")] = 0.05,
    clip: Annotated[float, typer.Option(help="Largest advantage.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling and training.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    batch_seconds: Annotated[float, typer.Option(help="Time limit of a step's evaluations.")] = 600.0,
    memory_fraction: MemoryOption = 0.7,
    cpu: Annotated[bool, typer.Option(help="Train on the CPU where there is a GPU, too.")] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard logs into the stage's folder.")] = False,
    wandb: Annotated[bool, typer.Option(help="Log to Weights & Biases; WANDB_MODE=offline keeps it on disk.")] = False,
    run: Annotated[Path, typer.Option(help="Directory of stages, checkpoints and logs.")] = Path("runs/train-llm"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stage from its last checkpoint.")] = False,
) -> None:
    """Train a language model to write kernels: supervised, then GRPO with rewards from compiler, proof and clock."""
    from outblas.core.problem import Problem
    from outblas_lab.llm.train.languages import language_of
    from outblas_lab.llm.train.settings import TrainSettings
    from outblas_lab.llm.train.training_folder import RANDOM_TINY

    _silence_progress_bars()
    if gpus is not None:
        device = f"cuda:{','.join(map(str, integers('--gpus', gpus)))}"
    chosen = language_of(language or ("knobs" if model == RANDOM_TINY else "cuda"))
    settings = TrainSettings(
        model, tuple(Problem.from_mnk(text, layout, dtype, acc) for text in mnk_words(problems)), stage, steps, group,
        prompts, micro_batch, chosen.name, device, proof, None if archive is None else str(archive), lr, lora, kl,
        temperature, max_tokens, least_std, clip, seed, save_every, batch_seconds, memory_fraction, tensorboard, wandb,
        cpu, contrast, vllm, turns,
    )  # fmt: skip
    _train(run, settings, chosen, resume)


def _train(run: Path, settings: TrainSettings, language: Language, resume: bool) -> None:
    """Train the stage; the first process says what it does and where it leaves its files."""
    from outblas_lab.llm.train.settings import GENERAL
    from outblas_lab.llm.train.stages import train

    first = int(os.environ.get("RANK", "0")) == 0

    def say(text: str) -> None:
        if first:
            out.print(text, markup=False)

    try:
        trained = train(run, settings, language, resume, say)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the last checkpoint is kept: add --resume to the command") from None
    if trained.best is not None:
        say(f"best speed-up: {trained.best:.3f}x of the fastest baseline at least")
    stage = settings.stage
    say(f"{stage}: {trained.steps} steps, {trained.taken} of them now; model: {trained.final}")
    say(f"log: {run / stage / 'log.jsonl'}")
    files = {"model": trained.final, "log": run / stage / "log.jsonl"}
    if stage != "supervised":
        files |= {"answers": run / stage / "answers.jsonl"}
        files |= {"kernels": run / ("tasks.sqlite" if stage == GENERAL else "store.sqlite")}
        say(f"answers: {files['answers']}; kernels: {files['kernels']}")
    if first:
        print_result(
            "train-llm", files, stage=stage, steps=trained.steps, taken=trained.taken, best_speedup=trained.best
        )


def _silence_progress_bars() -> None:
    """Switch off the bars of transformers, datasets and the hub, which would mix with the command's own lines."""
    from datasets import disable_progress_bars
    from huggingface_hub.utils import disable_progress_bars as disable_hub_bars
    from transformers.utils import logging

    logging.disable_progress_bar()
    disable_progress_bars()
    disable_hub_bars()
