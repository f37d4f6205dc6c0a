"""CUDA C++ text in pieces: comments, literals, directives and tokens; nothing is understood beyond that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_RAW = re.compile(r'(?:u8|[uUL])?R"([^()\\\s]{0,16})\(')
#: Maximal munch, longest first.
_OPERATORS = (
    "<<<", ">>>", "<<=", ">>=", "<=>", "->*", "...", "::", "->", "++", "--", "<<", ">>", "<=", ">=", "==", "!=", "&&",
    "||", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", ".*",
)  # fmt: skip
_TOKEN = re.compile(
    r"(?:\.?\d(?:[eEpP][+-]|['\w.])*)|[A-Za-z_$\u0080-\U0010ffff][\w$]*|" + "|".join(map(re.escape, _OPERATORS)) + r"|."
)
#: White space to every compiler; what else Python takes for it is none to them.
_SPACES = " \t\v\f\r"
#: What compilers do not all read alike: a line that ends in a backslash and blanks, a return without a new line,
#: trigraphs, digraphs. What is hard to read right: a quote in a number, a raw literal.
_TWO_WAYS = re.compile(
    r"\\[ \t\v\f]+\r?\n|\r(?!\n)|\?\?[=/'()!<>-]|<%|%>|<:(?!:[^:>])|:>|\d[\w.]{0,63}'\w|[\w.]{64}'\w|[eEpP][+-]'\w|R\""
)
#: A number to the preprocessor; what it takes for one may be none to a compiler.
_NUMBER = re.compile(r"\.?[0-9](?:[eEpP][+-]|'\w|[\w.])*")
#: A literal beside a name, as in u8"x" or "x"_s.
_NAME = re.compile(r"[\w$\x80-\U0010ffff][\"']|[\"'][\w$\x80-\U0010ffff]")


class TextPiece(NamedTuple):
    """``kind``: ``comment``, ``literal``, ``space``, ``line`` (an end of line) or ``code``; the text as written."""

    kind: str
    text: str


def split_text(text: str) -> Iterator[TextPiece]:
    """Split a text; joined, the pieces are the text. An unclosed comment or literal runs to the end of what it may."""
    at, end = 0, len(text)
    while at < end:
        kind, stop = _piece(text, at)
        yield TextPiece(kind, text[at:stop])
        at = stop


def is_ambiguous(text: str) -> bool:
    """Whether compilers may not agree, with each other or with this module, on what is code, comment or literal."""
    return bool(_TWO_WAYS.search(text) or _TWO_WAYS.search(join_continued_lines(text)))


#: What makes a number or a literal of where or how something is written: in itself, or in a header's macro.
_AS_WRITTEN = re.compile(
    r"__LINE__|__builtin_(?:LINE|COLUMN|FILE)|source_location|\\[uUN]|\bassert\b(?!\.h)|__assert|__STRING|BUILTIN_LINE|_TRACE_|TO_STRING|CubDebug|CUDA_PERROR"
    r"|RET_IF_FAIL|GUARD_OVERFLOW|\b\w*(?:CAT|PASTE|JOIN|SPLICE|STRINGI[ZF])\w*[ \t]*\("
    r"|\b(?!\w*STATIC_ASSERT)\w*ASSERT\w*|(?:#|%:|\?\?=)[ \t]*line\b"
)
#: A macro with an operator that makes literals or pastes names: # or ##.
_OPERATOR = re.compile(r"^[ \t\v\f\ufeff]*(?:#|%:|\?\?=)[ \t\v\f]*define\b[^\n]*?(?:#|%:|\?\?=)", re.MULTILINE)


def depends_on_spelling(text: str) -> bool:
    """Whether a text may mean something else with other white space: it asks for its lines, or quotes itself."""
    plain = without_comments(text)
    # A comment may be none to a compiler: what is not sure to be one counts.
    return any(_AS_WRITTEN.search(each) or _OPERATOR.search(each) for each in (plain, join_continued_lines(text)))


def without_comments(text: str) -> str:
    """The text with continued lines joined, and a space for each comment."""
    return "".join(" " if p.kind == "comment" else p.text for p in split_text(join_continued_lines(text)))


def comments(text: str) -> list[str]:
    """The block comments, without their marks."""
    return [p.text[2:-2] for p in split_text(text) if p.kind == "comment" and p.text.startswith("/*")]


def join_continued_lines(text: str) -> str:
    r"""Lines that end in ``\`` joined with the next, as the preprocessor sees them (raw literals hold none of ours)."""
    return re.sub(r"\\[ \t]*\r?\n", "", text.replace("\r\n", "\n"))


def canonical(text: str) -> str:
    """One spelling for all texts that differ in comments and white space only: tokens apart by one space, a directive
    on a line of its own, in which white space (which means something after a macro's name) is one space. Literals are
    as they were, and cling to what they touched: a prefix or a suffix."""
    lines: list[str] = []
    line: list[str] = []  # of the present line: tokens, or the pieces of a directive
    touching = False  # whether no white space was between the last piece and this one

    def close() -> None:
        if line and line[0] == "#":
            lines.append("".join(line).strip())
        elif line:
            lines.append(" ".join(line))
        line.clear()

    for kind, part in split_text(join_continued_lines(text)):
        directive = bool(line) and line[0] == "#"
        if kind == "line":
            close()
        elif kind in ("comment", "space"):
            if directive and len(line) > 1 and line[-1] != " ":
                line.append(" ")
        elif directive:
            line.append(part)
        elif kind == "code" and not line and part.startswith(("#", "%:")):
            rest = part[1:] if part.startswith("#") else part[2:]
            line.extend(("#", rest) if rest else "#")
        else:
            tokens = [part] if kind == "literal" else _TOKEN.findall(part)
            if (
                touching
                and line
                and (kind == "literal" or line[-1][-1:] in "\"'")
                and _NAME.search(line[-1] + tokens[0])
            ):
                line[-1] += tokens.pop(0)
            line.extend(tokens)
        touching = kind in ("code", "literal")
    close()
    return _joined(lines)


def _joined(lines: list[str]) -> str:
    """Lines between directives are one: where code breaks its lines means nothing."""
    out: list[str] = []
    for line in lines:
        if out and not line.startswith("#") and not out[-1].startswith("#"):
            out[-1] += " " + line
        else:
            out.append(line)
    return "\n".join(out)


def _piece(text: str, at: int) -> tuple[str, int]:
    two = text[at : at + 2]
    if two == "/*":
        stop = text.find("*/", at + 2)
        return "comment", len(text) if stop < 0 else stop + 2
    if two == "//":
        stop = text.find("\n", at)
        return "comment", len(text) if stop < 0 else stop
    one = text[at]
    if one == "\n":
        return "line", at + 1
    if one in _SPACES:
        return "space", _run(text, at, _SPACES)
    if raw := _RAW.match(text, at):
        close = f'){raw[1]}"'
        stop = text.find(close, raw.end())
        return "literal", len(text) if stop < 0 else stop + len(close)
    if one in "\"'":
        return "literal", _literal_end(text, at)
    return "code", _code_end(text, at)


def _code_end(text: str, at: int) -> int:
    stop, in_name = at, False
    while stop < len(text):
        c = text[stop]
        if c in _SPACES or c in "\n\"'" or text[stop : stop + 2] in ("/*", "//"):
            break
        if not in_name and (number := _NUMBER.match(text, stop)):
            stop = number.end()
            continue
        if stop > at and not in_name and _RAW.match(text, stop):
            break
        in_name = c.isalnum() or c in "_$" or c >= "\x80"
        stop += 1
    return max(stop, at + 1)


def _literal_end(text: str, at: int) -> int:
    quote, stop = text[at], at + 1
    while stop < len(text) and text[stop] not in (quote, "\n"):
        stop += 2 if text[stop] == "\\" else 1
    return min(stop + 1 if text[stop : stop + 1] == quote else stop, len(text))


def _run(text: str, at: int, of: str) -> int:
    stop = at
    while stop < len(text) and text[stop] in of:
        stop += 1
    return stop
