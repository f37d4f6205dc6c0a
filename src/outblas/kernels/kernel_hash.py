"""The package's kernel files and their hash, which a change of comments or blanks leaves as it is."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

#: The folder with the kernel files, below the package. No hash depends on its name.
KERNELS_FOLDER = "kernels/cuda"
#: A gap is blanks and comments. Literals and numbers are matched so that no gap is found inside them.
#: An unclosed literal runs to the end of its line: what looks like a comment behind it may be none.
#: The first line has what a piece begins with; it is there for speed alone.
_PIECE = re.compile(
    r"""(?=[ \t\v\f/"'uULR\d.]) (?:
      (?P<gap>  (?: [ \t\v\f]+ | //[^\n]* | /\*.*?(?:\*/|\Z) )+ )
    | (?P<raw>  (?<!\w) (?:u8|[uUL])?R"(?P<mark>[^()\\\s]{0,16})\( .*? (?:\)(?P=mark)"|\Z) )
    | "(?:[^"\\\n]|\\.)*"?
    | '(?:[^'\\\n]|\\.)*'?
    | (?<!\w)\.?\d(?:'?\w|\.)* )
    """,
    re.VERBOSE | re.DOTALL,
)
#: What compilers read in two ways, and what makes a line's number or a file's letters matter.
_AS_WRITTEN = re.compile(
    r"""\\[ \t\v\f]+\n | \r | \0 | \?\?[=/'()!<>-] | \#[ \t]*include[ \t]*<[^>\n]*/[/*]
    | __LINE__ | __builtin_LINE | \bassert\b | source_location""",
    re.VERBOSE,
)
_CONTINUED = "\\\n"


@functools.cache
def kernels_sha() -> str:
    """Return the SHA-256 (hex) of all kernel files in their plain form: equal hashes, equal kernels."""
    return headers_sha(kernel_headers())


def headers_sha(headers: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 (hex) of some kernel files in their plain form.

    Args:
        headers: (name as included, text) pairs, as :func:`kernel_headers` has them.
    """
    return _sha([(name, without_comments(text)) for name, text in headers])


def headers_sha_as_written(headers: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 (hex) of some kernel files with every blank and comment: the rule until version 0.2.0."""
    return _sha(list(headers))


def without_comments(text: str) -> str:
    """Return CUDA C++ text with comments removed and each run of blanks made one.

    Line ends stay; a line's edges have no blanks, and a line of nothing else goes. So two texts of one plain form are
    the same to a compiler. A text that compilers may read in two ways, or that asks for line numbers, stays as written.
    """
    continued = _CONTINUED in text
    if _AS_WRITTEN.search(text) or (continued and 'R"' in text):  # a raw literal keeps its backslashes
        return text
    if continued:
        text = text.replace(_CONTINUED, "")
    lines = _PIECE.sub(_plain_piece, text).split("\n")
    return "\n".join(filter(None, (line.strip(" ") for line in lines)))


@functools.cache
def kernel_headers() -> tuple[tuple[str, str], ...]:
    """Return (name as included, text) of every kernel file of the package."""
    return tuple(sorted(_walk(resources.files("outblas") / KERNELS_FOLDER, "")))


def _walk(directory: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".cuh"):
            yield prefix + entry.name, entry.read_text()


def _plain_piece(piece: re.Match[str]) -> str:
    if piece.lastgroup == "gap":
        return " "
    return piece[0].replace("\n", "\0")  # lines of a raw literal keep their edges


def _sha(headers: list[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(headers).encode()).hexdigest()
