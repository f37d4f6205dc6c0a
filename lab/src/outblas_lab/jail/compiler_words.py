"""Clean a compiler's output before it reaches a user, a store or a language model's server.

A compiler quotes each faulty line. A line of another file must not be disclosed.
"""

from __future__ import annotations

import re

from outblas.core.clean_text import clean_text

#: A line below a quoted one that points into it.
_POINTER = re.compile(r"^[\s~]*\^[\s~^]*$")
#: What the host's compiler puts before a line that it quotes, its number, and before a pointer.
_NUMBERED = re.compile(r"^\s*\d*\s*\|(.*)$")


def own_words(said: str, text: str, limit: int) -> str:
    """Return a compiler's output without lines quoted from other files.

    File names in the output are not trusted, because a text can make a compiler print any name. A quoted line stays if
    it occurs in the text. Example: of the lines ``a.cu(1): error``, ``1 | int x`` and ``2 | root:x:0``, the last is
    left out for the text ``int x``.

    Args:
        said: the compiler's whole output.
        text: the compiled text.
        limit: most characters of ``said`` that are read, from its beginning.
    """
    own = {line.strip() for line in clean_text(text).split("\n")}
    kept: list[str] = []
    for line in clean_text(said, limit).split("\n"):
        if found := _NUMBERED.match(line):
            if found[1].strip() not in own and not _POINTER.match(found[1]):
                continue
        elif _POINTER.match(line) and kept and kept[-1].strip() not in own:
            kept.pop()
            continue
        kept.append(line)
    return "\n".join(kept)
