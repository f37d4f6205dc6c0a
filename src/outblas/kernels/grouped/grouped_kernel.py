"""The kernel family ``sm90_grouped_gemm``: its knobs, which of them are legal, and its source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product

from outblas.core.problem import ELEMENT_BYTES, Problem
from outblas.kernels.families.wgmma_text import wgmma_instance
from outblas.kernels.geometry_terms import CTA_SMEM, SM_SMEM, SMEM_LIMIT, WGMMA_ROWS, ceil_div
from outblas.kernels.grouped.grouped_problem import GroupedProblem
from outblas.kernels.kernel_hash import kernel_headers
from outblas.kernels.source import Source

ENTRY = "sm90_grouped_gemm"
#: Consumers -> registers of a producer's and of a consumer's thread, by setmaxnreg, which one consumer does not need.
_REGISTERS = {1: (0, 0), 2: (40, 232)}
#: Registers of a consumer's thread that are no accumulators.
_OTHER_REGISTERS = 44


@dataclass(frozen=True)
class GroupedConfig:
    """The knobs. The kernel computes the transpose: wgmma's rows are rows of W, its columns are rows of A.

    Attributes:
        bn: rows of A in a tile, a multiple of 8 up to 256.
        rows: rows of W in a tile, a multiple of 64 up to 256.
        bk: depth of a stage, elements of K: 64 or 128.
        stages: pipeline depth, 2 to 16.
        consumers: warpgroups that issue wgmma, 1 or 2.
        pingpong: two consumers alternate tiles. False: they share each tile.
        cluster: CTAs that share the rows of A, 1 or 2.
        min_blocks: CTAs per SM that registers and shared memory allow.
        group: tiles of A that are walked before the next rows of W.
        stream: W streams through L2, since it is read once.
    """

    bn: int
    rows: int
    bk: int = 64
    stages: int = 4
    consumers: int = 1
    pingpong: bool = False
    cluster: int = 1
    min_blocks: int = 1
    group: int = 8
    stream: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA: consumers, and a warp or a warpgroup that loads."""
        return 128 * self.consumers + (32 if self.consumers == 1 else 128)

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows of W that a consumer multiplies."""
        return self.rows // WGMMA_ROWS // (1 if self.pingpong else self.consumers)

    @property
    def chunk(self) -> int:
        """Rows of A that the epilogue stores at once."""
        return next((width for width in (64, 32, 16) if self.bn % width == 0), 8)

    def smem_bytes(self, groups: int) -> int:
        """Return the dynamic shared memory of a CTA in bytes: stages, epilogue, barriers and the table of groups."""
        stage = (self.bn + self.rows) * self.bk * ELEMENT_BYTES
        epilogue = self.consumers * 2 * self.chunk * WGMMA_ROWS * ELEMENT_BYTES
        return self.stages * (stage + 16) + epilogue + 4 * (1 + 4 * groups)


def why_illegal(problem: GroupedProblem, c: GroupedConfig) -> str | None:
    """Return why a config cannot run a problem, in words; None if it can."""
    room = min(SMEM_LIMIT, SM_SMEM // max(1, c.min_blocks) - CTA_SMEM)
    budget = 232 if c.consumers == 2 else min(255, 65536 // max(1, c.min_blocks) // 160 // 8 * 8)
    rules = (
        (c.bn % 8 != 0 or not 8 <= c.bn <= 256, "bn must be a multiple of 8 up to 256"),
        (c.rows not in (64, 128, 192, 256), "rows must be 64, 128, 192 or 256"),
        (c.bk not in (64, 128), "bk must be 64 or 128"),
        (not 2 <= c.stages <= 16, "stages must be 2 to 16"),
        (c.consumers not in (1, 2), "consumers must be 1 or 2"),
        (c.pingpong and c.consumers != 2, "pingpong needs 2 consumers"),
        (not c.pingpong and c.rows // WGMMA_ROWS % c.consumers != 0, "consumers do not divide rows / 64"),
        (
            c.cluster not in (1, 2) or c.bn % (8 * c.cluster) != 0,
            "cluster must be 1 or 2, and slice bn",
        ),
        (not 1 <= c.min_blocks <= 4 or (c.min_blocks > 1 and c.consumers > 1), "more CTAs per SM need one consumer"),
        (c.group < 1, "group must be positive"),
        (problem.gated and c.blocks % 2 != 0, "a gate needs an even number of blocks for each consumer"),
        (c.blocks * c.bn // 2 + _OTHER_REGISTERS > budget, f"{c.blocks * c.bn // 2} accumulators exceed {budget}"),
        (c.smem_bytes(problem.groups) > room, f"{c.smem_bytes(problem.groups)} bytes of shared memory exceed {room}"),
    )
    return next((reason for broken, reason in rules if broken), None)


def make_source(problem: GroupedProblem, c: GroupedConfig) -> Source:
    """Return the source of a kernel. It depends on the problem's layout, dtype, gate and bias alone."""
    producer, consumer = _REGISTERS[c.consumers]
    integers = {
        "BN": c.bn, "ROWS": c.rows, "BK": c.bk, "STAGES": c.stages, "CONSUMERS": c.consumers, "CLUSTER": c.cluster,
        "MIN_BLOCKS": c.min_blocks, "CHUNK": c.chunk, "PRODUCER_REGS": producer, "CONSUMER_REGS": consumer,
        "GROUP": c.group,
    }  # fmt: skip
    switches = {
        "PINGPONG": c.pingpong, "STREAM_W": c.stream, "GATED": problem.gated, "BIAS": problem.bias,
        "BF16": problem.dtype == "bf16", "W_K_MAJOR": problem.layout == "TN",
    }  # fmt: skip
    lines = ["#define ACC_FP16 0", *(f"constexpr int {name} = {value};" for name, value in integers.items())]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in switches.items()]
    instance = wgmma_instance(c.bn, Problem(1, 1, 1, "TN", problem.dtype), a_by_columns=problem.layout == "NN")
    files = resources.files("outblas.kernels.grouped").iterdir()  # not in the hash of the kernels of single products
    own = sorted((file.name, file.read_text()) for file in files if file.name.endswith(".cuh"))
    headers = (*kernel_headers(), *own, ("generated/wgmma_instance.cuh", instance))
    return Source("\n".join([*lines, f'#include "{ENTRY}.cuh"', ""]), ENTRY, headers, (), "fp32", ENTRY)


