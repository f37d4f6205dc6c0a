"""The interface of a kernel family. A new kernel implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, knob_schema
from outblas.core.problem import Problem
from outblas.kernels.cost.terms import Columns, Floats
from outblas.kernels.geometry_terms import Geometry, ceil_div

if TYPE_CHECKING:
    from outblas.core.roofline import Gpu

C = TypeVar("C", bound=KernelConfig)

#: L2 cache hints: none, or the operands that stream through L2.
CacheHint = Literal["plain", "stream_c", "stream_b", "stream_a", "stream_bc", "stream_ac"]
#: Place of a family that does not choose one: after those that do.
LAST_PLACE = 100


@dataclass(frozen=True)
class TileChoice:
    """A choice of nvMatmulHeuristics.

    Attributes:
        bm: rows of a tile.
        bn: columns of a tile.
        bk: depth of a stage.
        stages: pipeline depth.
        split_k: parts of K.
        cluster_m: CTAs of a cluster along M.
        cluster_n: CTAs of a cluster along N.
        order: tile order, 0 or 1.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    split_k: int
    cluster_m: int
    cluster_n: int
    order: int


class Family(ABC, Generic[C]):
    """A kernel family: its record of knobs and everything that depends on it.

    Methods and attributes with a default are optional. Every record has the knobs ``pdl`` and ``early``.

    Attributes:
        config: the family's record.
        start: coefficient -> value from which a fit of :meth:`time_us` starts: rough physics in microseconds, bytes per
            microsecond, cycles, GHz. A family without measurements is ranked with these.
        pool_place: sort key of its kernels in the pool. Catalogues and recordings depend on this order.
        offer_place: sort key of its special candidates.
        residual_place: sort key of its kinds among the residual's coefficients.
        own_columns: columns of :meth:`cost_columns` in addition to those of all families.
        residual_kinds: kinds of its kernels in the residual; empty: one kind with the family's name.
        residual_switches: names of the values of :meth:`switch_values`.
        more_values: knob -> values in addition to those in pool and catalogue.
        few_rows_only: True if it serves only problems with few rows of A.
        paired_stores: True if its epilogue reads and writes two adjacent elements at a time.
        any_alignment: knob setting with which its kernels accept unaligned operands, e.g. ``vec=1``; empty: none.
        follows_heuristics: True if the choices of nvMatmulHeuristics apply to its kernels.
        has_even: True if its record has the knob ``even``.
    """

    config: type[C]
    start: ClassVar[Mapping[str, float]]
    pool_place: ClassVar[int] = LAST_PLACE
    offer_place: ClassVar[int] = LAST_PLACE
    residual_place: ClassVar[int] = LAST_PLACE
    own_columns: ClassVar[tuple[str, ...]] = ()
    residual_kinds: ClassVar[tuple[str, ...]] = ()
    residual_switches: ClassVar[tuple[str, ...]] = ()
    more_values: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    few_rows_only: ClassVar[bool] = False
    paired_stores: ClassVar[bool] = False
    any_alignment: ClassVar[str] = ""
    follows_heuristics: ClassVar[bool] = False

    def __init__(self) -> None:
        self.name = self.config.family
        #: True if its kernels can be spread evenly over SMs by the knob ``even``.
        self.has_even = any(knob.name == "even" for knob in knob_schema(self.config))
        self.kinds = self.residual_kinds or (self.name,)

    # --- what is legal, and what follows from a config ---------------------------------------------

    @abstractmethod
    def why_illegal(self, problem: Problem, config: C, gpu: Gpu) -> str | None:
        """Return why the config cannot run the problem by the family's own rules; None if it can."""

    @abstractmethod
    def geometry(self, problem: Problem, config: C) -> Geometry:
        """Return the geometry for the problem's layout, dtype and accumulator. The problem's extents are 1: do not use
        them.
        """

    @abstractmethod
    def grid(self, problem: Problem, config: C, sms: int) -> tuple[int, int, int]:
        """Return the number of CTAs along x, y and z."""

    def k_tiles(self, problem: Problem, config: C) -> int:
        """Return the number of pipeline stages into which K is divided."""
        return ceil_div(problem.k, config.bk)

    def min_blocks(self, config: C) -> int:
        """Return the CTAs per SM for which shared memory must have room."""
        return 1

    def workspace_bytes(self, problem: Problem, config: C) -> int:
        """Return the size of the workspace, bytes, counters included; 0: none."""
        return 0

    # --- source and launch -------------------------------------------------------------------------

    def source_lines(self, config: C) -> Sequence[str]:
        """Return lines of the prelude that precede the constants."""
        return ()

    def headers(self, problem: Problem, config: C) -> tuple[tuple[str, str], ...]:
        """Return (name, text) of generated headers."""
        return ()

    def tensor_boxes(self, problem: Problem, config: C) -> tuple[tuple[int, int, int, int], ...]:
        """Return (rows, cols, box rows, box cols), elements, of the TMA descriptors of A, B and C.

        Empty: the kernel takes addresses.
        """
        return ()

    @abstractmethod
    def alignment(self, config: C) -> int:
        """Return the alignment of every operand's address, bytes."""

    def without_early(self, config: C) -> C:
        """Return the config without early loads of B and without knobs that need them."""
        return config.with_knobs(early=False)

    # --- what is tried -----------------------------------------------------------------------------

    @abstractmethod
    def pool(self) -> Iterable[C]:
        """Return the family's part of the pool, launch options off, in a fixed order."""

    @abstractmethod
    def neighbours(self, problem: Problem, config: C) -> Sequence[Iterable[C]]:
        """Return configs near this one: one iterable per idea, the most successful idea first. Some may be illegal."""

    def special_candidates(self, problem: Problem, gpu: Gpu) -> Sequence[C]:
        """Return configs for a problem in addition to the catalogue. Some may be illegal."""
        return ()

    def special_kernel_kinds(self) -> Iterable[tuple[Problem, C]]:
        """Return kernels that only :meth:`special_candidates` offers, each with a problem that it may run."""
        return ()

    def unaligned_candidates(self, problem: Problem, gpu: Gpu, listed: Sequence[C]) -> Iterable[C]:
        """Return configs for a problem whose rows are not 16-byte aligned; empty without :attr:`any_alignment`.

        Args:
            problem: the problem.
            gpu: the GPU.
            listed: the family's configs in the catalogue.
        """
        return ()

    def adapted_to_problem(self, problem: Problem, config: C) -> C:
        """Return the variant of a catalogue's config that is offered for a problem."""
        return config

    def transposed(self, config: C) -> C:
        """Return the config that computes the transpose of C in the same way; by default the config itself."""
        return config

    def near_tile_choice(self, choice: TileChoice) -> Iterable[C]:
        """Return configs by rising distance from a choice of nvMatmulHeuristics; empty unless
        :attr:`follows_heuristics`.

        Some may be illegal.
        """
        return ()

    def proof_shapes(self, problem: Problem, config: C, gpu: Gpu) -> Sequence[tuple[int, int, int]]:
        """Return (M, N, K) of further problems on which the family's kernels are proved."""
        return ()

    # --- what it costs -----------------------------------------------------------------------------

    @abstractmethod
    def registers(self, problem: Problem, config: C, shape: Geometry) -> int:
        """Return the registers per thread, which limit the CTAs of an SM."""

    @abstractmethod
    def cost_columns(self, problem: Problem, config: C, shape: Geometry) -> Mapping[str, Any]:
        """Return column -> value where it differs from :data:`outblas.kernels.cost.columns.COLUMN_DEFAULTS`."""

    @abstractmethod
    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        """Return the GPU time, microseconds, over columns that broadcast together.

        Args:
            x: coefficients.
            p: columns of the problem.
            c: columns of the configs.
            gpu: the GPU.
        """

    def kind_index(self, c: Columns) -> NDArray[np.intp]:
        """Return the index into :attr:`kinds` of every config."""
        return np.zeros(len(c["bm"]), dtype=np.intp)

    def switch_values(self, p: Columns, c: Columns, waves: Floats) -> Floats:
        """Return float64[configs, len(residual_switches)].

        Args:
            p: columns of the problem.
            c: columns of the configs.
            waves: number of waves of each config.
        """
        return np.zeros((len(waves), 0))
