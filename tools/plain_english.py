"""Find prose that is hard to read: docstrings, comments, help texts and Markdown pages of the project.

The rules stand in docs/develop/style.md. ``make lint`` runs this file; it exits with 1 and names each place.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_WORDS_PER_SENTENCE = 25

#: Expressions that make a reader read twice, and how to write instead.
PATTERNS: dict[str, str] = {
    r"\bwho(m)?ever\b": "name the person or the caller",
    r"\b(is|are|was|were|be|been) told\b|\btold (of|to|by|about)\b": "use 'report', 'say' or 'pass'",
    r"\bthere (is|are|was|were) none\b": "write 'None if ...' or 'nothing'",
    r"\bNone where\b|\bwhere it is none\b": "write 'None if ...'",
    r"\bso many\b": "name the count",
    r"(^|[;,:.(] )[Ww]hat (is|are|was|were|has|have|had|does|do|did|can|cannot|they|it|nobody|others?)\b": (
        "name the subject instead of 'what ...'"
    ),
    r"\b(is|are|was|were|stays?|remains?) (ours|theirs|torch's|yours)\b": "say who does it",
    r"\b(hardly ever|no more than that|of its own accord|this and that)\b": "use plain words",
    r"\bthat no(body| one) (made|asked|wants|knows)\b": "name the case",
    r"\b(of|for|from|to|with|by|about|at|into|upon)[.;](\s|$)": "do not end a clause with a preposition",
    r"\bwherever\b|\bwhereof\b|\bthereof\b|\btherein\b|\bwherein\b": "use plain words",
    r"\bis to be\b|\bare to be\b": "use 'must' or an imperative",
}
#: A docstring starts with a verb or a noun phrase.
QUESTION_START = re.compile(r"^(What|Whether|How|Where|Who|Whose|Why|When|Which|As|If|That|One|There)\b")
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples|Note|Notes|Source|Sources):\s*$")
SEVERAL_NAMES = re.compile(r"^\s+`{0,2}\w+`{0,2}(, `{0,2}\w+`{0,2})+( and `{0,2}\w+`{0,2})?:\s")
#: An indented block after ``::``, and the launch block of a free kernel.
LITERAL_BLOCK = re.compile(r"::\n[ \t]*\n(?:[ \t]+\S.*(?:\n|$)|[ \t]*\n)+|^\s*outblas-launch\s*\{(?:.|\n)*")
TEXT_OF_C = (".c", ".cpp", ".cu", ".cuh", ".h")
#: Generated files, kernels of cheats, and prompts: these address a language model, and recorded answers follow them.
SKIPPED = (
    "tests/support/golden",
    "tests/support/emulation",
    "tests/adversarial/exploits",
    "tests/adversarial/cheats",
    "lab/src/outblas_lab/llm/prompts",
)
PATTERN_OF = {re.compile(pattern, re.IGNORECASE): advice for pattern, advice in PATTERNS.items()}


@dataclass(frozen=True)
class Text:
    """A piece of prose.

    Attributes:
        line: first line in its file, from 1.
        words: the prose, without markup.
        docstring_of: name of the documented object; empty if the text is no docstring.
    """

    line: int
    words: str
    docstring_of: str = ""


def texts_of_python(source: str) -> Iterator[Text]:
    """Yield docstrings, blocks of comments and help texts of a Python file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc is not None:
                yield Text(node.body[0].lineno, doc, getattr(node, "name", "module"))
        elif isinstance(node, ast.keyword) and node.arg in ("help", "epilog", "short_help"):
            value = node.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield Text(value.lineno, value.value)
    yield from _comments(source)


def _comments(source: str) -> Iterator[Text]:
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#:! ")
        if block and token.start[0] == last + 1 and token.line.lstrip().startswith("#"):
            block.append(words)
        else:
            if block:
                yield Text(start, "\n".join(block))
            block, start = [words], token.start[0]
        last = token.start[0]
    if block:
        yield Text(start, "\n".join(block))


def texts_of_c(source: str) -> Iterator[Text]:
    """Yield blocks of ``//`` comments and ``/* */`` comments of a C, C++ or CUDA file."""
    for found in re.finditer(r"/\*.*?\*/|(?:^[^\S\n]*//[^\n]*\n)+|//[^\n]*", source, re.S | re.M):
        words = re.sub(r"^\s*(//+[!<]*|/?\*+/?)|\*/", "", found.group(), flags=re.M)
        if found.group().lstrip().startswith("//"):
            words = re.sub(r"^ {2,}(?=\S)", "- ", words, flags=re.M)
        yield Text(source.count("\n", 0, found.start()) + 1, words)