def ctas(problem: GroupedProblem, c: GroupedConfig, rows: int, sms: int) -> int:
    """Return the CTAs of a launch: as many as are resident, or as tiles can be.

    Args:
        rows: rows of A. Each group that is not empty may end in a tile of its own.
    """
    tiles = (ceil_div(rows, c.bn) + min(problem.groups, rows)) * ceil_div(problem.n, c.rows * c.cluster)
    return min(tiles, sms * c.min_blocks // c.cluster) * c.cluster


def candidates(problem: GroupedProblem) -> Iterator[GroupedConfig]:
    """Yield legal configs from few rows of A per group to many, each with as many stages as fit."""
    small = product((8, 16, 24, 32, 48, 64), (64, 128), (64, 128), (1,), (False,), (1,), (1, 2, 3))
    large = product((64, 96, 128, 160, 192, 256), (128, 192, 256), (64,), (2,), (False, True), (1, 2), (1,))
    for bn, rows, bk, consumers, pingpong, cluster, min_blocks in (*small, *large):
        one = GroupedConfig(bn, rows, bk, 2, consumers, pingpong, cluster, min_blocks, stream=bn <= 64)
        room = min(SMEM_LIMIT, SM_SMEM // min_blocks - CTA_SMEM) - one.smem_bytes(problem.groups)
        more = room // ((bn + rows) * bk * ELEMENT_BYTES + 16)
        deep = replace(one, stages=min(12, one.stages + more))
        if more >= 1 and why_illegal(problem, deep) is None:
            yield deep
