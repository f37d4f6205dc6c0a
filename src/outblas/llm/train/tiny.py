"""``random:tiny``: a random small causal language model with one token a word, made on the spot, without a network."""

from __future__ import annotations

from pathlib import Path

from outblas.core.errors import UsageError
from outblas.llm.train.answer_language import Language
from outblas.llm.train.knob_words import KnobWords
from outblas.llm.train.training_folder import publish_folder

RANDOM_TINY = "random:tiny"
_SPECIAL = ("<pad>", "<eos>", "<unk>")


def make_tiny(folder: Path, language: Language, seed: int = 0) -> Path:
    """Write a tiny random Llama model and its tokenizer into a folder and return the folder. An existing one is kept.

    It has two layers of width 64, with weights of a normal distribution. So it writes every word about as often. Its
    vocabulary is that of the language, with ``<pad>``, ``<eos>`` and ``<unk>``. The folder is as ``save_pretrained``
    writes it, with ``config.json`` and ``model.safetensors``.

    Args:
        language: language whose words it knows; must be :class:`outblas.llm.train.knob_words.KnobWords`.

    Raises:
        UsageError: the language is another, even if the folder exists.
        RecordError: the folder cannot be written.
    """
    if not isinstance(language, KnobWords):
        raise UsageError(f"{RANDOM_TINY} with --language {language.name}", "--language knobs", "or name a real model")
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
