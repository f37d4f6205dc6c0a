"""Read a model's answer: a kernel as text, a config of a kernel family, or neither; never raise."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from outblas.core.config import KernelConfig, launch_of
from outblas.core.errors import ConfigError, ContractError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas_lab.llm.compact import read_config

if TYPE_CHECKING:
    from outblas_lab.custom.free_kernel import FreeKernel

CODE, CONFIG = "code", "config"
#: How blocks of either kind may be marked.
_LANGUAGES = {"cuda": CODE, "cpp": CODE, "c++": CODE, "cu": CODE, "c": CODE, "json": CONFIG}
#: How a fence begins: three or more of a kind at the start of a line, then a language.
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)")
#: Longest answer that is looked for words of a refusal, and the words.
_REFUSAL_CHARS = 2000
_REFUSAL = re.compile(
    r"\b(I(['’]m| am) (sorry|unable|not able)|I (can(['’]t|not)|won['’]t|will not) (help|assist|provide|write|comply)|"
    r"(cannot|can't|unable to) (assist|help|comply)|as an AI\b|I must decline)", re.I)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """An answer, read by :func:`read_answer`. Example: a text without words is ``Answer("empty")``.

    Attributes:
        kind: ``candidate``, or the reason for having no candidate: ``contract``, ``illegal``, ``refusal``, ``empty``,
            ``malformed`` or ``cut`` (the answer stopped at the limit of tokens).
        answer: ``code`` or ``config``, the kind of the block that was read. It is "" if no single block was: for
            ``refusal``, ``empty`` and ``cut``, and for a ``malformed`` answer with none or several.
        candidate: the kernel or config; None unless ``kind`` is ``candidate``.
        words: for ``contract``, ``illegal`` and ``malformed``, the mistake in words. For ``refusal``, the model's own
            text, on one line of at most 500 characters. For ``empty``, ``the limit of tokens was reached`` or "". Else
            "".
    """

    kind: str
    answer: str = ""
    candidate: Union[KernelConfig, FreeKernel, None] = None
    words: str = ""


def read_answer(text: str, finish: str, problem: Problem, gpu: Gpu) -> Answer:
    """Return the one candidate of an answer, or the reason for its lack. No text raises an error.

    Only closed fenced blocks count. Blocks of ``cuda``, ``cu``, ``cpp``, ``c++`` and ``c`` are code, and those of
    ``json`` are configs. A block is a candidate if it contains ``outblas-launch`` (code) or ``"family"`` (config).
    Equal candidates count once. A single block of these languages is read even if it is no candidate.

    Example: a ``json`` block of ``{"family": "sm90_wgmma_gemm", "bm": 64, "bn": 64}`` gives the kind ``candidate`` and
    the answer ``config``. The text ``hello`` gives ``malformed`` with ``stop``, and ``cut`` with ``length``. A ``cuda``
    block without a launch block gives ``contract``.

    Args:
        text: the answer. Blank text is ``empty``.
        finish: reason for the end of the answer, as the server says; ``stop`` as a rule. ``refusal`` and
            ``content_filter`` make any text a refusal. With ``length`` (the limit of tokens) a text without exactly one
            candidate is ``cut``.

    Returns:
        An answer of kind ``malformed`` for several candidates, or none. A short text without such blocks is a
        ``refusal`` if it has words of one, such as "I can't help".
    """
    if finish in ("refusal", "content_filter"):
        return Answer("refusal", words=_short(text))
    if not text.strip():
        return Answer("empty", words="the limit of tokens was reached" if finish == "length" else "")
    blocks = [(_LANGUAGES[language], body) for language, body in fenced(text) if language in _LANGUAGES]
    kernels = [(kind, body) for kind, body in blocks if ("outblas-launch" if kind == CODE else '"family"') in body]
    if len(kernels) > 1 and all(one == kernels[0] for one in kernels):
        kernels = kernels[:1]
    if len(kernels) == 1:
        kind, body = kernels[0]
        return _code(body, problem, gpu) if kind == CODE else _config(body, problem, gpu)
    if finish == "length":
        return Answer("cut")
    if not kernels and len(blocks) == 1 and blocks[0][0] == CODE:
        return _code(blocks[0][1], problem, gpu)  # without a launch block: the contract says so best
    if not kernels and len(blocks) == 1:
        return _config(blocks[0][1], problem, gpu)
    if not blocks and len(text) < _REFUSAL_CHARS and _REFUSAL.search(text):
        return Answer("refusal", words=_short(text))
    return Answer("malformed", words=f"{len(kernels)} candidates in {len(blocks)} blocks were found, one was asked for")


def fenced(text: str) -> list[tuple[str, str]]:
    r"""Return (language, body) of every fenced code block that is closed, in order.

    A fence is three or more backticks or tildes. The language is in lower case, "" if none is named. The body has every
    line between the fences, with its line break. Example: a block of ``CPP`` with the line ``x`` is ``("cpp", "x\n")``.
    """
    found = []
    fence, language, body = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if not fence:
            if mark := _FENCE.match(line):
                fence, language, body = mark[1], mark[2].lower(), []
        elif len(bare) >= len(fence) and bare == fence[0] * len(bare):
            found.append((language, "".join(body)))
            fence = ""
        else:
            body.append(line)
    return found


def _code(text: str, problem: Problem, gpu: Gpu) -> Answer:
    from outblas_lab.custom.free_kernel import FreeKernel

    try:
        kernel = FreeKernel.parse(text)
        reason = kernel.launch.why_not(problem, gpu)
    except ContractError as error:
        return Answer("contract", CODE, words=str(error))
    if reason is not None:
        return Answer("contract", CODE, words=f"the kernel does not run {problem.key}: {reason}")
    return Answer("candidate", CODE, kernel)


def _config(text: str, problem: Problem, gpu: Gpu) -> Answer:
    from outblas.kernels.legality import why_illegal

    try:
        config = read_config(json.loads(text))
        reason = why_illegal(problem, config, gpu)
    except ValueError as error:
        words = str(error) if isinstance(error, ConfigError) else f"the block is not a JSON object: {error}"
        return Answer("illegal" if isinstance(error, ConfigError) else "malformed", CONFIG, words=words)
    except (ArithmeticError, RecursionError) as error:  # of knobs that make no sense, such as a depth of 0
        return Answer("illegal", CONFIG, words=f"knobs that make no kernel ({type(error).__name__})")
    if reason is None and launch_of(config) != "plain":
        reason = "pdl and early are for callers to allow; here kernels are compared as plain launches"
    if reason is not None:
        return Answer("illegal", CONFIG, words=f"not legal for {problem.key}: {reason}")
    return Answer("candidate", CONFIG, config)


def _short(text: str) -> str:
    return " ".join(text.split())[:500]
