"""A stage of training from begin to end: supervised by trl's SFTTrainer, the others by its GRPOTrainer."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.files import lock_folder
from outblas.core.problem import Problem
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.evaluators import COMPILE_ONLY
from outblas_lab.llm.train.answer_judge import AnswerJudge, check_device, evaluator_of
from outblas_lab.llm.train.answer_language import Language, Text
from outblas_lab.llm.train.base_models import LoadedModel, check_installed, load_model, make_tiny
from outblas_lab.llm.train.dataset import prompt_rows, proven_evaluations, supervised_rows
from outblas_lab.llm.train.reward_functions import Judge, RewardFunctions
from outblas_lab.llm.train.settings import GENERAL, TrainSettings, claim_folder
from outblas_lab.llm.train.step_prompts import (
    CONVERSATIONS,
    StepPrompts,
    archive_of_stage,
    begin_archive,
    earlier_entries,
    step_trainer,
)
from outblas_lab.llm.train.task_judge import TaskJudge, task_evaluator, tasks_on
from outblas_lab.llm.train.training_folder import (
    FINAL,
    RANDOM_TINY,
    drop_later_lines,
    last_checkpoint,
    publish_folder,
    set_callbacks,
    trained_steps,
)

Say = Callable[[str], None]
#: Rows of a step of the supervised stage, over all processes.
SUPERVISED_ROWS_PER_STEP = 8


@dataclass(frozen=True)
class TrainedStage:
    """The result of a stage. Example: ``TrainedStage(Path("runs/t/speed/final"), 100, 100, 1.2)``.

    Attributes:
        best: best lower bound of a speed-up in this call; None if nothing was timed.
    """

    final: Path
    steps: int
    taken: int
    best: float | None = None


def train(
    run: Path, settings: TrainSettings, language: Language, resume: bool = False, say: Say = print
) -> TrainedStage:
    """Train one stage in ``run/<stage>``; called by every process of an ``accelerate launch``.

    A stage begins with the model that the last earlier one has left in the same run, else with ``settings.model``. The
    model is left in ``run/<stage>/final``.

    Args:
        resume: go on from the last checkpoint of a killed training. Its kernels are not evaluated again. Nothing is
            trained if all steps were taken. Without a checkpoint the stage begins anew.

    Raises:
        ToolchainMissing: a package is not installed.
        UsageError: the folder holds a training and ``resume`` is False, or one of other settings. Also if settings make
            no sense together, or ``language`` has another name than ``settings.language``.
        DeviceError: the evaluator has no GPU, or lost it.
        RecordError: the disk refuses, or another process trains in the same run.
    """
    if language.name != settings.language:  # a resumed run would compare the settings, and train something else
        wrong = f"the language is {language.name!r}, but the settings specify {settings.language!r}"
        raise UsageError(wrong, "the same language in both", f"set TrainSettings.language to {language.name!r}")
    check_installed()
    for name in ("tensorboard", "wandb"):
        if getattr(settings, name) and importlib.util.find_spec(name) is None:
            raise ToolchainMissing(f"{name} is not installed", name, f"pip install {name}, or omit --{name}")
    if settings.stage != "supervised":
        check_device(settings.device)  # before a large model is loaded
        _questions(settings, language)
        if settings.archive is not None:
            proven_evaluations(settings.archive)
    elif settings.archive is not None:
        supervised_rows(settings.archive, language, chat=False)
    warnings.filterwarnings("ignore", r".*gradient_checkpointing.* is deprecated", FutureWarning)  # trl's own use
    from accelerate.state import PartialState

    state = PartialState(cpu=settings.cpu)
    with lock_folder(run) if state.is_main_process else contextlib.nullcontext():
        return _train(run, settings, language, resume, say, state)


def _train(run: Path, settings: TrainSettings, language: Language, resume: bool, say: Say, state: Any) -> TrainedStage:
    stage = run / settings.stage
    if state.is_main_process:
        stage.mkdir(parents=True, exist_ok=True)
        checkpoint = last_checkpoint(stage)
        claim_folder(stage, settings, resume, checkpoint is not None or (stage / FINAL).exists())
        done = 0 if checkpoint is None else trained_steps(checkpoint) or 0
        for name in ("log.jsonl", "answers.jsonl", CONVERSATIONS):
            drop_later_lines(stage / name, done)
        if settings.paired and checkpoint is None:  # a resumed stage keeps its beginning, whatever its sources hold
            known = list(earlier_entries(run, settings, language))
            begin_archive(stage, known)
            say(f"{settings.stage}: {len(known)} known kernels for the prompts")
        if settings.model == RANDOM_TINY:
            make_tiny(run / "base", language, settings.seed)
    state.wait_for_everyone()
    checkpoint = last_checkpoint(stage)
    done = 0 if checkpoint is None else trained_steps(checkpoint) or 0
    if done >= settings.steps and (stage / FINAL).is_dir():
        say(f"{settings.stage}: resuming after {done} of {settings.steps} steps")
        return TrainedStage(stage / FINAL, done, 0)
    if settings.stage == "speed" and settings.device == COMPILE_ONLY:
        say("note: --device compile does not time kernels; this stage gives no speed reward")
    loaded = load_model(run, settings, _bf16(settings))
    go_on = str(checkpoint) if checkpoint is not None else None
    if settings.stage == "supervised":
        trainer, best = _supervised(stage, settings, loaded, language, say), None
        trainer.train(resume_from_checkpoint=go_on)
    else:
        trainer, best = _grpo(run, stage, settings, loaded, language, go_on, say, state.is_main_process)
    _publish(trainer, loaded, stage / FINAL, state)
    steps = int(trainer.state.global_step)
    return TrainedStage(stage / FINAL, steps, steps - done, best)


def _grpo(
    run: Path, stage: Path, settings: TrainSettings, loaded: LoadedModel, language: Language, go_on: str | None,
    say: Say, first: bool,
) -> tuple[Any, float | None]:  # fmt: skip
    from datasets import Dataset
    from trl import GRPOConfig

    with contextlib.ExitStack() as stack:
        judge = _judge(stack, run, settings, language) if first else None
        archive = archive_of_stage(stage, language, settings.seed) if first and settings.paired else None
        asked, texts = _questions(settings, language)
        prompts = StepPrompts(asked, language, loaded.chat, settings.group, settings.turns, archive, stage)
        rewards = RewardFunctions(
            judge, asked, settings.group, settings.least_std, settings.clip,
            stage / "answers.jsonl" if first else None, _make_room(settings, say), prompts.judged,
        )  # fmt: skip
        tokens = settings.max_tokens or language.max_tokens
        size = len(loaded.tokenizer)
        embedded = loaded.model.get_input_embeddings().weight.shape[0]
        arguments = GRPOConfig(
            **_common(stage, settings, settings.group * settings.prompts),
            num_generations=settings.group,
            max_completion_length=tokens,
            temperature=settings.temperature,
            generation_kwargs=language.generation(loaded.tokenizer, max(size, embedded)) or None,
            beta=settings.kl,
            scale_rewards="none",
            reward_weights=rewards.weights(),
            shuffle_dataset=True,
            **served(settings.vllm),
        )
        _one_gpu(arguments)
        rows = prompt_rows(texts, loaded.chat, settings.prompts)
        trainer = step_trainer(prompts, rewards.learned)(
            model=loaded.model, reward_funcs=rewards.functions(), args=arguments,
            train_dataset=Dataset.from_list(rows), processing_class=loaded.tokenizer, peft_config=loaded.lora,
        )  # fmt: skip
        set_callbacks(trainer, stage / "log.jsonl", say, lambda: rewards.best)
        trainer.train(resume_from_checkpoint=go_on)
        return trainer, rewards.best


def served(url: str | None) -> dict[str, Any]:
    """Return the options of trl by which a vLLM server generates the answers; empty without a server."""
    return {} if url is None else {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}


def _judge(stack: contextlib.ExitStack, run: Path, settings: TrainSettings, language: Language) -> Judge:
    """Return the judge of a GRPO stage; its store and evaluator are closed with the stack."""
    from outblas.records.store import Store

    if settings.stage == GENERAL:
        tasks = stack.enter_context(Store(run / "tasks.sqlite"))
        evaluators = lambda name: task_evaluator(name, settings.device)  # noqa: E731
        return TaskJudge(evaluators, language, tasks, settings.batch_seconds)
    evaluator = stack.enter_context(evaluator_of(settings.device, settings.proof))
    store = stack.enter_context(Store(run / "store.sqlite"))
    store.begin(evaluator.source, {"device": evaluator.source, "proof": settings.proof})
    timed = settings.stage == "speed"
    return AnswerJudge(evaluator, language, timed, store, evaluator.source, settings.batch_seconds)


def _questions(settings: TrainSettings, language: Language) -> tuple[Sequence[Problem | SmallTask], list[Text]]:
    """Return the problems or tasks of a GRPO stage, and the prompt of each."""
    if settings.stage == GENERAL:
        tasks = tasks_on(settings.problems)
        return tasks, [language.task_prompt(task) for task in tasks]
    return settings.problems, [language.prompt(problem) for problem in settings.problems]


def _supervised(stage: Path, settings: TrainSettings, loaded: LoadedModel, language: Language, say: Say) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    assert settings.archive is not None, "checked by the settings"
    rows = supervised_rows(settings.archive, language, loaded.chat)
    say(f"supervised: {len(rows)} training answers")
    arguments = SFTConfig(
        **_common(stage, settings, SUPERVISED_ROWS_PER_STEP), max_length=None, completion_only_loss=True
    )
    _one_gpu(arguments)
    trainer = SFTTrainer(
        model=loaded.model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=loaded.tokenizer,
        peft_config=loaded.lora,
    )  # fmt: skip
    set_callbacks(trainer, stage / "log.jsonl", say, lambda: None)
    return trainer


def _common(stage: Path, settings: TrainSettings, rows: int) -> dict[str, Any]:
    """Arguments of both trainers; ``rows`` are a step's, over all processes.

    Raises:
        UsageError: they cannot be shared out evenly.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    own = rows // processes
    micro = min(settings.micro_batch or own, own)
    if rows % processes or micro < 1 or own % micro:
        raise UsageError(
            f"{rows} answers per step cannot be split evenly (processes: {processes}, --micro-batch: "
            f"{settings.micro_batch or 'all'})",
            f"a multiple of {processes * (settings.micro_batch or 1)} answers per step",
            "change --group, --prompts or --micro-batch",
        )
    return {
        "output_dir": str(stage),
        "max_steps": settings.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": own // micro,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant",  # a stage may be prolonged
        "max_grad_norm": 1.0,
        "seed": settings.seed,
        "bf16": _bf16(settings),
        "use_cpu": settings.cpu,
        "gradient_checkpointing": settings.model != RANDOM_TINY and not settings.cpu,  # a CPU has memory, and no time
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": settings.save_every,
        "save_total_limit": 2,
        "report_to": [name for name in ("tensorboard", "wandb") if getattr(settings, name)] or "none",
        "disable_tqdm": not sys.stderr.isatty(),
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
        "ddp_timeout": int(max(1800.0, 4 * settings.batch_seconds)),  # the others wait while the first one evaluates
    }


