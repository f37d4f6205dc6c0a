"""Generated text, held to golden files.

``OUTBLAS_REGENERATE_GOLDEN=1 python -m pytest tests/unit/test_source.py`` rewrites them.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.config import KernelConfig, kernel_kind
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.families.wgmma_text import wgmma_instance
from outblas.kernels.source import Source, make_source

GOLDEN = Path(__file__).resolve().parents[1] / "support" / "golden"
REGENERATE = os.environ.get("OUTBLAS_REGENERATE_GOLDEN") == "1"
P = Problem(4096, 4096, 4096)
PRELUDES: dict[str, tuple[Problem, KernelConfig]] = {
    "sm90_pingpong_cluster": (P, Sm90WgmmaConfig(64, 256, 64, 4, 2, "pingpong", 2, 1, persistent=True)),
    "sm90_split_nn_bf16": (
        replace(P, layout="NN", dtype="bf16"),
        Sm90WgmmaConfig(64, 96, 128, 3, split_k=4, store="direct", pdl=True),
    ),
    "sm90_workspace": (
        Problem(512, 512, 8192),
        Sm90WgmmaConfig(128, 128, 64, 6, 2, "coop", 2, 1, 5, store="direct", split_kind="workspace"),
    ),
    "sm80_warps_split": (P, Sm80MmaConfig(16, 32, 128, 3, 1, 1, 4, split_k=8)),
    "sm80_scalar_fp16_acc": (Problem(127, 1001, 333, "NN", acc="fp16"), Sm80MmaConfig(64, 64, vec=1)),
    "sm90_stagger": (P, Sm90WgmmaConfig(256, 128, 64, 4, 2, "stagger", 1, 2, persistent=True)),
    "sm80_pipelined_split": (Problem(512, 512, 8192), Sm80PipelinedConfig(128, 96, 32, 4, split_k=3)),
    "sm80_direct_warps_over_k": (Problem(64, 64, 512), Sm80DirectConfig(16, 16, 1, 1, 4, 4)),
    "sm80_direct_nn_fp16_acc": (Problem(64, 64, 512, "NN", acc="fp16"), Sm80DirectConfig(64, 64, 2, 2, pdl=True)),
    "sm80_gemv_registers": (Problem(1, 4096, 4096), Sm80GemvConfig(8, 32, 1, 8, 2, split_k=2)),
    "sm80_gemv_walk": (
        Problem(8, 4096, 4096),
        Sm80GemvConfig(8, 16, 1, 8, 4, persistent=True, l2="stream_b", kept_k=4096),
    ),
    "sm80_gemv_shared_nn_bf16": (
        Problem(16, 4096, 4096, "NN", "bf16"),
        Sm80GemvConfig(16, 128, 2, 4, 4, "shared", prefetch=128, pdl=True, early=True),
    ),
}
KINDS = {
    "tn_fp16_fp32": P,
    "nn_fp16_fp32": replace(P, layout="NN"),
    "tn_bf16_fp32": replace(P, dtype="bf16"),
    "nn_bf16_fp32": replace(P, layout="NN", dtype="bf16"),
    "tn_fp16_fp16": replace(P, acc="fp16"),
    "nn_fp16_fp16": replace(P, layout="NN", acc="fp16"),
}


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.cuh"
    if REGENERATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path.name} is missing: see the head of this file"
    assert text == path.read_text(), f"{path.name}: if the change is meant, see the head of this file"


@pytest.mark.parametrize("name", PRELUDES)
def test_preludes_are_golden(name: str) -> None:
    assert_golden(f"prelude_{name}", make_source(*PRELUDES[name]).text)


def test_the_shortest_wgmma_instances_are_golden() -> None:
    assert_golden("wgmma_n8", "".join(wgmma_instance(8, problem) for problem in KINDS.values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [8, 16, 256])
def test_wgmma_instances_say_what_ptx_wants(n: int, kind: str) -> None:
    """Each accumulator register is an operand; both descriptors and the scale follow; types and transposition are
    right.
    """
    text, problem = wgmma_instance(n, KINDS[kind]), KINDS[kind]
    half = problem.acc == "fp16"
    registers = n // 4 if half else n // 2
    operands = re.search(r'"\{([%\d, ]+)\}, "\s*"%(\d+), %(\d+), p, 1, 1, 0, ([01]);', text)
    assert operands
    assert operands[1].split(", ") == [f"%{i}" for i in range(registers)]
    assert (int(operands[2]), int(operands[3])) == (registers, registers + 1)
    assert operands[4] == ("1" if problem.layout == "NN" else "0")
    dtype = "bf16" if problem.dtype == "bf16" else "f16"
    assert f"m64n{n}k16.{'f16' if half else 'f32'}.{dtype}.{dtype} " in text
    assert f"setp.ne.b32 p, %{registers + 2}, 0" in text
    constraint = "r" if half else "f"
    assert re.findall(r'"\+(\w)"\(d\[(\d+)\]\)', text) == [(constraint, str(i)) for i in range(registers)]
    assert f"{'u32' if half else 'float'} (&d)[{registers}]" in text


def test_a_source_carries_all_of_its_headers() -> None:
    """All included files are handed over, so the same text compiles the same on every machine."""
    for problem, config in PRELUDES.values():
        source = make_source(problem, config)
        headers = dict(source.headers)
        wanted, seen = re.findall(r'#include "([^"]+)"', source.text), set[str]()
        while wanted:
            name = wanted.pop()
            if name not in seen:
                seen.add(name)
                wanted += re.findall(r'#include "([^"]+)"', headers[name])
        assert f"{config.family}.cuh" in seen
        assert not any("#include <" in headers[name] for name in seen)
        assert (source.entry, source.family, source.acc) == (config.family, config.family, problem.acc)


def test_one_source_serves_all_extents_of_a_kind() -> None:
    for problem, config in PRELUDES.values():
        for extents in ((8, 16, 24), (1, 1, 1), (4096, 4097, 333)):
            m, n, k = extents
            assert make_source(replace(problem, m=m, n=n, k=k), config) == make_source(problem, config)


@pytest.mark.parametrize("config", [Sm80MmaConfig(16, 16, pdl=True), Sm80DirectConfig(16, 8, pdl=True, early=True)])
def test_even_is_another_launch_of_the_same_cubin(config: KernelConfig) -> None:
    """Both have the same source and cache key, but are two loaded kernels, each with its own launch."""
    even = replace(config, even=True)
    for problem in KINDS.values():
        assert make_source(problem, even) == make_source(problem, config)
        assert kernel_kind(problem, even) != kernel_kind(problem, config)


def test_a_batch_compiles_the_source_of_even_twins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.runtime import nvrtc
    from outblas_lab.pool.compile_for_pool import CompileAhead
    from support.gpus.known import H200

    asked: list[Source] = []
    monkeypatch.setattr(nvrtc, "compile_many", lambda sources, arch, jobs: asked.extend(sources) or ())
    ahead = CompileAhead(H200)
    configs = [Sm80DirectConfig(16, 8, wk=wk, pdl=True, even=even) for wk in (1, 2, 4) for even in (False, True)]
    pairs = [(Problem(64, 64, 512), c) for c in configs]
    for _ in range(2):
        assert list(ahead.compile(pairs)) == []
    assert len(asked) == len(set(asked)) == 3


@pytest.mark.parametrize("name", PRELUDES)
def test_every_kind_has_its_own_sha(name: str) -> None:
    _, config = PRELUDES[name]
    shas = {make_source(problem, config).sha() for problem in KINDS.values()}
    assert len(shas) == len(KINDS)
    other = make_source(P, replace(config, pdl=not config.pdl)).sha()
    assert other not in shas and re.fullmatch("[0-9a-f]{64}", other)
