"""``--language`` by name."""

from __future__ import annotations

from outblas.errors import UsageError
from outblas.train_llm.language import KnobWords, Language

LANGUAGES = ("cuda", "knobs")


def language_of(name: str) -> Language:
    """Raises UsageError for an unknown name."""
    if name == "knobs":
        return KnobWords()
    raise UsageError(f"unknown language {name!r}", " or ".join(LANGUAGES), "pass one of them as --language")
