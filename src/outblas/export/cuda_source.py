"""Write one CUDA file from a :class:`outblas.kernels.source.Source`: every header replaces its include."""

from __future__ import annotations

import re

from outblas.export.target import Target
from outblas.kernels.source import Source, make_source

_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_OPENS, _CLOSES = re.compile(r"\s*#\s*if"), re.compile(r"\s*#\s*endif")
_ONCE = re.compile(r"\s*#\s*pragma\s+once")
#: nvcc would warn of constants that a header defines and this kernel does not use.
_NO_WARNING = "#pragma nv_diag_suppress 177"


def standalone(target: Target) -> str:
    """Return the kernel's source as one file, which ``nvcc -arch=sm_90a -std=c++17`` compiles alone."""
    then = (
        f"Compile: nvcc -std=c++17 -arch=sm_90a -cubin -o {target.name}.cubin {target.name}.cu",
        "Measured kernels were compiled by NVRTC, as outblas export --format cubin does; nvcc's code may differ. The "
        "kernel serves every M, N and K that its knobs are legal for.",
    )
    return f"{target.comment(*then)}\n{_NO_WARNING}\n{inline_includes(make_source(target.problem, target.config))}"


def inline_includes(source: Source) -> str:
    """Return the source's text with each header in place of its first include, as with ``#pragma once``.

    The preprocessor may leave out a header inside ``#if``. Such a header does not count as seen by later lines, and a
    guard keeps it from being compiled twice.
    """
    return "\n".join(_lines(source.text, dict(source.headers), set(), False)) + "\n"


def _lines(text: str, headers: dict[str, str], seen: set[str], conditional: bool) -> list[str]:
    made: list[str] = []
    depth = 0
    for line in text.splitlines():
        depth += bool(_OPENS.match(line)) - bool(_CLOSES.match(line))
        include = _INCLUDE.match(line)
        if include is None:
            made += [] if _ONCE.match(line) else [line]
            continue
        name, inside = include[1], conditional or depth > 0
        if name in seen:
            continue
        # Headers seen inside a condition are known inside it only.
        within = set(seen) if inside else seen
        within.add(name)
        guard = f"OUTBLAS_{re.sub(r'[^A-Z0-9]+', '_', name.upper())}"
        body = _lines(headers[name], headers, within, inside)
        made += [f"#ifndef {guard}", f"#define {guard}", f"// {name}", *body, f"#endif  // {guard}"]
    return made
