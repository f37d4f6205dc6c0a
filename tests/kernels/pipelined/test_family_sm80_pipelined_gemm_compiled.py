"""The kernel family sm80_pipelined_gemm compiles for each architecture, and its machine code is what its name says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from outblas.core.problem import Problem
from outblas.kernels.families.sm80_pipelined_gemm import Sm80PipelinedConfig
from outblas.kernels.legality import never_legal
from outblas.kernels.source import make_source
from support.gpus.fake_driver import DEVICES
from support.gpus.known import H200

if TYPE_CHECKING:
    from outblas.runtime.cubin import Cubin

pytest.importorskip("cuda.bindings")

from outblas.runtime.nvrtc import compile_source  # noqa: E402
from outblas.runtime.sass import check_static  # noqa: E402
from support.disassembly import disassembled_facts  # noqa: E402

pytestmark = pytest.mark.long

TN = Problem(512, 512, 4096)
NN = replace(TN, layout="NN", dtype="bf16")
GPUS = {
    "sm_80": DEVICES["A100"].gpu, "sm_86": DEVICES["A10"].gpu, "sm_89": DEVICES["L40S"].gpu, "sm_90a": H200,
}  # fmt: skip
C = Sm80PipelinedConfig
#: Kernels whose registers are the most, in each way in which kernels differ.
SAMPLE: dict[str, tuple[Problem, Sm80PipelinedConfig]] = {
    "largest": (TN, C(256, 128, 32, 3, 4, 2)),
    "largest_nn": (NN, C(128, 256, 32, 3, 2, 4)),
    "deep_stages": (NN, C(128, 128, 64, 2)),
    "odd_width": (TN, C(128, 160, 32, 4, 4, 2)),
    "odd_width_nn": (NN, C(128, 96, 32, 4)),
    "two_ctas": (TN, C(64, 96, 32, 4, min_blocks=2)),
    "walk": (NN, C(128, 128, 32, 4, persistent=True)),
    "split": (TN, C(128, 128, 32, 4, split_k=4)),
    "fp16": (replace(TN, acc="fp16"), C(128, 128, 64, 3)),
    "pairs": (TN, C(128, 128, 32, 3, vec=2)),
    "scalar": (NN, C(128, 128, 32, 3, vec=1)),
}
#: Those that are compiled for all architectures; the others are compiled for sm_80.
EVERYWHERE = ("largest", "odd_width_nn", "walk", "split")
BUILDS = [(name, arch) for name in SAMPLE for arch in GPUS if arch == "sm_80" or name in EVERYWHERE]


@cache
def build(name: str, arch: str) -> Cubin:
    problem, config = SAMPLE[name]
    source = make_source(problem, config)
    cubin = compile_source(source, arch, cache=None)
    assert check_static(cubin.facts, source, cubin) is None
    return cubin


@pytest.mark.parametrize(("name", "arch"), BUILDS)
def test_registers_suffice_on_every_architecture(name: str, arch: str) -> None:
    problem, config = SAMPLE[name]
    assert not never_legal(problem, config, GPUS[arch])
    cubin = build(name, arch)
    facts = cubin.facts
    assert (cubin.spill_bytes, cubin.stack_bytes, facts.ldl, facts.stl) == (0, 0, 0, 0)
    assert cubin.registers <= min(255, 65536 // (config.threads * config.min_blocks))
    assert facts.accumulators == (problem.acc,)
    assert facts.hmma and not facts.hgmma and bool(facts.ldgsts) == (config.vec > 1)


def test_the_disassembler_agrees() -> None:
    cubin = build("largest", "sm_80")
    assert disassembled_facts(cubin.image) == cubin.facts