def texts_of_markdown(source: str) -> Iterator[Text]:
    """Yield paragraphs and list items of a Markdown file; code, tables and generated blocks are left out."""

    def blank(found: re.Match[str]) -> str:
        return "\n" * found.group().count("\n")

    for pattern in (
        r"^---\n.*?\n---\n",
        r"<!-- (\w+):begin -->.*?<!-- \1:end -->",
        r"^ *(```+|~~~+).*?^ *\1",
        r"<!--.*?-->",
        r"<svg.*?</svg>",
    ):
        source = re.sub(pattern, blank, source, flags=re.S | re.M)
    block: list[str] = []
    start = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        ends = not line.strip() or re.match(r"\s*(\||#|[-*+] |\d+\. |!!!|:::|>|===|\?\?\?)", line) is not None
        if ends and block:
            yield Text(start, "\n".join(block))
            block = []
        if line.strip() and not re.match(r"\s*(\||#|!!!|:::|===|\?\?\?|<)", line):
            start = start if block else number
            block.append(re.sub(r"^\s*([-*+] |\d+\. |> ?)", "", line))


def sentences(words: str) -> Iterator[str]:
    """Split prose into sentences; a paragraph, an entry of a section and a list item end one, too."""
    text = re.sub(r"^ *=+( +=+)+\n(?:.+\n)* *=+( +=+)+$", "", words, flags=re.M)  # a table of reStructuredText
    text = re.sub(r"`+[^`]*`+", "CODE", text)
    text = LITERAL_BLOCK.sub(".\n\n", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*[-*+] )|\n(?=\s+\w+(?: \([^)]*\))?: )|:\n|^\s*\w+: ", text, flags=re.M)
    for paragraph in paragraphs:
        joined = " ".join(paragraph.split())
        yield from re.split(r"(?<=[.!?])\s+", joined)


def problems_of(text: Text) -> Iterator[str]:
    """Yield one line for each rule that a text breaks."""
    plain = re.sub(r"`+[^`]*`+", "CODE", text.words)
    joined = " ".join(plain.split())
    for pattern, advice in PATTERN_OF.items():
        found = pattern.search(joined)
        if found:
            yield f"'{found.group().strip()}': {advice}"
    for sentence in sentences(text.words):
        count = len([word for word in sentence.split() if re.search(r"\w", word)])
        if count > MAX_WORDS_PER_SENTENCE:
            yield f"{count} words in one sentence: '{' '.join(sentence.split()[:6])} ...'"
    if text.docstring_of:
        yield from _problems_of_docstring(text)


def _problems_of_docstring(text: Text) -> Iterator[str]:
    first = text.words.split("\n", 1)[0]
    if QUESTION_START.match(first):
        yield f"a docstring starts with a verb or a noun phrase, not with '{first.split()[0]}'"
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text.docstring_of)
    name = set(re.findall(r"[a-z0-9]+", spaced.lower()))
    said = set(re.findall(r"[a-z0-9]+", text.words.lower())) - {"a", "an", "the", "of"}
    if said and said <= name:
        yield f"the docstring only repeats the name {text.docstring_of}"
    in_section = False
    for line in text.words.splitlines():
        if SECTION.match(line.strip()):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = False
        elif in_section and SEVERAL_NAMES.match(line):
            yield f"several names in one entry: '{line.strip()[:40]}'; one line each"


def check(path: Path) -> list[str]:
    """Return ``path:line: problem`` for each rule that a file breaks."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        texts = texts_of_python(source)
    elif path.suffix == ".md":
        texts = texts_of_markdown(source)
    else:
        texts = texts_of_c(source)
    return [f"{path}:{text.line}: {problem}" for text in texts for problem in problems_of(text)]


def files(roots: list[Path]) -> Iterator[Path]:
    """Yield the files under some folders that hold prose."""
    for root in roots:
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            known = path.suffix in (".py", ".md", *TEXT_OF_C)
            if known and "__pycache__" not in path.parts and not any(part in path.as_posix() for part in SKIPPED):
                yield path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="Files, or folders with all that is in them.")
    found = [line for path in files(parser.parse_args().paths) for line in check(path)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
