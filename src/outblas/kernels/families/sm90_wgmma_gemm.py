"""The kernel family ``sm90_wgmma_gemm``: TMA loads, an mbarrier pipeline and warp-specialised wgmma."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES, SECTOR_BYTES, Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.terms import Columns, Floats
from outblas.kernels.cost.tiled import tiled_us
from outblas.kernels.families import sm90_wgmma_cost as cost
from outblas.kernels.families import sm90_wgmma_launch as launch
from outblas.kernels.families import sm90_wgmma_neighbours as near
from outblas.kernels.families import sm90_wgmma_pool as pool
from outblas.kernels.families.family import Family, Summation, TileChoice
from outblas.kernels.families.sm90_wgmma_config import Sm90WgmmaConfig
from outblas.kernels.families.wgmma_text import wgmma_instance
from outblas.kernels.geometry_terms import WGMMA_ROWS, Geometry

__all__ = ["FAMILY", "Sm90WgmmaConfig", "Sm90WgmmaGemm"]

#: Bytes that TMA loads per clock of an SM from rows that begin within a sector: 20 on an H100, 24 on an H200.
SPLIT_SECTOR_BYTES = 22.0


class Sm90WgmmaGemm(Family[Sm90WgmmaConfig]):
    """The family ``sm90_wgmma_gemm``. ``FAMILIES["sm90_wgmma_gemm"]`` is its instance."""

    config = Sm90WgmmaConfig
    pool_place = 2
    offer_place = 1
    residual_place = 0
    paired_stores = True
    follows_heuristics = True
    instructions = "wgmma"
    start: ClassVar[Mapping[str, float]] = cost.START
    residual_kinds = cost.KINDS
    residual_switches = cost.SWITCHES
    own_columns = ("swap",)
    more_values: ClassVar[Mapping[str, tuple[int, ...]]] = {"group": near.GROUP_CHOICES, "ctas": near.CTAS_CHOICES}

    def why_illegal(self, problem: Problem, config: Sm90WgmmaConfig, gpu: Gpu) -> str | None:
        return launch.why_illegal(problem, config, gpu)

    def extent_rules(self, problem: Problem, config: Any) -> Sequence[tuple[Any, str]]:
        return launch.extent_rules(problem, config)

    def geometry(self, problem: Problem, config: Sm90WgmmaConfig) -> Geometry:
        return launch.geometry(problem, config)

    def grid(self, problem: Problem, config: Sm90WgmmaConfig, sms: int) -> tuple[int, int, int]:
        return launch.grid(problem, config, sms)

    def min_blocks(self, config: Sm90WgmmaConfig) -> int:
        return config.min_blocks

    def workspace_bytes(self, problem: Problem, config: Sm90WgmmaConfig) -> int:
        return launch.workspace_bytes(problem, config)

    def summation(self, config: Sm90WgmmaConfig) -> Summation | None:
        """Return ``wgmma``, or None with a split K.

        Consumers share rows or alternate tiles, and never share K. A swapped kernel multiplies the same pairs. A deeper
        stage only adds zeros past the end of K.
        """
        return "wgmma" if config.split_k == 1 else None

    def split_sector_us(self, problem: Problem, config: Sm90WgmmaConfig, gpu: Gpu) -> float:
        """Return the traffic from L2, that of each cluster once, over its rate; that of aligned rows is L2's."""
        p, down, right = problem, -(-problem.m // config.bm), -(-problem.n // config.bn)
        loads = (
            (p.k, p.m * p.k * right / min(config.cluster_n, right)),
            (p.b_shape[1], p.n * p.k * down / min(config.cluster_m, down)),
        )
        split = SPLIT_SECTOR_BYTES * gpu.sms * gpu.clock_mhz
        rates = (split if row * ELEMENT_BYTES % SECTOR_BYTES else gpu.l2_tbs * 1e6 for row, _ in loads)
        return sum(elements * ELEMENT_BYTES / rate for (_, elements), rate in zip(loads, rates, strict=True))

    def source_lines(self, config: Sm90WgmmaConfig) -> Sequence[str]:
        """Return the switches of the workspace, e.g. ``["#define SPLIT_WORKSPACE 1", "#define REDUCE_ALL 0"]``.

        The first is 1 if ``split_kind`` is ``workspace``, which is one more kernel parameter. Only then the second is
        there; it is 1 if ``reducers`` is ``all``.
        """
        workspace = config.split_kind == "workspace"
        switch = [f"#define REDUCE_ALL {int(config.reducers == 'all')}"] if workspace else []
        return [f"#define SPLIT_WORKSPACE {int(workspace)}", *switch]

    def headers(self, problem: Problem, config: Sm90WgmmaConfig) -> tuple[tuple[str, str], ...]:
        return (("generated/wgmma_instance.cuh", wgmma_instance(config.bm if config.swap else config.bn, problem)),)

    def tensor_boxes(self, problem: Problem, config: Sm90WgmmaConfig) -> tuple[tuple[int, int, int, int], ...]:
        return launch.tensor_boxes(problem, config)

    def alignment(self, config: Sm90WgmmaConfig) -> int:
        return ROW_ALIGN_BYTES

    def why_no_epilogue(self, config: Sm90WgmmaConfig) -> str | None:
        return "a kernel of the transpose has no epilogue but a stacked gate" if config.swap else None

    def why_not_stacked(self, problem: Problem, config: Sm90WgmmaConfig) -> str | None:
        return launch.why_not_stacked(problem, config)

    def rows_of_a_turn(self, config: Sm90WgmmaConfig) -> int:
        return launch.SWAPPED_TURN if config.swap else 1

    def pool(self) -> Iterator[Sm90WgmmaConfig]:
        yield from pool.split_kernels()
        yield from pool.workspace_kernels()
        yield from pool.tiles_kernels()
        yield from pool.persistent_kernels()
        yield from pool.clustered_kernels()
        yield from pool.swap_kernels()

    def neighbours(self, problem: Problem, config: Sm90WgmmaConfig) -> Sequence[Iterable[Sm90WgmmaConfig]]:
        return near.neighbours(problem, config)

    def special_candidates(self, problem: Problem, gpu: Gpu) -> Sequence[Sm90WgmmaConfig]:
        return (
            *pool.few_rows_candidates(problem, gpu),
            *pool.workspace_candidates(problem, gpu),
            *pool.swap_candidates(problem, gpu),
            *pool.paired_candidates(problem, gpu),
            *pool.large_candidates(problem, gpu),
        )

    def special_kernel_kinds(self) -> Iterable[tuple[Problem, Sm90WgmmaConfig]]:
        for rows in range(16, WGMMA_ROWS, 8):
            for config in pool.few_rows_kernels(rows):
                yield Problem(rows, 4096, 8192), config

    def fixed_order_candidates(self, problem: Problem) -> Iterable[Sm90WgmmaConfig]:
        """Return kernels that load just the rows of a small M; those of the pool serve every M."""
        rows = problem.m // 8 * 8 + 7
        return pool.fitted_kernels(rows) if rows < WGMMA_ROWS else ()

    def adapted_to_problem(self, problem: Problem, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig:
        """Return the config with ``shift=True`` if that may help, else the config itself.

        It helps if M above 64, or N, is no multiple of 64, and a tile reaches past an edge
        (:func:`with_shifted_edges`).
        """
        if problem.m % WGMMA_ROWS and problem.m > WGMMA_ROWS or problem.n % WGMMA_ROWS:
            return near.with_shifted_edges(problem, config) or config
        return config

    def transposed(self, config: Sm90WgmmaConfig) -> Sm90WgmmaConfig:
        return launch.transposed(config)

    def near_tile_choice(self, choice: TileChoice) -> Iterable[Sm90WgmmaConfig]:
        return pool.near_choice(choice)

    def proof_shapes(self, problem: Problem, config: Sm90WgmmaConfig, gpu: Gpu) -> Sequence[tuple[int, int, int]]:
        return near.proof_shapes(config)

    def registers(self, problem: Problem, config: Sm90WgmmaConfig, shape: Geometry) -> int:
        return cost.registers(config, shape)

    def cost_columns(self, problem: Problem, config: Sm90WgmmaConfig, shape: Geometry) -> dict[str, Any]:
        return cost.columns(config)

    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        return tiled_us(cost.COST, x, p, c, gpu)

    def kind_index(self, c: Columns) -> NDArray[np.intp]:
        return cost.kind_index(c)

    def switch_values(self, p: Columns, c: Columns, waves: Floats) -> Floats:
        return cost.switch_values(p, c, waves)


FAMILY = Sm90WgmmaGemm()
