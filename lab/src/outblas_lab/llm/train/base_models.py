"""The model that a stage trains: base, what an earlier stage left, or a random one; all weights or LoRA."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import ToolchainMissing, UsageError, unknown_name
from outblas.core.install_hint import install_hint
from outblas_lab.llm.train.answer_language import Language
from outblas_lab.llm.train.knob_words import KnobWords
from outblas_lab.llm.train.settings import TrainSettings
from outblas_lab.llm.train.training_folder import FINAL, RANDOM_TINY, STAGES, publish_folder

_NEEDED = ("trl", "peft", "accelerate", "datasets", "transformers", "torch")
_INSTALL = install_hint("gpu", "train-llm")
_ADAPTER = "adapter_config.json"


def check_installed() -> None:
    """Check that everything that training needs is installed; import nothing, and return None.

    These are ``trl``, ``peft``, ``accelerate``, ``datasets``, ``transformers`` and ``torch``.

    Raises:
        ToolchainMissing: a package is missing; the error names all that are.
    """
    import importlib.util

    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ToolchainMissing(f"missing packages: {', '.join(missing)}", ", ".join(_NEEDED), _INSTALL)


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer, ready for a trainer.

    Attributes:
        lora: peft configuration of a new adapter; None if all weights are trained or the model has its adapter.
    """

    model: Any
    tokenizer: Any
    lora: Any = None

    @property
    def chat(self) -> bool:
        """True if prompts are conversations: the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))


def starting_model(run: Path, stage: str, model: str) -> str:
    """Return the model with which a stage begins, as text; UsageError if no stage has that name.

    It is the path ``<run>/<earlier stage>/final`` of the last earlier stage that has it, else ``model``.
    """
    if stage not in STAGES:
        raise unknown_name("stage", stage, STAGES, "pass one of them as stage")
    for earlier in reversed(STAGES[: STAGES.index(stage)]):
        if (run / earlier / FINAL).is_dir():
            return str(run / earlier / FINAL)
    return model


def load_model(run: Path, settings: TrainSettings, bf16: bool) -> LoadedModel:
    """Load the model and the tokenizer of a stage.

    Weights are fp32, trained under bf16 autocast on a GPU: steps of 1e-6 vanish in bf16. With LoRA the base, which is
    not trained, is bf16 there. An earlier stage's LoRA adapter is trained further, so ``settings.lora`` must be its
    rank.

    Raises:
        UsageError: the model cannot be loaded. Or an earlier stage left a LoRA adapter, and ``settings.lora`` is 0 or
            another rank.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = starting_model(run, settings.stage, settings.model)
    if source == RANDOM_TINY:
        source = str(run / "base")  # made by the first process
    adapter = Path(source) / _ADAPTER
    trained = adapter.is_file()
    about = json.loads(adapter.read_text(encoding="utf-8")) if trained else {}
    if trained and about.get("r") != settings.lora:
        rank = about.get("r")
        raise UsageError(
            f"--lora {settings.lora} does not match {source}, a LoRA adapter of rank {rank}",
            f"--lora {rank}, as in the previous stage",
            "pass that rank, or start a new run",
        )
    base = str(about["base_model_name_or_path"]) if trained else source
    dtype = torch.bfloat16 if bf16 and settings.lora else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(**_file(source), padding_side="left", truncation_side="left")
        model = _plain(AutoModelForCausalLM.from_pretrained(**_file(base), dtype=dtype))
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(
            f"model {source!r} cannot be loaded ({' '.join(str(error).split())[:200]})",
            "the name, folder or GGUF file of a causal language model, or random:tiny",
            "correct --model, or download the model first",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if settings.language == "config":
        tokenizer.chat_template = None  # roles would be half of its short prompts
    if not settings.lora:
        return LoadedModel(model, tokenizer)
    from peft import LoraConfig, PeftModel

    if trained:
        return LoadedModel(PeftModel.from_pretrained(model, source, is_trainable=True), tokenizer)
    lora = LoraConfig(r=settings.lora, lora_alpha=2 * settings.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    return LoadedModel(model, tokenizer, lora)


def _file(source: str) -> dict[str, str]:
    """Return the arguments of ``from_pretrained`` for a name, a folder or a GGUF file."""
    path = Path(source)
    if path.suffix != ".gguf":
        return {"pretrained_model_name_or_path": source}
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _plain(model: Any) -> Any:
    """Return a model of the same weights without the mark of a GGUF file, which transformers refuses to train."""
    if vars(model.config).pop("quantization_config", None) is None:
        return model
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    return plain


_SPECIAL = ("<pad>", "<eos>", "<unk>")


def make_tiny(folder: Path, language: Language, seed: int = 0) -> Path:
    """Write a tiny random Llama model and its tokenizer into a folder and return the folder. An existing one is kept.

    It has two layers of width 64, with weights of a normal distribution. So it writes every word about as often. Its
    vocabulary is that of the language, with ``<pad>``, ``<eos>`` and ``<unk>``. The folder is as ``save_pretrained``
    writes it, with ``config.json`` and ``model.safetensors``.

    Args:
        language: language whose words it knows; must be :class:`outblas_lab.llm.train.knob_words.KnobWords`.

    Raises:
        UsageError: the language is another, even if the folder exists.
        RecordError: the folder cannot be written.
    """
    if not isinstance(language, KnobWords):
        wrong = f"{RANDOM_TINY} rejects --language {language.name}"
        raise UsageError(wrong, "--language knobs", "change --model or --language")
    if folder.exists():
        return folder
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [*_SPECIAL, *dict.fromkeys(language.vocabulary())]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, eos, unknown = _SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, unk_token=unknown, padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    size = -(-len(words) // 16) * 16  # tensor cores take multiples of 16
    config = LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)

    def save(scratch: Path) -> None:
        fast.save_pretrained(str(scratch))
        model.save_pretrained(str(scratch))

    return publish_folder(folder, save)
