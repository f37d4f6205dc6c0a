"""Commands and Python snippets of the documentation, with the need that keeps one from running in the tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Needs that a block may name by ``<!-- needs: NAME -->`` on the line before its fence.
NEEDS = {
    "gpu": "a CUDA GPU",
    "server": "a model server",
    "network": "package registries or a clone",
    "docker": "Docker",
    "minutes": "minutes of compilation",
    "itself": "the test run that this test is a part of",
    "template": "a name that the reader fills in",
}
_FENCE = re.compile(
    r"(?:<!-- needs: (?P<needs>[a-z]+) -->\n)?(?P<indent> *)```(?P<language>console|python)\n(?P<text>.*?)\n(?P=indent)```",
    re.S,
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
        page: path from the root of the repository.
        line: line of the block's first command, from 1.
        language: ``console`` or ``python``.
        needs: a key of :data:`NEEDS`, empty if the block runs anywhere.
        text: the block without its fences and indent.
    """

    page: str
    line: int
    language: str
    needs: str
    text: str

    def commands(self) -> list[str]:
        """Return the shell commands, without comments; a line that ends in a backslash goes on in the next."""
        lines = self.text.replace("\\\n", " ").splitlines()
        bare = (re.sub(r"(^|\s+)#\s.*$", "", line).strip() for line in lines)
        return [line for line in bare if line]


def pages() -> list[Path]:
    """Return every Markdown page for readers, in order."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the ``console`` and ``python`` blocks of a page."""
    source = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(source):
        text = "\n".join(line.removeprefix(found["indent"]) for line in found["text"].splitlines())
        line = source.count("\n", 0, found.start("text")) + 1
        yield Block(str(page.relative_to(ROOT)), line, found["language"], found["needs"] or "", text)
