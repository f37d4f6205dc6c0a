"""The CUDA C++ source of a candidate, with everything on which its compilation depends."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.epilogue import NO_EPILOGUE, Epilogue, prelude
from outblas.kernels.families.registry import FAMILIES
from outblas.kernels.geometry import geometry
from outblas.kernels.kernel_hash import kernel_headers


@dataclass(frozen=True)
class Source:
    """A translation unit.

    Attributes:
        text: CUDA C++ that defines the ``extern "C" __global__`` function ``entry``.
        headers: (name as included, text) pairs; no other file may be included.
        options: NVRTC options in addition to those of every kernel, e.g. ``-DBM=128``.
        acc: accumulator that the kernel claims, ``fp32`` or ``fp16``; checked in its SASS.
    """

    text: str
    entry: str
    headers: tuple[tuple[str, str], ...]
    options: tuple[str, ...]
    acc: str
    family: str

    def sha(self) -> str:
        """Return the SHA-256 of all fields as 64 hex digits. Headers count as written, comments included."""
        fields = [self.text, self.entry, self.headers, self.options, self.acc, self.family]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def make_source(problem: Problem, config: KernelConfig, epilogue: Epilogue = NO_EPILOGUE) -> Source:
    """Return the source of a template candidate: a prelude of constants, then an include of the family's kernel file.

    It depends only on the problem's layout, dtype and accumulator, so one cubin serves every M, N, K. Its ``entry`` and
    ``family`` are the family's name, ``options`` is empty, and ``acc`` is the problem's. Legality is not checked. With
    an epilogue, the kernel has three more parameters at the end. These are the addresses of bias and residual, and the
    distance between rows of the residual (elements, 64 bits).
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


def sha_without_headers(source: Source) -> str:
    """Return the SHA-256 (64 hex digits) of a source without the package's kernel files.

    It covers all other fields, and headers that follow the package's files. If the headers do not begin with exactly
    the package's files, all of them count. Together with :func:`outblas.kernels.kernel_hash.kernels_sha` it identifies
    a source as :meth:`Source.sha` does. It costs a tenth of that, because the kernel files are hashed once per process.
    """
    shared = kernel_headers()
    own = source.headers[len(shared) :] if source.headers[: len(shared)] == shared else source.headers
    fields = [source.text, source.entry, own, source.options, source.acc, source.family]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
