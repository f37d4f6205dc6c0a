"""Reject texts before a compiler reads them: those that name outside files or hide symbols from the later check.

This is the first line of defence only. The compiler runs jailed if the system allows it
(outblas_lab.jail.confined_compiler), and so does the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from outblas_lab.custom.cuda_text import join_continued_lines, split_text, without_comments

_DIRECTIVE = re.compile(r"(?:#|%:|\?\?=)\s*(\w+)\s*(.*)")
_HEADER = re.compile(r'<[\w+\-.\/]+>|"[\w+\-.\/]+"')
#: The gap between a # and its directive, and a directive that reads files. It is searched in the whole text, comments
#: included, because a scan cannot decide reliably where a comment ends.
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
    ".mri": "alternative assembler syntax (.mri)",
    ".macro": "an assembler macro (.macro)",
    ".altmacro": "an assembler macro (.altmacro)",
    ".irp": "an assembler loop (.irp)",
    ".rep": "an assembler loop (.rept)",
}
#: An assembler takes a comment out of the middle of a word.
_IN_ASSEMBLY = {**_LITERALS, "/*": "a comment in assembly, which can split a word"}
#: Characters by number: a reader of the text does not see the word that they spell.
_BY_NUMBER = re.compile(r"\\(?:[uU][0-9a-fA-F{]|[Nxo]\{)")
#: Ends of lines, continued ones and literals that compilers do not all read alike.
_ODD_LINES = {
    re.compile(r"\r(?!\n)"): "a carriage return without a line feed",
    re.compile(r"\\[ \t]*[\v\f][ \t\v\f]*\r?\n"): "a backslash and a form feed at the end of a line",
    re.compile(r"\?\?/"): "a trigraph",
    re.compile(
        r'R"(?=(?s:.*)\\[ \t\v\f]*\r?\n)|\\[ \t\v\f]*\r?\n(?=(?s:.*)R")'
    ): "a raw literal together with a continued line",
}
_PRAGMA_WORD = re.compile(r'\b_?_pragma\b(?!\s*\(\s*"(?:no)?unroll(?:\s+\w+)?"\s*\))', re.IGNORECASE)
_HAS_WORD = re.compile(r"__has_(?:include|embed)\w*(?!\w)(?!\s*\()")
#: What an assembler is given as it stands: assembly, and names of sections and symbols in attributes.
_SAID_TO_IT = r"\b(?:asm|__asm|__asm__|_*(?:section|symver|weakref|ifunc)_*|__alias__|alias(?=\s*\())(?![\w$])"
_ASSEMBLY = re.compile(_SAID_TO_IT)
_PASTED_ASSEMBLY = re.compile(r"asm|section|symver|weakref|ifunc|alias")
#: Of a template: literals (blanks by now) and names, up to the operands.
_TEMPLATE = re.compile(rf"{_SAID_TO_IT}(?:\s|\b\w+\b)*\(([^:;)]*)")
_BARE = re.compile(r"\b(?:asm|__asm|__asm__)\b(?!\s*(?:(?:volatile|__volatile|__volatile__|goto|inline)\s*)*\()")
_WORD = re.compile(r"[^\W\d][\w$]*|\$[\w$]*")
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


def refusal(text: str, host: bool = True) -> str | None:
    """Return why a text is not given to a compiler; None: it is. Nothing is compiled, and no error is raised.

    Args:
        host: whether the host's assembler reads its assembly.
    """
    text = text.lstrip("\ufeff")  # a mark of the byte order is no part of the first line
    for line in (*_directives(text), *_anywhere(text), *_anywhere(join_continued_lines(text))):
        if reason := _directive(line):
            return reason
    if reason := _unreadable(text) or (_spliced(text) if host else None):
        return reason
    code, literals = _split(text)
    joined = literals.lower()
    pasted = re.sub(r"##|\s", "", code).lower()  # a macro makes a literal of it
    for what, reason in _LITERALS.items():
        if what in joined or (what.startswith(".") and f"({what}" in pasted):
            return reason
    for found in (_INTERNAL.search(code + " " + literals), _DRIVER.search(code + " " + literals)):
        if found:
            return f"it names {found[0]}, which can load unchecked code"
    return None


def _unreadable(text: str) -> str | None:
    """Return why only a compiler can read the text reliably; None if a scan can read it."""
    code, _ = _split(text)
    plain = without_comments(text).replace("\\\\", "")
    for odd, what in _ODD_LINES.items():
        if odd.search(text):
            return f"{what}, which compilers interpret differently"
    if found := _BY_NUMBER.search(plain):
        return f"it writes characters as numeric escapes ({found[0]}...)"
    if _PRAGMA_WORD.search(plain):
        return "_Pragma is not allowed: write #pragma on its own line"
    if found := _HAS_WORD.search(code):
        return f"{found[0]} without a header in parentheses"
    pasted = re.sub(r"[\s(),#%:]", "", code) if _PASTES.search(code) else ""  # macros may make the word of its parts
    if _ASSEMBLY.search(code) or _PASTED_ASSEMBLY.search(pasted):
        if any(_QUOTES.search(line) for line in _directives(text)) or _QUOTING.search(code):
            return "a macro that makes literals (#) together with assembly: write the literal"
        if any(_CALL.search(found[1]) for found in _TEMPLATE.finditer(code)):
            return "assembly from a macro: write it as literals"
    return None


def _spliced(text: str) -> str | None:
    """Return why macros could pass a forbidden directive to the host's assembler; None if they cannot."""
    code, _ = _split(text)
    if not _ASSEMBLY.search(code):
        return None
    joined = join_continued_lines(text)
    macros = literal_macros(_directives(text), _plain)
    if _BARE.search(code):
        return "asm without its literals: write asm, then its literals in parentheses"
    for template in _TEMPLATE.finditer(code):
        if strange := next((word for word in _WORD.findall(template[1]) if word not in macros), None):
            return f"assembly from a macro ({strange[:40]}): write it as literals"
    runs = runs_of(joined, _plain)
    return next((reason for what, reason in _IN_ASSEMBLY.items() if can_say(what, runs, macros)), None)


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
            return f"it tests whether {asked.strip()[:60]} exists"
    if name == "line" or name.isdigit():
        return "#line is not allowed"
    if name == "embed":
        return "#embed is not allowed: it reads files"
    if name in ("include", "include_next", "import"):
        if not _HEADER.fullmatch(rest):
            return f'#{name} {rest[:60]}: write the header as <name> or "name"'
        if not _inside(rest):
            return f"#{name} {rest[:60]}: only the provided headers are allowed"
    if name == "pragma" and any(word in rest for word in _FILE_PRAGMAS):
        return f"#pragma {rest[:60]} reads files"
    return None


