"""The languages of answers, by name."""

from __future__ import annotations

from outblas.core.errors import unknown_name
from outblas.core.gpu_records import reference_gpu
from outblas_lab.llm.train.answer_language import Language
from outblas_lab.llm.train.cuda_answers import CudaAnswers
from outblas_lab.llm.train.knob_words import KnobWords

LANGUAGES = ("cuda", "knobs")


def language_of(name: str) -> Language:
    """Return a new language object by its name, ``cuda`` or ``knobs``, in lower case.

    Example: ``language_of("knobs")`` returns a :class:`outblas_lab.llm.train.knob_words.KnobWords`,
    ``language_of("cuda")`` a :class:`outblas_lab.llm.train.cuda_answers.CudaAnswers`.

    Raises:
        UsageError: no such language.
    """
    if name == "cuda":
        return CudaAnswers(reference_gpu())
    if name == "knobs":
        return KnobWords()
    raise unknown_name("language", name, LANGUAGES, "pass one of them as --language")
