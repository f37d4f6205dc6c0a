"""The package's kernel files and their hash. Comments and white space do not change the hash."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable

#: Folder of the kernel files in the package. Its name enters no hash.
KERNELS_FOLDER = "kernels/cuda"
#: A gap is white space and comments. Literals and numbers are matched so that no gap is found inside them. An unclosed
#: literal extends to the end of its line, because text after it is not surely a comment. The look-ahead in the first
#: line is for speed only.
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
#: Text that compilers may read in two ways, and text whose meaning depends on line numbers or spelling.
_AS_WRITTEN = re.compile(
    r"""\\[ \t\v\f]+\n | \r | \0 | \?\?[=/'()!<>-] | \#[ \t]*include[ \t]*<[^>\n]*/[/*]
    | __LINE__ | __builtin_LINE | \bassert\b | source_location""",
    re.VERBOSE,
)
_CONTINUED = "\\\n"


@functools.cache
def kernels_sha() -> str:
    """Return the SHA-256 (64 hex digits) of all kernel files of the package.

    The files count in their plain form (:func:`without_comments`). Equal hashes mean equal kernels. It is computed once
    per process.
    """
    return headers_sha(kernel_headers())


def headers_sha(headers: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 (64 hex digits) of kernel files in their plain form (:func:`without_comments`).

    Names and order count: the same pairs in another order give another hash.

    Args:
        headers: (name as included, text) pairs, as from :func:`kernel_headers`; may be empty.
    """
    return _sha([(name, without_comments(text)) for name, text in headers])


def without_comments(text: str) -> str:
    """Return CUDA C++ text without comments, with each run of white space as one blank.

    Line ends stay, except inside a block comment. Lines lose blanks at their edges, and empty lines are removed. A
    comment between two tokens becomes a blank. Example: ``"int x; // c"``, an empty line and ``" y/* a */z;"`` give the
    lines ``"int x;"`` and ``"y z;"``, without a line end after the last.

    Two texts of equal plain form are the same to a compiler. Some texts are returned exactly as written: those that
    compilers may read in two ways, and those that use line numbers or ``assert``. A mention in a comment is enough.
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
    """Return (name as included, text) of every ``.cuh`` file of the package, sorted by name.

    A name is a path under the kernel folder, e.g. ``sm80_mma_gemm.cuh`` or ``ptx/mma.cuh``. Generated headers are not
    included.
    """
    return tuple(sorted(_walk(resources.files("outblas") / KERNELS_FOLDER, "")))


def _walk(directory: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (name as included, text) of every .cuh file under a folder."""
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".cuh"):
            yield prefix + entry.name, entry.read_text()


def _plain_piece(piece: re.Match[str]) -> str:
    """Return the plain form of a match: a blank for a gap, else the text with newlines as NUL."""
    if piece.lastgroup == "gap":
        return " "
    return piece[0].replace("\n", "\0")  # protects the lines of a raw literal from stripping


def _sha(headers: list[tuple[str, str]]) -> str:
    return hashlib.sha256(json.dumps(headers).encode()).hexdigest()
