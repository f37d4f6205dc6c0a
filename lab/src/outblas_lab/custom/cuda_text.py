"""Split CUDA C++ text into comments, literals, directives and tokens. Nothing else is parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_RAW = re.compile(r'(?:u8|[uUL])?R"([^()\\\s]{0,16})\(')
#: Longest first, because the longest match counts.
_OPERATORS = (
    "<<<", ">>>", "<<=", ">>=", "<=>", "->*", "...", "::", "->", "++", "--", "<<", ">>", "<=", ">=", "==", "!=", "&&",
    "||", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", ".*",
)  # fmt: skip
_TOKEN = re.compile(
    r"(?:\.?\d(?:[eEpP][+-]|['\w.])*)|[A-Za-z_$\u0080-\U0010ffff][\w$]*|" + "|".join(map(re.escape, _OPERATORS)) + r"|."
)
#: White space to every compiler. Python's notion of white space is wider.
_SPACES = " \t\v\f\r"
_BLANKS = re.compile(f"[{_SPACES}]+")
#: Text that compilers read differently: a line that ends in a backslash and blanks, a return without a newline,
#: trigraphs, digraphs. Also text that is hard to read right: a quote in a number, a raw literal.
_TWO_WAYS = re.compile(
    r"\\[ \t\v\f]+\r?\n|\r(?!\n)|\?\?[=/'()!<>-]|<%|%>|<:(?!:[^:>])|:>|\d[\w.]{0,63}'\w|[\w.]{64}'\w|[eEpP][+-]'\w|R\""
)
#: A preprocessing number; the compiler may reject it.
_NUMBER = re.compile(r"\.?[0-9](?:[eEpP][+-]|'\w|[\w.])*")
#: A literal next to a name, as in u8"x" or "x"_s.
_NAME = re.compile(r"[\w$\x80-\U0010ffff][\"']|[\"'][\w$\x80-\U0010ffff]")


class TextPiece(NamedTuple):
    """A piece of a text.

    Attributes:
        kind: ``comment``, ``literal``, ``space`` (a run of blanks), ``line`` (one end of line) or ``code``.
    """

    kind: str
    text: str


def split_text(text: str) -> Iterator[TextPiece]:
    """Yield the pieces of a text; joined, they are the text.

    An unclosed comment or raw literal extends to the end of the text; another unclosed literal to the end of its line.
    The end of line after a ``//`` comment is a piece of its own. Code ends at white space, a literal or a comment.

    Example: ``"int x; // c"`` gives code ``int``, a space, code ``x;``, a space and the comment ``// c``.
    """
    at, end = 0, len(text)
    while at < end:
        kind, stop = _piece(text, at)
        yield TextPiece(kind, text[at:stop])
        at = stop


def is_ambiguous(text: str) -> bool:
    """Return whether compilers, or this module, may disagree on what is code, comment or literal.

    Digraphs (``<%``), trigraphs, raw literals, quotes in numbers, and a backslash with blanks at a line's end give
    True. So does a carriage return without a newline. They count in comments and literals, too.
    """
    return bool(_TWO_WAYS.search(text) or _TWO_WAYS.search(join_continued_lines(text)))


#: Text that turns the place or spelling of code into a number or literal, directly or by a header's macro.
_AS_WRITTEN = re.compile(
    r"__LINE__|__builtin_(?:LINE|COLUMN|FILE)|source_location|\\[uUN]|\bassert\b(?!\.h)|__assert|__STRING|BUILTIN_LINE|_TRACE_|TO_STRING|CubDebug|CUDA_PERROR"
    r"|RET_IF_FAIL|GUARD_OVERFLOW|\b\w*(?:CAT|PASTE|JOIN|SPLICE|STRINGI[ZF])\w*[ \t]*\("
    r"|\b(?!\w*STATIC_ASSERT)\w*ASSERT\w*|(?:#|%:|\?\?=)[ \t]*line\b"
)
#: A macro with the operator # or ##, which makes literals or joins names.
_OPERATOR = re.compile(r"^[ \t\v\f\ufeff]*(?:#|%:|\?\?=)[ \t\v\f]*define\b[^\n]*?(?:#|%:|\?\?=)", re.MULTILINE)


def depends_on_spelling(text: str) -> bool:
    """Return whether other white space may change a text's meaning: it uses its line numbers or quotes itself.

    Examples: ``__LINE__``, ``assert(x)``, ``#line``, and a ``#define`` with ``#`` or ``##`` in it give True. A mention
    in a comment counts, too. ``int x;``, ``static_assert(x)`` and ``#include <assert.h>`` give False.
    """
    plain = without_comments(text)
    # A compiler may read a comment as code, so doubtful comments count, too.
    return any(_AS_WRITTEN.search(each) or _OPERATOR.search(each) for each in (plain, join_continued_lines(text)))


def without_comments(text: str) -> str:
    """Return the text with continued lines joined and a space in place of each comment.

    Other white space stays, also the end of line after a ``//`` comment. Comment marks inside literals are kept.
    Example: ``"a/* x */b"`` gives ``"a b"``.
    """
    return "".join(" " if p.kind == "comment" else p.text for p in split_text(join_continued_lines(text)))


def comments(text: str) -> list[str]:
    """Return the texts of the block comments, without ``/*`` and ``*/``, in order. ``//`` comments are left out.

    Example: ``"/* a */ // b"`` gives ``[" a "]``. An unclosed comment extends to the end of the text.
    """
    found = [p.text[2:] for p in split_text(text) if p.kind == "comment" and p.text.startswith("/*")]
    return [each.removesuffix("*/") for each in found]  # "/*/" is unclosed: its star is part of the opening mark


def join_continued_lines(text: str) -> str:
    r"""Return the text with each line that ends in ``\`` joined to the next one, as the preprocessor does.

    Blanks between ``\`` and the end of the line are removed, too. Ends of line ``\r\n`` become ``\n`` everywhere.
    """
    return re.sub(r"\\[ \t]*\r?\n", "", text.replace("\r\n", "\n"))


def canonical(text: str) -> str:
    """Return a spelling that is equal for texts which differ only in comments and white space.

    Tokens are separated by one space. A directive is a line of its own; in it, white space matters after a macro's
    name, so each run becomes one space. Literals are unchanged and stay attached to a prefix or suffix. All code
    between two directives is one line. The last line has no end of line.
    """
    lines: list[str] = []
    line: list[str] = []  # tokens of the present line, or pieces of a directive
    touching = False  # no white space before this piece

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
    """Return the lines with all code lines between two directives joined: line breaks in code have no meaning."""
    out: list[str] = []
    for line in lines:
        if out and not line.startswith("#") and not out[-1].startswith("#"):
            out[-1] += " " + line
        else:
            out.append(line)
    return "\n".join(out)


def _piece(text: str, at: int) -> tuple[str, int]:
    """Return (kind, end index) of the piece that starts at an index."""
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
    if blanks := _BLANKS.match(text, at):
        return "space", blanks.end()
    if raw := _RAW.match(text, at):
        close = f'){raw[1]}"'
        stop = text.find(close, raw.end())
        return "literal", len(text) if stop < 0 else stop + len(close)
    if one in "\"'":
        return "literal", _literal_end(text, at)
    return "code", _code_end(text, at)


def _code_end(text: str, at: int) -> int:
    """Return the end index of the code that starts at an index."""
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
    """Return the end index of the string or character literal that starts at an index."""
    quote, stop = text[at], at + 1
    while stop < len(text) and text[stop] not in (quote, "\n"):
        stop += 2 if text[stop] == "\\" else 1
    return min(stop + 1 if text[stop : stop + 1] == quote else stop, len(text))
