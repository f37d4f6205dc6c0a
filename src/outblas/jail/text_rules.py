"""What a text may not say before a compiler reads it: files outside, and ways around the look at its symbols.

The first line only: a compiler runs jailed where the system allows (outblas.jail.confined_compiler), and so does the
kernel.
"""

from __future__ import annotations

import re

from outblas.kernels.custom.cuda_text import join_continued_lines, split_text

_DIRECTIVE = re.compile(r"(?:#|%:|\?\?=)\s*(\w+)\s*(.*)")
_HEADER = re.compile(r'<[\w+\-.\/]+>|"[\w+\-.\/]+"')
#: What lies between a # and what it asks for, and a directive that reads files wherever it stands, in a comment, too:
#: what is one is not for a scan alone to say.
_GAP = r"(?:\s|\\\s|/\*(?:[^*]|\*(?!/)){0,500}\*/)*"
_ANYWHERE = re.compile(rf"(?:#|%:|\?\?=){_GAP}((?:include(?:_next)?|import|embed)\b[^\r\n]*)", re.DOTALL)
_COMMENT = re.compile(r"/\*.*?(?:\*/|$)|//.*", re.DOTALL)
_HAS = re.compile(r"__has_(?:include|embed)(?:_next)?\s*\(\s*([^)]*)\)")
#: In literals: assembly that reads files or calls the kernel by itself, and names that the look at symbols refuses.
_LITERALS = {
    ".incbin": "assembly that reads a file (.incbin)",
    ".include": "assembly that reads a file (.include)",
    "syscall": "assembly that calls the system",
    "int $0x80": "assembly that calls the system",
    "sysenter": "assembly that calls the system",
    "svc #0": "assembly that calls the system",
}
_INTERNAL = re.compile(
    r"nv_?\w{0,40}[fF]at[bB]in\w*|__cuda(?:Register|Unregister|Init|Push|Pop)\w*|__nv_\w{0,60}[Rr]egister\w*"
)
_DRIVER = re.compile(r"\b(?:cu(?:Module|Library|Link)\w+|nvrtc\w+)\b")


def refusal(text: str) -> str | None:
    """Why a text is not given to a compiler; None: it is."""
    for line in (*_directives(text), *_anywhere(text), *_anywhere(join_continued_lines(text))):
        if reason := _directive(line):
            return reason
    code, literals = _split(text)
    joined = literals.lower()
    pasted = re.sub(r"##|\s", "", code).lower()  # a macro makes a literal of it
    for what, reason in _LITERALS.items():
        if what in joined or (what.startswith(".") and f"({what}" in pasted):
            return reason
    for found in (_INTERNAL.search(code + " " + literals), _DRIVER.search(code + " " + literals)):
        if found:
            return f"it names {found[0]}, which loads code that nobody has looked at"
    return None


def _directives(text: str) -> list[str]:
    """Lines that begin with a #, without comments."""
    plain = "".join(" " if p.kind == "comment" else p.text for p in split_text(join_continued_lines(text)))
    return [line.strip() for line in plain.split("\n") if line.lstrip().startswith(("#", "%:", "??="))]


def _anywhere(text: str) -> list[str]:
    """Whatever a compiler that reads comments and literals otherwise could take for a directive that reads files."""
    lines = []
    for found in _ANYWHERE.finditer(text):
        before = text[max(0, found.start() - 200) : found.start()].rpartition("\n")[2].rstrip()
        asked = _COMMENT.sub(" ", found[1])
        if '"' in asked or "<" in asked or not before or before.endswith("*/"):  # else a sentence on one
            lines.append(f"#{asked}")
    return lines


def _directive(line: str) -> str | None:
    match = _DIRECTIVE.match(line)
    if match is None:
        return None
    name, rest = match[1], match[2].strip()
    for asked in _HAS.findall(rest):
        if not (_HEADER.fullmatch(asked.strip()) and _inside(asked.strip())):
            return f"it asks whether {asked.strip()[:60]} exists"
    if name == "embed":
        return "#embed reads files"
    if name in ("include", "include_next", "import"):
        if not _HEADER.fullmatch(rest):
            return f'#{name} {rest[:60]}: a header is named as it is, <name> or "name"'
        if not _inside(rest):
            return f"#{name} {rest[:60]}: only headers that are given"
    if name == "pragma" and "dependency" in rest:
        return "#pragma dependency asks for files"
    return None


def _inside(header: str) -> bool:
    """Whether a header's name stays within the folders that are given."""
    name = header.strip('<>" ')
    return not name.startswith("/") and ".." not in name.split("/") and "\\" not in name


def _split(text: str) -> tuple[str, str]:
    """(code, literals run together as the compiler does, escapes undone)."""
    code, literals = [], []
    for kind, part in split_text(join_continued_lines(text)):
        if kind == "literal":
            literals.append(_plain(part))
            code.append(" ")
        elif kind != "comment":
            code.append(part)
    return "".join(code), "".join(literals)


def _plain(literal: str) -> str:
    body = re.sub(r'^(?:u8|[uUL])?R?["\'](?:[^("]{0,16}\()?|(?:\)[^"]{0,16})?["\']$', "", literal)
    try:
        return re.sub(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3})", _escape, body)
    except ValueError:
        return body


def _escape(match: re.Match[str]) -> str:
    digits = match[1]
    return chr(int(digits[1:], 16) if digits[0] == "x" else int(digits, 8) & 0xFF)
