"""Settings of a stage of training, and the claim on its folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outblas.core.errors import UsageError, unknown_name
from outblas.core.files import write_json
from outblas.core.journal import check_same_settings
from outblas.core.plain_files import read_object
from outblas.core.problem import Problem
from outblas_lab.llm.train.training_folder import RANDOM_TINY, STAGES

#: The stage of small general kernels, which are proved and not timed.
GENERAL = "general"
#: Learning rates where none is given: of all weights, of LoRA's, of a random model.
_LR, _LR_LORA, _LR_TINY = 1e-6, 1e-5, 3e-3
#: Settings that may differ when a stage is resumed: lengths, intervals and limits, not the data or the method.
_FREE = ("steps", "save_every", "batch_seconds", "memory_fraction", "tensorboard", "wandb", "cpu", "micro_batch")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one stage.

    Attributes:
        model: name or path of the base model, or ``random:tiny``.
        problems: problems of the prompts, in this order; prompts are drawn from them. The stage ``general`` takes M and
            K of each for its tasks.
        stage: ``supervised``, or one of GRPO: ``general`` (small general kernels), ``correctness`` (every proven kernel
            is worth the same) or ``speed``.
        steps: optimiser steps in all, with those of an interrupted stage.
        group: answers per prompt, at least 2 (GRPO).
        prompts: prompts per step, over all processes.
        micro_batch: answers per forward and backward pass of a process; None takes its whole part of a step.
        language: one of :data:`outblas_lab.llm.train.languages.LANGUAGES`. It is not checked here;
            :func:`outblas_lab.llm.train.stages.train` compares it with its own language.
        device: see :func:`outblas_lab.llm.train.answer_judge.evaluator_of`. It is not checked here.
        proof: as for ``device``.
        archive: JSON lines or a store of evaluations, which the supervised stage needs. The prompts of the others draw
            from its timed kernels, too.
        lr: learning rate; None chooses by the kind of model: 3e-3 for ``random:tiny``, 1e-5 with LoRA, else 1e-6.
        lora: rank of LoRA's matrices; 0 trains all weights.
        kl: weight of the KL divergence from the model at the beginning of the stage.
        max_tokens: most tokens of an answer; None takes the language's.
        least_std: see :func:`outblas_lab.llm.train.rewards.advantages`.
        clip: as for ``least_std``.
        seed: seed of the training, and of a random model's weights.
        batch_seconds: time limit of a step's evaluations, seconds.
        memory_fraction: share of the GPU's memory for training, above 0 to 1, if candidates are timed on the same GPU.
        contrast: prompts of GRPO show two earlier kernels of different speed, once two were proven.
        turns: most turns of a conversation of GRPO. Each is a step that shows the outcome of the best answer before.
        vllm: address of a vLLM server that generates the answers of GRPO; None: the training processes do.

    Raises:
        UsageError: the stage is unknown, a figure is out of its range, or the archive (supervised) or the problems
            (GRPO) are missing.
    """

    model: str
    problems: tuple[Problem, ...]
    stage: str = "correctness"
    steps: int = 100
    group: int = 8
    prompts: int = 1
    micro_batch: int | None = None
    language: str = "cuda"
    device: str = "compile"
    proof: str = "full"
    archive: str | None = None
    lr: float | None = None
    lora: int = 0
    kl: float = 0.02
    temperature: float = 1.0
    max_tokens: int | None = None
    least_std: float = 0.05
    clip: float = 2.0
    seed: int = 0
    save_every: int = 50
    batch_seconds: float = 600.0
    memory_fraction: float = 0.7
    tensorboard: bool = False
    wandb: bool = False
    cpu: bool = False
    contrast: bool = True
    vllm: str | None = None
    turns: int = 1

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise unknown_name("stage", self.stage, STAGES, "pass one of them as --stage")
        supervised, fraction = self.stage == "supervised", self.memory_fraction
        positive = {
            "temperature": self.temperature, "least-std": self.least_std, "clip": self.clip, "lr": self.lr,
            "batch-seconds": self.batch_seconds, "max-tokens": self.max_tokens, "micro-batch": self.micro_batch,
        }  # fmt: skip
        rules = (
            (not self.problems and not supervised, "no problems given", "at least one", "pass --problems 512_512_512"),
            (self.steps < 1, f"--steps is {self.steps}", "1 or more", "pass a larger --steps"),
            (self.group < 2 and not supervised, f"--group is {self.group}", "2 or more", "pass a larger --group"),
            (self.prompts < 1, f"--prompts is {self.prompts}", "1 or more", "pass a larger --prompts"),
            (self.turns < 1, f"--turns is {self.turns}", "1 or more", "pass a larger --turns"),
            (self.lora < 0, f"--lora is {self.lora}", "a rank of 0 or more", "pass a larger --lora"),
            (self.save_every < 1, f"--save-every is {self.save_every}", "1 or more", "correct --save-every"),
            *(
                (not value > 0, f"--{name} is {value:g}", "a number above 0", f"pass a larger --{name}")
                for name, value in positive.items()
                if value is not None
            ),
            (not self.kl >= 0, f"--kl is {self.kl:g}", "0 or more", "pass a larger --kl"),
            (not 0 < fraction <= 1, f"--memory-fraction is {fraction:g}", "above 0, at most 1", "pass e.g. 0.7"),
            (
                self.vllm is not None and self.language == "knobs",
                "--vllm conflicts with --language knobs",
                "--language cuda; the toy grammar works only in the training process",
                "omit --vllm",
            ),
            (supervised and not self.archive, "--archive is missing", "a training archive", "pass --archive FILE"),
        )
        for broken, wrong, expected, do in rules:
            if broken:
                raise UsageError(wrong, expected, do)

    @property
    def learning_rate(self) -> float:
        if self.lr is not None:
            return self.lr
        return _LR_TINY if self.model == RANDOM_TINY else _LR_LORA if self.lora else _LR

    @property
    def paired(self) -> bool:
        """Return whether prompts show pairs of kernels. General kernels have no times, and configs short prompts."""
        return self.contrast and self.stage not in ("supervised", GENERAL) and self.language != "config"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "problems": [p.key for p in self.problems], "lr": self.learning_rate}


def claim_folder(folder: Path, settings: TrainSettings, resume: bool, begun: bool) -> None:
    """Write a stage's settings into ``folder/settings.json``, or compare them with those there if ``resume`` is true.

    Args:
        folder: the stage's folder, which exists.
        resume: continue a training that was begun there. A missing file is written then, too.
        begun: whether the folder holds a checkpoint or a trained model.

    Raises:
        UsageError: it holds a training and ``resume`` is False, or it was started with other settings.
        RecordError: the file cannot be read or written.
    """
    path = folder / "settings.json"
    wanted = replace(settings).to_json()
    if begun and not resume:
        raise UsageError(
            f"{folder} contains a training run", "a new folder, or --resume", "add --resume or pass another --run"
        )
    if path.exists() and resume:
        was = read_object(path, "the settings of a stage", "pass another --run")
        was, asked = ({key: one[key] for key in one if key not in _FREE} for one in (was, wanted))
        what = f"{folder} was started with other settings"
        check_same_settings(what, was, asked, "repeat those settings, or pass another --run")
        return
    write_json(path, wanted)
