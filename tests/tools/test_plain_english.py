"""The lint for prose: each rule, the skipped text of each format, and the exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools.plain_english import MAX_WORDS_PER_SENTENCE, Text, problems_of, texts_of_c, texts_of_markdown

from tools import plain_english

#: One text for each pattern, in the patterns' order: it breaks this pattern and no other rule.
BROKEN = (
    "Whoever calls it pays.",
    "The caller is told at once.",
    "Return the row, or say that there is none.",
    "Return the row, and None where the disk is full.",
    "Wait so many seconds.",
    "Keep this: what was measured stays.",
    "The product is ours.",
    "It hardly ever fails.",
    "A promise that nobody made.",
    "Return the folder that it came from.",
    "Look wherever it lies.",
    "The kernel is to be proved.",
)


def problems(words: str, docstring_of: str = "") -> list[str]:
    return list(problems_of(Text(1, words, docstring_of)))


def test_every_pattern_has_a_text() -> None:
    assert len(BROKEN) == len(plain_english.PATTERNS)


@pytest.mark.parametrize(("words", "advice"), list(zip(BROKEN, plain_english.PATTERNS.values(), strict=True)))
def test_a_pattern_finds_its_text_alone(words: str, advice: str) -> None:
    found = problems(words)
    assert len(found) == 1, found
    assert found[0].endswith(advice)


def test_code_is_no_prose() -> None:
    assert problems("Call `is_ours.what_is()` with ``whoever``.") == []


def test_a_sentence_has_a_limit_of_words() -> None:
    assert problems(" ".join(["word"] * MAX_WORDS_PER_SENTENCE) + ".") == []
    found = problems(" ".join(["word"] * (MAX_WORDS_PER_SENTENCE + 1)) + ".")
    assert len(found) == 1
    assert found[0].startswith("26 words in one sentence")


@pytest.mark.parametrize(
    ("words", "name", "finding"),
    [
        ("Whether it is so.", "check", "a docstring starts with"),
        ("Return whether it is so.", "check", ""),
        ("The worker pool.", "WorkerPool", "only repeats the name"),
        ("A pool of processes.", "WorkerPool", ""),
        ("Add.\n\nArgs:\n    a, b: numbers.", "add_two", "several names in one entry"),
        ("Add.\n\nArgs:\n    a: number.\n    b: number.", "add_two", ""),
    ],
)
def test_rules_of_docstrings(words: str, name: str, finding: str) -> None:
    found = problems(words, name)
    assert len(found) == bool(finding)
    assert not found or finding in found[0]


def test_markdown_without_code_tables_and_generated_blocks() -> None:
    page = (
        "---\ntitle: whoever\n---\n# Whoever\n\nFirst line\nof one paragraph.\n\n- An item.\n\n"
        "```\nwhoever\n```\n\n| whoever |\n\n<!-- table:begin -->\nwhoever\n<!-- table:end -->\n\nLast.\n"
    )
    assert [(text.line, text.words) for text in texts_of_markdown(page)] == [
        (6, "First line\nof one paragraph."),
        (9, "An item."),
        (21, "Last."),
    ]


def test_comments_of_c() -> None:
    found = list(texts_of_c("int a;\n// One\n// block.\nint b; /* Another. */\n"))
    assert [(text.line, " ".join(text.words.split())) for text in found] == [(2, "One block."), (4, "Another.")]


@pytest.mark.parametrize(("words", "code"), [("Return the sum.", 0), ("What is added.", 1)])
def test_exit_code(words: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'def add():\n    """{words}"""\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, plain_english.__file__, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert (f"{path}:2:" in done.stdout) == bool(code)
