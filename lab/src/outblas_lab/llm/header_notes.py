"""Device functions of the project's headers for free kernels: signatures and comments, as prompts list them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from outblas.kernels.kernel_hash import kernel_headers

#: Headers in `kernels/ptx/` that prompts list, the rest being of use to our own generators only.
LISTED_HEADERS = ("types", "sync", "load", "cp_async", "mma", "mbarrier", "tma", "wgmma", "cluster")
#: A function's comment, its template line and its head up to the body.
_FUNCTION = re.compile(
    r"(?P<comment>(?:^//[^\n]*\n)*)(?P<template>^template[^\n]*\n)?"
    r"^__device__ __forceinline__ (?P<head>[^{;]*?\))\s*\{",
    re.M,
)


@cache
def header_listing() -> str:
    """Return text on all listed headers of the package's kernel files, one after the other, for a prompt.

    Each begins with its name, such as ``ptx/types.cuh:``. The lines of its declarations follow, indented by two blanks.
    """
    return "\n".join(line for name in LISTED_HEADERS for line in _header(name))


def _header(name: str) -> Iterator[str]:
    text = dict(kernel_headers())[f"ptx/{name}.cuh"]
    yield f"ptx/{name}.cuh:"
    for alias in re.findall(r"^using [^;]*;", text, re.M):
        yield f"  {alias}"
    for found in _FUNCTION.finditer(text):
        for line in found["comment"].splitlines():
            yield f"  {line}"
        template = " ".join((found["template"] or "").split())
        yield f"  {template} {' '.join(found['head'].split())}".replace("   ", "  ")
