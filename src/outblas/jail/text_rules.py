"""What a text may not say before a compiler reads it: files outside, and ways around the look at its symbols.

The first line only: a compiler runs jailed where the system allows (outblas.jail.confined_compiler), and so does the
kernel.
"""

from __future__ import annotations

import re

from outblas.kernels.custom.cuda_text import join_continued_lines, split_text, without_comments

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
    ".mri": "an assembler's other syntax (.mri)",
    ".macro": "an assembler's macro (.macro)",
    ".altmacro": "an assembler's macro (.altmacro)",
    ".irp": "an assembler's loop (.irp)",
    ".rep": "an assembler's loop (.rept)",
}
#: Characters by number: what they spell is not seen by who reads the text.
_BY_NUMBER = re.compile(r"\\(?:[uU][0-9a-fA-F{]|N\{)")
_PRAGMA_WORD = re.compile(r'\b_?_pragma\b(?!\s*\(\s*"(?:no)?unroll(?:\s+\w+)?"\s*\))', re.IGNORECASE)
_HAS_WORD = re.compile(r"__has_(?:include|embed)\w*(?!\w)(?!\s*\()")
_ASSEMBLY = re.compile(r"\b(?:asm|__asm|__asm__)\b")
#: Of a template: literals (blanks by now) and names, up to the operands.
_TEMPLATE = re.compile(r"\b(?:asm|__asm|__asm__)\b(?:\s|\b\w+\b)*\(([^:;)]*)")
_CALL = re.compile(r"\w+\s*\(")
_QUOTING = re.compile(r"\b\w*STR(?:ING|INGIZE|INGIFY|IZE)?\w*\s*\(")
_PASTES = re.compile(r"##|%:%:|CONCAT|_CAT\b|JOIN")
#: A macro that makes a literal of its argument: one # before a name.
_QUOTES = re.compile(r"define\s+\w+\(.*?(?<![#:=])(?:#|%:|\?\?=)(?![#%?])\s*\w")
_FILE_PRAGMAS = ("dependency", "pch_preprocess", "include_alias", "interface", "implementation")
_INTERNAL = re.compile(
    r"nv_?\w{0,40}[fF]at[bB]in\w*|__cuda(?:Register|Unregister|Init|Push|Pop)\w*|__nv_\w{0,60}[Rr]egister\w*"
)
_DRIVER = re.compile(r"\b(?:cu(?:Module|Library|Link)\w+|nvrtc\w+)\b")


def refusal(text: str) -> str | None:
    """Why a text is not given to a compiler; None: it is."""
    for line in (*_directives(text), *_anywhere(text), *_anywhere(join_continued_lines(text))):
        if reason := _directive(line):
            return reason
    if reason := _unreadable(text):
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


def _unreadable(text: str) -> str | None:
    """What a text says in a way that only a compiler reads."""
    code, _ = _split(text)
    plain = without_comments(text).replace("\\\\", "")
    if found := _BY_NUMBER.search(plain):
        return f"it spells characters by number ({found[0]}...)"
    if _PRAGMA_WORD.search(plain):
        return "_Pragma: write #pragma on a line of its own"
    if found := _HAS_WORD.search(code):
        return f"{found[0]} without a header in parentheses"
    pasted = re.sub(r"[\s(),#%:]", "", code) if _PASTES.search(code) else ""  # macros may make the word of its parts
    if _ASSEMBLY.search(code) or "asm" in pasted:
        if any(_QUOTES.search(line) for line in _directives(text)) or _QUOTING.search(code):
            return "a macro that makes literals (#), beside assembly: write the literal"
        if any(_CALL.search(found[1]) for found in _TEMPLATE.finditer(code)):
            return "assembly that a macro writes: write it as literals"
    return None


def _directives(text: str) -> list[str]:
    """Lines that begin with a #, without comments."""
    plain = without_comments(text)
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
    if name == "line" or name.isdigit():
        return "#line: a text does not name other files' lines"
    if name == "embed":
        return "#embed reads files"
    if name in ("include", "include_next", "import"):
        if not _HEADER.fullmatch(rest):
            return f'#{name} {rest[:60]}: a header is named as it is, <name> or "name"'
        if not _inside(rest):
            return f"#{name} {rest[:60]}: only headers that are given"
    if name == "pragma" and any(word in rest for word in _FILE_PRAGMAS):
        return f"#pragma {rest[:60]} asks for files"
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
