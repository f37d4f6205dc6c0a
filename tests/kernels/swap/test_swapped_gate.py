"""Kernels of the transpose with a stacked gate: which have one, how TMA takes their rows, and their machine code."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outblas.core.errors import ConfigError
from outblas.core.problem import Problem
from outblas.kernels.epilogue import STACKED_GATE, Epilogue, why_not_fused
from outblas.kernels.families.sm90_wgmma.sm90_wgmma_gemm import FAMILY
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import make_source
from outblas.runtime import fused_launch, tensor_map
from outblas.runtime.fused_launch import Extra, FusedKernel
from outblas.runtime.nvrtc import compile_source
from outblas.runtime.sass import check_static
from support.gpus.known import H200

P = Problem(100, 528, 512, "TN", "bf16")
SWAPPED = Sm90WgmmaConfig(24, 128, 64, 4, 2, swap=True)


@pytest.mark.parametrize(
    ("problem", "config", "epilogue", "reason"),
    [
        (replace(P, n=520), SWAPPED, STACKED_GATE, "520 rows of B are no multiple of 16"),
        (P, replace(SWAPPED, bn=64, consumers=1, cluster_m=8), STACKED_GATE, "multicasts 8 rows of B"),
        (P, replace(SWAPPED, bn=192, consumers=3, cluster_m=8), STACKED_GATE, "multicasts 24 rows of B"),
        (P, SWAPPED, Epilogue(True), "no epilogue but a stacked gate"),
        (P, SWAPPED, Epilogue(activation="silu", gated=True), "no epilogue but a stacked gate"),
        (P, SWAPPED, Epilogue(True, "silu", gated=True, stacked=True), "without a bias"),
        (replace(P, dtype="fp16", acc="fp16"), SWAPPED, STACKED_GATE, "needs fp32 sums"),
    ],
)
def test_what_a_kernel_of_the_transpose_cannot_fuse(
    problem: Problem, config: Sm90WgmmaConfig, epilogue: Epilogue, reason: str
) -> None:
    assert reason in str(why_not_fused(problem, config, epilogue))


@pytest.mark.parametrize("cluster_m", [1, 2, 4])
@pytest.mark.parametrize("bn", [64, 128, 192, 256])
def test_any_tile_and_parts_of_whole_turns_have_a_stacked_gate(bn: int, cluster_m: int) -> None:
    config = Sm90WgmmaConfig(8, bn, 64, 2, cluster_m=cluster_m, swap=True)
    assert why_illegal(P, config, H200) is None and why_not_fused(P, config, STACKED_GATE) is None


def box_of(memory: np.ndarray, described: tuple[Any, ...], at: tuple[int, ...]) -> np.ndarray:
    """The elements of a box as TMA puts them into shared memory, by row of a swizzle span. PTX ISA: Tensors."""
    extents, pitches, box = described
    found = np.zeros(box[::-1], memory.dtype)
    for place in np.ndindex(found.shape):
        where = [a + i for a, i in zip(at, place[::-1], strict=True)]
        if all(0 <= i < extent for i, extent in zip(where, extents, strict=True)):
            found[place] = memory[where[0] + sum(i * pitch for i, pitch in zip(where[1:], pitches, strict=True))]
    return found.reshape(-1, box[0])


@pytest.mark.parametrize("turn", [1, 8])
@pytest.mark.parametrize(("rows", "box_rows"), [(48, 32), (80, 64), (16, 64), (64, 16)])
def test_a_box_has_rows_of_gate_and_up_by_turns(
    rows: int, box_rows: int, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(tensor_map, "encode_extents", lambda address, *described: seen.append(described))
    tensor_map.encode_turns.cache_clear()
    cols, half = 72, rows // 2
    tensor_map.encode_turns(4096, rows, cols, box_rows, 64, "bf16", turn=turn)
    tensor_map.encode_turns.cache_clear()
    *described, dtype, swizzle = seen[0]
    assert (dtype, swizzle) == ("bf16", "128B")
    matrix = np.arange(1, rows * cols + 1).reshape(rows, cols)
    order = [side * half + first + i for first in range(0, half, turn) for side in (0, 1) for i in range(turn)]
    wanted = np.zeros((rows + 2 * box_rows, 192), matrix.dtype)
    wanted[:rows, :cols] = matrix[order]
    for row in range(0, rows, box_rows):
        for col in (0, 64):
            at = (col, 0, row // 2) if turn == 1 else (col, 0, 0, row // 16)  # as the kernel asks for it
            found = box_of(matrix.ravel(), tuple(described), at)
            np.testing.assert_array_equal(found, wanted[row : row + box_rows, col : col + 64])


@pytest.mark.parametrize(("config", "turn"), [(SWAPPED, 8), (Sm90WgmmaConfig(64, 64), 1)])
def test_a_call_takes_the_rows_of_b_by_the_turns_of_its_kernel(
    config: Sm90WgmmaConfig, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    calls: list[tuple[Any, ...]] = []
    loaded = SimpleNamespace(name="kernel", bind_with=lambda *given: calls.append(given))
    monkeypatch.setattr(fused_launch, "load", lambda cubin, config: loaded)
    kernel = FusedKernel(None, config, STACKED_GATE)  # type: ignore[arg-type]
    operands = torch.empty(100, 512), torch.empty(528, 512), torch.empty(100, 264)
    kernel.bind(P, operands, Extra())
    assert calls[0][-2:] == (264, turn)
    if config.swap:
        with pytest.raises(ConfigError, match="no multiple of 16"):
            kernel.bind(replace(P, n=520), operands, Extra())


def test_the_operands_of_a_launch_have_their_own_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A's rows are tokens, B's are by turns of 8; C's map is not used."""
    seen: list[Any] = []
    monkeypatch.setattr(
        tensor_map, "encode_extents", lambda address, extents, *rest: seen.append((address, extents, rest[1]))
    )
    for encode in (tensor_map.encode_map, tensor_map.encode_turns):
        encode.cache_clear()
    operands = [SimpleNamespace(data_ptr=lambda i=i: 4096 * i) for i in (1, 2, 3)]
    turn = FAMILY.rows_of_a_turn(SWAPPED)
    tensor_map.encode_operands(operands, FAMILY.tensor_boxes(P, SWAPPED), "bf16", 1, turn)
    for encode in (tensor_map.encode_map, tensor_map.encode_turns):
        encode.cache_clear()
    assert seen[:2] == [(4096, (512, 100), (64, 24)), (8192, (512, 8, 2, 33), (64, 8, 2, 8))]