def _bf16(settings: TrainSettings) -> bool:
    import torch

    return not settings.cpu and torch.cuda.is_available() and bool(torch.cuda.is_bf16_supported())


def _one_gpu(arguments: Any) -> None:
    """Give each process one GPU. Without a launcher, transformers would spread a batch over all GPUs by threads."""
    _ = arguments.device
    if getattr(arguments, "n_gpu", 0) > 1 and "WORLD_SIZE" not in os.environ:
        arguments._n_gpu = 1


def _make_room(settings: TrainSettings, say: Say) -> Callable[[], None] | None:
    """Return the step before evaluations begin: it waits for the training and frees its unused GPU memory.

    If candidates are timed on the training GPU, the training is limited to its share of memory.
    """
    import torch

    if settings.cpu or not torch.cuda.is_available():
        return None
    timed_on = re.fullmatch(r"cuda:([\d,]+)", settings.device)
    own = int(os.environ.get("LOCAL_RANK", "0"))
    if timed_on is not None and str(own) in timed_on[1].split(","):
        say(
            f"note: candidates are timed on GPU {own}, which also trains; training is limited to "
            f"{settings.memory_fraction:.0%} of its memory; pass --gpus to time on another GPU"
        )
        torch.cuda.set_per_process_memory_fraction(settings.memory_fraction, own)

    def prepare() -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    return prepare


def _publish(trainer: Any, loaded: LoadedModel, final: Path, state: Any) -> None:
    """Save the model whole; every process takes part, as sharded weights need it."""
    scratch = final.with_name(".final.saved")
    if state.is_main_process:
        shutil.rmtree(scratch, ignore_errors=True)
    state.wait_for_everyone()
    trainer.save_model(str(scratch))
    if state.is_main_process:
        loaded.tokenizer.save_pretrained(str(scratch))

        def move(folder: Path) -> None:
            for path in scratch.iterdir():
                os.replace(path, folder / path.name)
            scratch.rmdir()

        publish_folder(final, move)
    state.wait_for_everyone()
