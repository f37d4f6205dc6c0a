"""Detect literals that can spell a word once macros are expanded: ``".in" X "bin"``.

A macro may be defined several times, so each of its texts counts at each use, and so does an empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from outblas_lab.custom.cuda_text import split_text

_DEFINE = re.compile(r"(?:#|%:|\?\?=)\s*define\s+([^\W\d][\w$]*|\$[\w$]*)(?![\w$(])(.*)", re.DOTALL)
_NAME = re.compile(r"[^\W\d][\w$]*|\$[\w$]*")
#: A run of literals and names: (True for a literal, its content or name).
Run = Sequence[tuple[bool, str]]


def literal_macros(directives: Iterable[str], plain: Callable[[str], str]) -> dict[str, list[Run]]:
    """Return the macros without arguments that stand for literals and names, each with all of its texts.

    A macro with several runs in one definition, and one with arguments, is left out. Example:
    ``literal_macros(['#define X "in"'], plain)`` returns ``{"X": [[(True, "in")]]}`` if ``plain`` takes the quotes
    away.

    Args:
        directives: lines such as ``#define X "in"``, without comments.
        plain: called with each literal; returns what it says, without its quotes.
    """
    found: dict[str, list[Run]] = {}
    opaque = set[str]()
    for line in directives:
        if match := _DEFINE.match(line):
            whole = runs_of(match[2], plain)
            if len(whole) > 1:
                opaque.add(match[1])
            found.setdefault(match[1], []).extend(whole)
    return {name: texts for name, texts in found.items() if name not in opaque}


def runs_of(text: str, plain: Callable[[str], str]) -> list[Run]:
    """Return what lies side by side in a text: literals and names, with nothing else between them.

    Example: ``runs_of('"ab" X "c", "d"', plain)`` returns ``[[(True, "ab"), (False, "X"), (True, "c")], [(True,
    "d")]]``. True stands for a literal, False for a name. The list has no empty run.

    Args:
        text: with its continued lines joined.
        plain: called with each literal; returns what it says, without its quotes.
    """
    runs: list[list[tuple[bool, str]]] = [[]]
    for kind, part in split_text(text):
        if kind == "literal":
            runs[-1].append((True, plain(part)))
        elif kind == "code":
            at = 0
            for name in _NAME.finditer(part):
                if name.start() > at:
                    runs.append([])
                runs[-1].append((False, name[0]))
                at = name.end()
            if at < len(part):
                runs.append([])
    return [run for run in runs if run]


def can_say(word: str, runs: Iterable[Run], macros: dict[str, list[Run]]) -> bool:
    """Return whether some run says a word, in capitals or not, with some texts of its macros.

    Example: ``can_say("abc", [[(True, "a"), (False, "X")]], {"X": [[(True, "BC")]]})`` returns True.

    Args:
        word: in small letters.
        runs: as :func:`runs_of` has them.
        macros: as :func:`literal_macros` has them.
    """
    known: dict[tuple[str, int], frozenset[int]] = {}
    all_of_it = len(word)

    def read(said: int, text: str) -> int:
        """Return the number of the word's characters that are spelled when ``text`` follows ``said`` of them."""
        whole = word[:said] + text
        if word in whole:
            return all_of_it
        return next(n for n in range(min(all_of_it - 1, len(whole)), -1, -1) if whole.endswith(word[:n]))

    def after(run: Run, begun: frozenset[int]) -> frozenset[int]:
        for is_literal, text in run:
            if all_of_it in begun:
                break
            if is_literal:
                begun = frozenset(read(said, text.lower()) for said in begun)
            elif text in macros:
                begun = begun.union(*(named(text, said) for said in begun))
            else:
                begun |= {0}
        return begun

    def named(name: str, said: int) -> frozenset[int]:
        if (name, said) not in known:
            known[name, said] = frozenset({said})  # a macro does not name itself
            known[name, said] = frozenset({said}).union(*(after(run, frozenset({said})) for run in macros[name]))
        return known[name, said]

    return any(all_of_it in after(run, frozenset({0})) for run in runs)
