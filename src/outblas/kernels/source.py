"""CUDA C++ text of one candidate, with all that its compilation depends on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import NamedTuple

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.epilogue import NO_EPILOGUE, Epilogue, prelude
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import geometry
from outblas.kernels.kernel_hash import kernel_headers


@dataclass(frozen=True)
class Source:
    """One translation unit.

    Attributes:
        text: CUDA C++; defines ``extern "C" __global__`` the function ``entry``.
        headers: (name as included, text) pairs; nothing else may be included.
        options: NVRTC options beyond those that every kernel gets, e.g. ``-DBM=128``.
        acc: the accumulator that the kernel claims, ``fp32`` or ``fp16``; checked in its SASS.
        family: kernel family, which is the name of its kernel, too.
    """

    text: str
    entry: str
    headers: tuple[tuple[str, str], ...]
    options: tuple[str, ...]
    acc: str
    family: str

    def sha(self) -> str:
        """SHA-256 (hex) over every field."""
        fields = [self.text, self.entry, self.headers, self.options, self.acc, self.family]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def make_source(problem: Problem, config: KernelConfig, epilogue: Epilogue = NO_EPILOGUE) -> Source:
    """The source of one template candidate: a prelude of constants and the family's kernel file.

    Only the problem's layout, dtype and accumulator enter: one cubin serves every M, N, K. With an epilogue the kernel
    takes three parameters more, in the end: bias and residual (addresses), and elements from a row of the residual to
    the next (64 bits).
    """
    lines = [f"#define ACC_FP16 {int(problem.acc == 'fp16')}"]
    family = FAMILIES[config.family]
    lines += family.source_lines(config)
    lines += [
        f"constexpr {'bool' if value in ('true', 'false') else 'int'} {name} = {value};"
        for name, value in geometry(problem, config).constants
    ]
    lines += [*prelude(epilogue), f'#include "{config.family}.cuh"', ""]
    headers = (*kernel_headers(), *family.headers(problem, config))
    return Source("\n".join(lines), config.family, headers, (), problem.acc, config.family)


class KernelKind(NamedTuple):
    """All that :func:`make_source` looks at, and how the kernel is launched: equal kinds, equal sources, one loaded
    kernel. Kinds that differ in ``even`` only have one source, hence one cubin, but two launches.

    Attributes:
        config: the kernel's knobs.
        layout: of B, ``TN`` or ``NN``.
        dtype: of A and B.
        acc: of the accumulator.
    """

    config: KernelConfig
    layout: str
    dtype: str
    acc: str


def kernel_kind(problem: Problem, config: KernelConfig) -> KernelKind:
    """The kind of a problem's kernel: a key that costs nothing to make."""
    return KernelKind(config, problem.layout, problem.dtype, problem.acc)


def sha_without_headers(source: Source) -> str:
    """SHA-256 (hex) of what a source has besides the package's kernel files.

    The kernel files' own hash is :func:`outblas.kernels.kernel_hash.kernels_sha`.
    Both say what :meth:`Source.sha` says, at a tenth of its cost: the kernel files are hashed once per process.
    """
    shared = kernel_headers()
    own = source.headers[len(shared) :] if source.headers[: len(shared)] == shared else source.headers
    fields = [source.text, source.entry, own, source.options, source.acc, source.family]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