def _inside(header: str) -> bool:
    """Return True if a header's name stays within the given folders."""
    name = header.strip('<>" ')
    return not name.startswith("/") and ".." not in name.split("/") and "\\" not in name


def _split(text: str) -> tuple[str, str]:
    """(code, literals run together as the compiler does, escapes undone)."""
    code, literals = [], []
    for kind, part in split_text(join_continued_lines(text)):
        if kind == "literal":
            literals.append(_plain(part))
            # A raw literal may be none to a compiler, in a group that is left out.
            code.append(f" {part} " if "R" in part[:3] and part[0] not in "\"'" else " ")
        elif kind != "comment":
            code.append(part)
    return "".join(code), "".join(literals)


def _plain(literal: str) -> str:
    body = re.sub(r'^(?:u8|[uUL])?R?["\'](?:[^("]{0,16}\()?|(?:\)[^"]{0,16})?["\']$', "", literal)
    try:
        return re.sub(r"\\(x[0-9a-fA-F]+|[0-7]{1,3})", _escape, body)
    except ValueError:
        return body


def _escape(match: re.Match[str]) -> str:
    digits = match[1]
    return chr(int(digits[-2:].lstrip("x"), 16) if digits[0] == "x" else int(digits, 8) & 0xFF)


_DEFINE = re.compile(r"(?:#|%:|\?\?=)\s*define\s+([^\W\d][\w$]*|\$[\w$]*)(?![\w$(])(.*)", re.DOTALL)
#: A run of literals and names: (True for a literal, its content or name).
Run = Sequence[tuple[bool, str]]


def literal_macros(directives: Iterable[str], plain: Callable[[str], str]) -> dict[str, list[Run]]:
    """Return the macros without arguments that stand for literals and names, each with all of its texts.

    A macro with several runs in one definition, and one with arguments, is left out. Example:
    ``literal_macros(['#define X "in"'], plain)`` returns ``{"X": [[(True, "in")]]}`` if ``plain`` takes the quotes
    away.

    Args:
        directives: lines such as ``#define X "in"``, without comments.
        plain: called with each literal; returns what it says, without its quotes.
    """
    found: dict[str, list[Run]] = {}
    opaque = set[str]()
    for line in directives:
        if match := _DEFINE.match(line):
            whole = runs_of(match[2], plain)
            if len(whole) > 1:
                opaque.add(match[1])
            found.setdefault(match[1], []).extend(whole)
    return {name: texts for name, texts in found.items() if name not in opaque}


def runs_of(text: str, plain: Callable[[str], str]) -> list[Run]:
    """Return what lies side by side in a text: literals and names, with nothing else between them.

    Example: ``runs_of('"ab" X "c", "d"', plain)`` returns ``[[(True, "ab"), (False, "X"), (True, "c")], [(True,
    "d")]]``. True stands for a literal, False for a name. The list has no empty run.

    Args:
        text: with its continued lines joined.
    """
    runs: list[list[tuple[bool, str]]] = [[]]
    for kind, part in split_text(text):
        if kind == "literal":
            runs[-1].append((True, plain(part)))
        elif kind == "code":
            at = 0
            for name in _WORD.finditer(part):
                if name.start() > at:
                    runs.append([])
                runs[-1].append((False, name[0]))
                at = name.end()
            if at < len(part):
                runs.append([])
    return [run for run in runs if run]


def can_say(word: str, runs: Iterable[Run], macros: dict[str, list[Run]]) -> bool:
    """Return whether some run says a word, in capitals or not, with some texts of its macros.

    Args:
        word: in small letters.
    """
    known: dict[tuple[str, int], frozenset[int]] = {}
    all_of_it = len(word)

    def read(said: int, text: str) -> int:
        """Return the number of the word's characters that are spelled when ``text`` follows ``said`` of them."""
        whole = word[:said] + text
        if word in whole:
            return all_of_it
        return next(n for n in range(min(all_of_it - 1, len(whole)), -1, -1) if whole.endswith(word[:n]))

    def after(run: Run, begun: frozenset[int]) -> frozenset[int]:
        for is_literal, text in run:
            if all_of_it in begun:
                break
            if is_literal:
                begun = frozenset(read(said, text.lower()) for said in begun)
            elif text in macros:
                begun = begun.union(*(named(text, said) for said in begun))
            else:
                begun |= {0}
        return begun

    def named(name: str, said: int) -> frozenset[int]:
        if (name, said) not in known:
            known[name, said] = frozenset({said})  # a macro does not name itself
            known[name, said] = frozenset({said}).union(*(after(run, frozenset({said})) for run in macros[name]))
        return known[name, said]

    return any(all_of_it in after(run, frozenset({0})) for run in runs)
