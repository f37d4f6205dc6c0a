"""What a compiler said, made fit to hand on: to a user, a store, a language model's server.

A compiler quotes the line that it complains of. Where that line is another file's, it is nobody's business.
"""

from __future__ import annotations

import re

from outblas.core.clean_text import clean_text

#: A line below a quoted one that points into it.
_POINTER = re.compile(r"^[\s~]*\^[\s~^]*$")
#: What the host's compiler puts before a line that it quotes, its number, and before a pointer.
_NUMBERED = re.compile(r"^\s*\d*\s*\|(.*)$")


def own_words(said: str, text: str, limit: int) -> str:
    """Return a compiler's words without the lines that it quotes of other files, cleaned.

    No name of a file is believed, for a text can make a compiler say any: a quoted line stays if the text has it.

    Args:
        said: all that the compiler said.
        text: what it compiled.
        limit: most characters that are kept.
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
