"""Tools shared by the tests of kernel families."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.geometry import geometry, workspace_bytes
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import make_source
from support.gpus.known import H200

#: An incomplete type whose arguments the compiler's message spells out, before any code is generated.
PROBE = "\ntemplate <int, int, int> struct Probe;\nProbe<SMEM_BYTES, THREADS, {split}> probe;\n"


def assert_device_agrees(problem: Problem, config: KernelConfig) -> None:
    """Assert that shared memory and threads of a legal kernel are those of its device code."""
    pytest.importorskip("cuda.bindings")
    if workspace_bytes(problem, config):
        problem = replace(problem, m=512, n=512)
    assert why_illegal(problem, config, H200) is None
    shape = geometry(problem, config)
    assert device_constants(problem, config) == (shape.smem_bytes, shape.threads)


def device_constants(problem: Problem, config: KernelConfig) -> tuple[int, int]:
    """(SMEM_BYTES, THREADS) as the device code has them."""
    from outblas.core.errors import CompileError
    from outblas.runtime.nvrtc import compile_source

    source = make_source(problem, config)
    probe = PROBE.format(split="SPLIT" if "SPLIT" in dict(geometry(problem, config).constants) else 1)
    with pytest.raises(CompileError) as caught:
        compile_source(replace(source, text=source.text + probe), cache=None)
    found = re.search(r"Probe<(\d+), (\d+), (\d+)>", caught.value.log)
    assert found and int(found[3]) == config.split_k, caught.value.log
    return int(found[1]), int(found[2])