#: The tiles with the most accumulators for a number of consumers and of CTAs on an SM, and every kind of load.
COMPILED = {
    "one_consumer": Sm90WgmmaConfig(256, 64, 64, 4, swap=True),
    "one_consumer_two_blocks": Sm90WgmmaConfig(176, 128, 64, 4, swap=True, early=True, pdl=True),
    "two_consumers": Sm90WgmmaConfig(256, 128, 64, 4, 2, swap=True),
    "two_consumers_two_blocks": Sm90WgmmaConfig(128, 256, 64, 3, 2, swap=True, shift=True),
    "three_consumers": Sm90WgmmaConfig(192, 192, 64, 3, 3, swap=True, l2="stream_c"),
    "pingpong": Sm90WgmmaConfig(256, 64, 64, 4, 2, "pingpong", 2, 1, persistent=True, swap=True, l2="stream_b"),
    "stagger": Sm90WgmmaConfig(240, 128, 64, 4, 2, "stagger", 1, 2, persistent=True, swap=True, l2="stream_ac"),
    "two_on_an_sm": Sm90WgmmaConfig(256, 64, 64, 2, min_blocks=2, cluster_m=2, cluster_n=2, swap=True),
    "three_on_an_sm": Sm90WgmmaConfig(96, 128, 64, 2, min_blocks=3, swap=True),
    "four_on_an_sm": Sm90WgmmaConfig(112, 64, 64, 2, min_blocks=4, swap=True),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_without_spills_and_stores_from_registers(name: str, dtype: str) -> None:
    pytest.importorskip("cuda.bindings")
    config, problem = COMPILED[name], replace(P, dtype=dtype)
    assert why_illegal(problem, config, H200) is None and why_not_fused(problem, config, STACKED_GATE) is None
    source = make_source(problem, config, STACKED_GATE)
    cubin = compile_source(source, cache=None)
    assert check_static(cubin.facts, source, cubin) is None
    assert (cubin.facts.ldl, cubin.facts.stl, cubin.spill_bytes, cubin.stack_bytes) == (0, 0, 0, 0)
    assert cubin.facts.hgmma and cubin.facts.utmaldg and not cubin.facts.utmastg
    assert cubin.facts.accumulators == ("fp32",)
