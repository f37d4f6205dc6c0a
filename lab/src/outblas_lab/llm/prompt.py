"""Prompts: templates in ``prompts/``, filled with what is known of a problem, its kernels and the last answer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, floor_us, regime
from outblas.kernels.kernel_hash import kernel_headers
from outblas_lab.jail.small_tasks import SmallTask
from outblas_lab.llm.answer import CODE, CONFIG
from outblas_lab.llm.archive import Entry
from outblas_lab.llm.budget import Message
from outblas_lab.llm.compact import describe, describe_offered
from outblas_lab.llm.feedback import OUTCOME_KINDS, clipped

#: Outcome -> the template that follows it; a kind without one ends its chain.
FOLLOW_UPS = {kind: kind for kind in OUTCOME_KINDS if kind not in ("compiled", "unanswered")}
FOLLOW_UPS["contract"] = "contract_broken"
#: Fewer rows than this are few; a K over this many times the larger of M and N is long.
_FEW_ROWS, _LONG_K = 64, 8
#: A tile of C, for the share of the last wave that is empty.
_TILE = 128
_EMPTY_WAVE = 0.25
#: Most characters of a parent in a prompt.
_PARENT_CHARS = 40_000
#: Parts of a first prompt that a limit of tokens leaves out, in this order, until the rest fits.
CUTS = ("near problems", "meanings of knobs", "headers", "notes", "kernels")
#: Characters of a token: prompts have 2.9 with Qwen2.5-Coder's tokeniser, and 2.7 with SmolLM2's.
CHARS_PER_TOKEN = 2.7
#: Headers in `kernels/ptx/` that prompts list. Only our own generators use the others.
LISTED_HEADERS = ("types", "sync", "load", "cp_async", "mma", "mbarrier", "tma", "wgmma", "cluster")
#: A function's comment, its template line and its head up to the body.
_FUNCTION = re.compile(
    r"(?P<comment>(?:^//[^\n]*\n)*)(?P<template>^template[^\n]*\n)?"
    r"^__device__ __forceinline__ (?P<head>[^{;]*?\))\s*\{",
    re.M,
)


@dataclass(frozen=True)
class Asked:
    """The answers that a prompt requests, and its most tokens (None: no limit)."""

    kinds: Sequence[str] = (CODE, CONFIG)
    host_form: bool = True
    tokens: int | None = None


def first_prompt(
    problem: Problem, gpu: Gpu, baselines: Mapping[str, float], best_us: float | None, parents: Sequence[Entry],
    facts: Mapping[str, str], asked: Asked | None = None, near: str = "",
) -> list[Message]:  # fmt: skip
    """Return the beginning of a conversation: a list of a system message and a user message.

    Each message is a dictionary with ``role`` and ``content``. Example: ``first_prompt(problem, H200, {"lt_auto": 4.0},
    None, [], {})[0]["role"]`` is ``"system"``. The user's text begins with ``# Problem``.

    Args:
        baselines: baseline -> time in microseconds; may be empty.
        best_us: time in microseconds of the fastest proven kernel; None without one.
        parents: kernels to show: two, the slower first; or one, or none.
        facts: name of a kernel -> text on it (:func:`outblas_lab.llm.feedback.kernel_facts`). A missing name: no text.
        near: section on near problems (:meth:`outblas_lab.llm.near_problems.NearProblems.text`); may be empty.

    Raises:
        UsageError: the prompt has too many tokens even without all parts of :data:`CUTS`.
    """
    asked, floor = asked or Asked(), floor_us(problem, gpu)
    known = [us for us in (best_us, min(baselines.values(), default=None)) if us is not None]
    gap = f"The fastest that is known takes {min(known):.2f} us, {min(known) / floor:.2f}x the floor." if known else ""
    listed = ", ".join(f"{name} {us:.2f} us" for name, us in sorted(baselines.items(), key=lambda pair: pair[1]))
    for count in range(len(CUTS) + 1):
        cut = CUTS[:count]
        whole, shown = "headers" not in cut, () if "kernels" in cut else parents
        text = _fill(
            "new",
            **_task(problem, gpu, "notes" not in cut),
            gap=gap,
            baselines=f"Baselines: {listed}.\n" if listed else "",
            contract=_contract(problem, gpu, asked.host_form and whole, whole) if CODE in asked.kinds else "",
            knobs=_fill("knobs", families=describe(meanings=CUTS[1] not in cut)) if CONFIG in asked.kinds else "",
            parents=("" if cut else near) + _parents(shown, facts),
            task=_fill("task_contrast" if len(shown) == 2 else "task_new", asked=answer_rules(asked.kinds)),
        )
        system = _fill("system", gpu=gpu.name.upper())
        messages: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        if asked.tokens is None or tokens_of(messages) <= asked.tokens:
            return messages
    least = f"at least {tokens_of(messages)} for {problem.key}"
    raise UsageError(f"--prompt-tokens {asked.tokens} is too small", least, "raise it, or pass --answers code")


def tokens_of(messages: Sequence[Message]) -> int:
    """Return an estimate of the tokens of a prompt, from its characters."""
    return round(sum(len(message["content"]) for message in messages) / CHARS_PER_TOKEN)


def skeleton(problem: Problem) -> str:
    """Return the text of a free kernel that is right and slow, which stands in place of the list of headers."""
    b = "column * K + k" if problem.layout == "TN" else "k * N + column"
    return _fill("skeleton", acc=problem.acc, header=problem.dtype, element=_element(problem), b=b)


def small_task_prompt(task: SmallTask, gpu: Gpu) -> list[Message]:
    """Return a system message and a user message that ask for a small general kernel."""
    problem = task.problem
    text = _fill(
        "small_task", says=f"{task.says}.", m=problem.m, k=problem.k, n=problem.n, hardware=describe_gpu(gpu),
        contract=_contract(problem, gpu, host=False), asked=answer_rules((CODE,)),
    )  # fmt: skip
    system = _fill("small_system", gpu=gpu.name.upper())
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def kernel_guide(problem: Problem, gpu: Gpu) -> str:
    """Return the guide for authors of kernels: the proof, a problem, its GPU, the contract, the knobs and the notes.

    It has the parts of :func:`first_prompt` that do not ask for an answer. The text begins with ``You write GPU
    kernels``.
    """
    return _fill(
        "guide",
        system=_fill("system", gpu=gpu.name.upper()),
        **_task(problem, gpu),
        contract=_contract(problem, gpu),
        knobs=_fill("knobs", families=describe()),
    )


def _task(problem: Problem, gpu: Gpu, notes: bool = True) -> dict[str, str]:
    """Return the part of a first question on a problem and its GPU."""
    return {
        "problem": describe_problem(problem),
        "hardware": describe_gpu(gpu),
        "floor_us": f"{floor_us(problem, gpu):.2f}",
        "regime": regime(problem, gpu).partition("_")[0] + "-bound",
        "notes": "".join(_text(f"notes/{name}.md") for name in notes_of(problem, gpu) if notes),
    }


def choice_prompt(
    problem: Problem, gpu: Gpu, offered: Sequence[KernelConfig], tried: Sequence[str], n: int
) -> list[Message]:
    """Return a list of one user message that asks for ``n`` of the offered configs.

    The message is a dictionary with ``role`` and ``content``.

    Args:
        tried: one line for each tried config that is worth showing; if empty, the text says ``Nothing.``
    """
    text = _fill(
        "choose",
        **_task(problem, gpu),
        count=len(offered),
        families=describe_offered(offered),
        tried="\n".join(tried) or "Nothing.",
        n=n,
    )
    return [{"role": "user", "content": text}]


def follow_up(
    kind: str, words: str, problem: Problem, gpu: Gpu, best_us: float | None, max_tokens: int,
    kinds: Sequence[str] = (CODE, CONFIG),
) -> str:  # fmt: skip
    """Return the text of the next question after an outcome.

    Example: the kind ``compile`` with the words ``error: x`` gives a text that begins with ``Your kernel does not
    compile:``, a blank line and ``error: x``. Near its end stands the text of :func:`answer_rules`.

    Args:
        kind: kind of the outcome, a key of :data:`FOLLOW_UPS`; another (such as ``compiled``) raises KeyError.
        words: the outcome's words; if empty, the text says ``no more is known``. The texts of ``cut``, ``empty`` and
            ``refusal`` do not contain them.
        best_us: time in microseconds of the fastest proven kernel; None without one.
    """
    return _fill(
        FOLLOW_UPS[kind],
        words=words or "no more is known",
        asked=answer_rules(kinds),
        best_us="an unknown number of" if best_us is None else f"{best_us:.2f}",
        floor_us=f"{floor_us(problem, gpu):.2f}",
        max_tokens=str(max_tokens),
    )


def answer_rules(kinds: Sequence[str]) -> str:
    """Return text on the form of an answer: one block of code, of knobs, or either.

    Example: the text for ``["config"]`` begins with ``exactly one fenced block`` and asks for ``one flat object of
    knobs``. It has no line break at its end.

    Raises:
        UsageError: there is no kind, or an unknown one.
    """
    odd = sorted(set(kinds) - {CODE, CONFIG})
    if odd or not kinds:
        what = f"unknown kinds of answers {odd}" if odd else "no kind of answer was passed"
        raise UsageError(what, f"{CODE}, {CONFIG} or both", "pass at least one of them")
    name = "asked_both" if len(set(kinds)) > 1 else f"asked_{kinds[0]}"
    return _fill(name).strip()


def describe_problem(problem: Problem) -> str:
    p = problem
    element = "half (IEEE 16 bit)" if p.dtype == "fp16" else "bfloat16"
    return (
        f"C[{p.m}, {p.n}] = A[{p.m}, {p.k}] @ B, M = {p.m}, N = {p.n}, K = {p.k}.\n"
        f"A, B and C are {element}, products are summed in {p.acc} and rounded once.\n"
        f"A is stored {p.m} x {p.k} by rows, B is stored {p.b_shape[0]} x {p.b_shape[1]} by rows "
        f"({p.layout}: {'each row of B is a column of the product' if p.layout == 'TN' else 'as it is multiplied'}), "
        f"C is stored {p.m} x {p.n} by rows. {p.flops:.4g} FLOP, {p.bytes:.4g} bytes at least."
    )


def describe_gpu(gpu: Gpu) -> str:
    return (
        f"{gpu.name.upper()}, compute capability {gpu.arch / 10:.1f}, {gpu.sms} SMs, {gpu.smem_optin} bytes of shared "
        f"memory for a CTA at most, {gpu.l2_bytes / 1e6:g} MB of L2.\n"
        f"Sustained: {gpu.tflops:g} TFLOP/s dense half precision, {gpu.hbm_tbs:g} TB/s of memory, {gpu.l2_tbs:g} TB/s "
        f"of L2; a launch takes {gpu.launch_us:g} us at least."
    )


def notes_of(problem: Problem, gpu: Gpu) -> list[str]:
    """Return the names of the notes that fit a problem.

    The first is the regime: ``launch``, ``memory`` or ``compute``. These may follow, in this order:

    - ``few_rows``: M is below 64.
    - ``long_k``: K is over 8 times the larger of M and N. Also, C has fewer tiles of 128 x 128 than the GPU has SMs.
    - ``tails``: C has more tiles than SMs, and a large part of the last wave is empty.
    - ``ragged``: the rows of some matrix are no multiple of 16 bytes.
    """
    names = [regime(problem, gpu).partition("_")[0]]
    tiles = -(-problem.m // _TILE) * -(-problem.n // _TILE)
    last = tiles % gpu.sms
    if problem.m < _FEW_ROWS:
        names.append("few_rows")
    if problem.k > _LONG_K * max(problem.m, problem.n) and tiles < gpu.sms:
        names.append("long_k")
    if tiles > gpu.sms and last and (gpu.sms - last) / (last + tiles) > _EMPTY_WAVE:
        names.append("tails")
    if not problem.rows_aligned:
        names.append("ragged")
    return names


def _element(problem: Problem) -> str:
    return "half" if problem.dtype == "fp16" else "__nv_bfloat16"


def _contract(problem: Problem, gpu: Gpu, host: bool = True, headers: bool = True) -> str:
    return _fill(
        "contract",
        host=_fill("contract_host", acc=problem.acc) if host else "",
        arch=f"sm_{gpu.arch}a" if gpu.arch == 90 else f"sm_{gpu.arch}",
        acc=problem.acc,
        element=_element(problem),
        headers=header_listing() if headers else _fill("no_headers", skeleton=skeleton(problem)),
        b_stored="N x K by rows" if problem.layout == "TN" else "K x N by rows",
    )


def _parents(parents: Sequence[Entry], facts: Mapping[str, str]) -> str:
    if not parents:
        return ""
    titles = ("The slower", "The faster") if len(parents) == 2 else ("The only one so far",)
    shown = [
        shown_kernel(
            f"{title}: {e.us:.2f} us, {math.exp(e.score):.3f}x of the fastest baseline at least",
            e.candidate, facts.get(e.name, ""),
        )
        for title, e in zip(titles, parents, strict=True)
    ]  # fmt: skip
    return _fill("parents", shown="\n".join(shown))


def shown_kernel(title: str, candidate: Mapping[str, Any], facts: str = "", most: int = _PARENT_CHARS) -> str:
    """Return a kernel for a prompt: a line, facts on it, and a fenced block of its code or of its knobs.

    Args:
        most: number of characters of code that are kept; longer code is clipped in its middle.
    """
    code = candidate.get("family") == "free"
    text = clipped(candidate["text"], most) if code else json.dumps(candidate)
    return _fill(
        "parent", title=title, facts=f"{facts}\n" if facts else "", language="cuda" if code else "json",
        text=text.strip("\n"),
    )  # fmt: skip


@cache
def header_listing() -> str:
    """Return text on all listed headers of the package's kernel files, one after the other, for a prompt.

    Each begins with its name, such as ``ptx/types.cuh:``. The lines of its declarations follow, indented by two blanks.
    """
    texts, lines = dict(kernel_headers()), list[str]()
    for header in (f"ptx/{name}.cuh" for name in LISTED_HEADERS):
        lines += [f"{header}:", *(f"  {alias}" for alias in re.findall(r"^using [^;]*;", texts[header], re.M))]
        for found in _FUNCTION.finditer(texts[header]):
            lines += [f"  {line}" for line in found["comment"].splitlines()]
            template = " ".join((found["template"] or "").split())
            lines.append(f"  {template} {' '.join(found['head'].split())}".replace("   ", "  "))
    return "\n".join(lines)


def near_section(shown: str) -> str:
    """Return the section on near problems around its kernels and lessons."""
    return _fill("near", shown=shown.strip("\n"))


def _fill(name: str, **values: Any) -> str:
    return Template(_text(f"{name}.md")).substitute(values)


@cache
def _text(path: str) -> str:
    return (files(__package__) / "prompts" / path).read_text(encoding="utf-8")
