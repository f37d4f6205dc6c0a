"""A model that is a GGUF file, as the start of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas_lab.llm.train.base_models import load_model
from outblas_lab.llm.train.settings import TrainSettings
from support.training.tiny_gguf import write_gguf


def loaded(model: Path) -> Any:
    return load_model(model.parent, TrainSettings(str(model), (), "supervised", language="config", archive="-"), False)


def test_its_weights_are_plain_ones_that_can_be_trained_and_saved(tmp_path: Path) -> None:
    for package in ("torch", "transformers", "accelerate"):
        pytest.importorskip(package)
    write_gguf(tmp_path / "tiny.gguf")
    first = loaded(tmp_path / "tiny.gguf")
    assert first.tokenizer.tokenize("abc") == ["ab", "c"]
    assert not first.chat, "prompts for configs are plain text"
    assert not getattr(first.model, "is_quantized", False) and all(p.requires_grad for p in first.model.parameters())
    first.model.save_pretrained(tmp_path / "saved")
    first.tokenizer.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved")
    assert again.tokenizer.tokenize("abc") == ["ab", "c"]
    weights = again.model.state_dict()
    assert all((weights[name] == value).all() for name, value in first.model.state_dict().items())


def test_a_file_that_is_none_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="cannot be loaded"):
        loaded(tmp_path / "missing.gguf")
