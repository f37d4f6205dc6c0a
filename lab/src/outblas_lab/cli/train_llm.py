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
    str | None,
    typer.Option(
        help="Language of the answers: cuda (kernels or configs), config (JSON knobs), or knobs (toy; random:tiny)."
    ),
]
AnswererOption = Annotated[
    str,
    typer.Option(
        help="Evaluator: cuda:N, compile (only compiles; no GPU), a file of recorded kernels, or replay:h200."
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(help="GPUs for timing, e.g. 1,2, instead of --device. Training itself runs on a different GPU."),
]
ArchiveOption = Annotated[
    Path | None,
    typer.Option(
        help="Store or JSON Lines file of passing kernels, to train on (supervised) or to show in prompts (GRPO)."
    ),
]
ContrastOption = Annotated[
    bool, typer.Option(help="Show two earlier kernels in GRPO prompts, and ask why one is faster.")
]
VllmOption = Annotated[
    str | None, typer.Option(help="URL of a vLLM server that generates answers, e.g. http://localhost:8000.")
]
MemoryOption = Annotated[
    float, typer.Option(help="Fraction of GPU memory that training may use on a GPU that also times kernels.")
]


def train_llm(
    model: Annotated[
        str, typer.Option(help="Name, directory or GGUF file of a causal language model, or random:tiny (a toy).")
    ],
    problems: Annotated[str, typer.Option(help="Comma-separated problem sizes M_N_K.")] = "512_512_512",
    layout: LayoutOption = "tn",
    dtype: DtypeOption = "fp16",
    acc: AccOption = "fp32",
    stage: Annotated[str, typer.Option(help="Stage: supervised, general, correctness or speed.")] = "correctness",
    steps: Annotated[int, typer.Option(help="Total number of optimizer steps.")] = 100,
    group: Annotated[int, typer.Option(help="Number of answers per prompt.")] = 8,
    prompts: Annotated[int, typer.Option(help="Number of prompts per step, across all processes.")] = 1,
    micro_batch: Annotated[int | None, typer.Option(help="Answers per pass in each process (default: all).")] = None,
    language: LanguageOption = None,
    device: AnswererOption = "compile",
    gpus: GpusOption = None,
    proof: Annotated[str, typer.Option(help="Kind of proof: full, or cell (checks only the timed operands).")] = "full",
    archive: ArchiveOption = None,
    contrast: ContrastOption = True,
    turns: Annotated[int, typer.Option(help="Maximum number of turns per conversation; each turn is a step.")] = 1,
    vllm: VllmOption = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: 1e-6, or 1e-5 with LoRA).")] = None,
    lora: Annotated[int, typer.Option(help="Rank of the LoRA adapters; 0 trains all weights.")] = 0,
    kl: Annotated[float, typer.Option(help="Coefficient of the KL divergence from the initial model.")] = 0.02,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens per answer.")] = None,
    least_std: Annotated[float, typer.Option(help="Lower bound for the standard deviation of group rewards.")] = 0.05,
    clip: Annotated[float, typer.Option(help="Upper bound for the advantage's magnitude.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Random seed for sampling and training.")] = 0,
    save_every: Annotated[int, typer.Option(help="Number of steps between checkpoints.")] = 50,
    batch_seconds: Annotated[float, typer.Option(help="Time limit in seconds for each step's evaluations.")] = 600.0,
    memory_fraction: MemoryOption = 0.7,
    cpu: Annotated[bool, typer.Option(help="Train on the CPU even if a GPU is available.")] = False,
    tensorboard: Annotated[bool, typer.Option(help="Write TensorBoard logs to the stage directory.")] = False,
    wandb: Annotated[bool, typer.Option(help="Log to Weights & Biases; WANDB_MODE=offline logs to disk.")] = False,
    run: Annotated[Path, typer.Option(help="Directory for stages, checkpoints and logs.")] = Path("runs/train-llm"),
    resume: Annotated[bool, typer.Option("--resume", help="Resume the stage from its last checkpoint.")] = False,
) -> None:
    """Train a language model to write kernels: supervised, or by GRPO with rewards for compiling, proofs and speed."""
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
        raise KeyboardInterrupt("interrupted; the last checkpoint is kept: add --resume to continue") from None
    if trained.best is not None:
        say(f"best speedup: at least {trained.best:.3f}x over the fastest baseline")
    stage = settings.stage
    say(f"{stage}: {trained.steps} steps, {trained.taken} in this run; model: {trained.final}")
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
