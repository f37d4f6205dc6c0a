"""Entries of the project's journal, by the problems that they name: a prediction and an outcome each.

The pages are package data of a wheel (``llm/journal``), and lie in ``docs/journal`` of a checkout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from outblas.core.problem import Problem

#: A lesson of more powers of two than this away from a problem says little about it.
MAX_DISTANCE = 6.0
_ENTRY = re.compile(r"^### (?P<number>\d{4}) (?P<title>.*?)(?: \{#\d+\})?\n(?P<text>.*?)(?=^### |^## |\Z)", re.M | re.S)
_SHAPE = re.compile(r"\b(\d+)\s*x\s*(\d+)\s*x\s*(\d+)\b")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Lesson:
    """An entry of the journal.

    Attributes:
        text: its text in Markdown, without links.
        shapes: (M, N, K) of the problems that it names, in order.
    """

    number: str
    title: str
    text: str
    shapes: tuple[tuple[int, int, int], ...]

    def distance(self, problem: Problem) -> float:
        """Return how far the nearest of its shapes is from a problem: the sum of |log2| of the ratios of extents.

        It is infinity if the entry names no shape.
        """
        extents = (problem.m, problem.n, problem.k)
        apart = (sum(abs(math.log2(a / b)) for a, b in zip(shape, extents, strict=True)) for shape in self.shapes)
        return min(apart, default=math.inf)


def nearest_lessons(problem: Problem, most: int) -> list[Lesson]:
    """Return at most ``most`` lessons on near problems, the nearest first; of equally near ones the latest first.

    Lessons farther than :data:`MAX_DISTANCE` are left out. The list is empty if the journal is not installed.
    """
    near = [lesson for lesson in lessons() if lesson.distance(problem) <= MAX_DISTANCE]
    return sorted(near, key=lambda lesson: (lesson.distance(problem), -int(lesson.number)))[:most]


@cache
def lessons() -> Sequence[Lesson]:
    """Return the lessons of all pages of the journal; empty if it is not installed."""
    return [lesson for page in _pages() for lesson in read_lessons(page)]


def read_lessons(page: str) -> Iterator[Lesson]:
    """Yield the entries of a page of the journal, in order.

    Args:
        page: the page's Markdown. An entry begins with a line such as ``### 0010 Clusters do not fill the GPU {#0010}``
            and ends at the next heading.
    """
    for found in _ENTRY.finditer(page):
        text = _LINK.sub(r"\1", found["text"]).strip()
        named = (tuple(map(int, shape)) for shape in _SHAPE.findall(f"{found['title']}\n{text}"))
        shapes = dict.fromkeys((m, n, k) for m, n, k in named if min(m, n, k) > 0)
        yield Lesson(found["number"], found["title"].strip(), text, tuple(shapes))


def _pages() -> list[str]:
    """Return the texts of a wheel's pages, else of the checkout's, in the order of their names."""
    for folder in (files(__package__) / "journal", Path(__file__).parents[4] / "docs" / "journal"):
        if folder.is_dir():
            pages = {page.name: page for page in folder.iterdir() if page.name.endswith(".md")}
            return [pages[name].read_text(encoding="utf-8") for name in sorted(pages)]
    return []
