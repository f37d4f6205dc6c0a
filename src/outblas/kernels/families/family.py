"""What the rest of the package asks of a kernel family: the one interface that a new kernel implements."""

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

#: What L2 is told: nothing, or which operands stream through it; for every family that gives such hints.
CacheHint = Literal["plain", "stream_c", "stream_b", "stream_a", "stream_bc", "stream_ac"]
#: Place of a family that says none: behind those that do.
LAST_PLACE = 100


@dataclass(frozen=True)
class TileChoice:
    """Tile, stages, split of K, cluster and tile order (0 or 1) as nvMatmulHeuristics gives them."""

    bm: int
    bn: int
    bk: int
    stages: int
    split_k: int
    cluster_m: int
    cluster_n: int
    order: int


class Family(ABC, Generic[C]):
    """One kernel family: its record of knobs, and all that depends on it.

    What has a default here is for families that have something to say. Knobs ``pdl`` and ``early`` are of every record.

    Attributes:
        config: The family's record.
        start: Where a fit of :meth:`time_us` starts, coefficient -> rough physics, in microseconds, bytes per
            microsecond, cycles, GHz. A family that nobody has measured is ranked by these.
        pool_place: Place of its kernels in the pool, whose order catalogues and recordings depend on.
        offer_place: The same of what it offers beside the catalogue.
        residual_place: The same of its kinds among the coefficients of the residual.
        own_columns: Columns that :meth:`cost_columns` gives besides those of all families.
        residual_kinds: Kinds of its kernels that the residual tells apart; empty: one, of the family's name.
        residual_switches: Names of what :meth:`switches` gives.
        more_values: Knob -> values beside those that pool and catalogue have.
        few_rows_only: Whether it serves few rows of A only.
        paired_stores: Whether its epilogue reads and writes two neighbouring elements at a time.
        any_alignment: The knob with which its kernels take operands that begin anywhere; empty: there is none.
        follows_heuristics: Whether nvMatmulHeuristics' choices are of such kernels.
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
        #: Whether its kernels may be spread evenly over SMs, by the knob ``even``.
        self.has_even = any(knob.name == "even" for knob in knob_schema(self.config))
        self.kinds = self.residual_kinds or (self.name,)

    # --- what is legal, and what follows from a config ---------------------------------------------

    @abstractmethod
    def why_illegal(self, problem: Problem, config: C, gpu: Gpu) -> str | None:
        """Why the config cannot run the problem, by the family's own rules; None if it can."""

    @abstractmethod
    def geometry(self, problem: Problem, config: C) -> Geometry:
        """Geometry for the problem's layout, dtype and accumulator; its extents are 1."""

    @abstractmethod
    def grid(self, problem: Problem, config: C, sms: int) -> tuple[int, int, int]:
        """CTAs to launch along x, y and z."""

    def k_tiles(self, problem: Problem, config: C) -> int:
        """Stages' worth of K."""
        return ceil_div(problem.k, config.bk)

    def min_blocks(self, config: C) -> int:
        """CTAs per SM that shared memory must have room for."""
        return 1

    def workspace_bytes(self, problem: Problem, config: C) -> int:
        """Global memory that a call needs beside its operands, counters first; 0: none."""
        return 0

    # --- source and launch -------------------------------------------------------------------------

    def source_lines(self, config: C) -> Sequence[str]:
        """Lines of the prelude before the constants."""
        return ()

    def headers(self, problem: Problem, config: C) -> tuple[tuple[str, str], ...]:
        """(name, text) of headers that are generated."""
        return ()

    def tensor_boxes(self, problem: Problem, config: C) -> tuple[tuple[int, int, int, int], ...]:
        """(rows, cols, box rows, box cols) of the TMA descriptors of A, B and C, elements; empty: the kernel takes
        addresses."""
        return ()

    @abstractmethod
    def alignment(self, config: C) -> int:
        """Bytes that the start of every operand must be a multiple of."""

    def without_early(self, config: C) -> C:
        """The config without early loads of B, nor what means something only beside them."""
        return config.with_knobs(early=False)

    # --- what is tried -----------------------------------------------------------------------------

    @abstractmethod
    def pool(self) -> Iterable[C]:
        """The family's part of the pool, launch options off, in a fixed order."""

    @abstractmethod
    def neighbours(self, problem: Problem, config: C) -> Sequence[Iterable[C]]:
        """Configs near this one, an iterable per idea, what was most often worth it first; not all need be legal."""

    def special_candidates(self, problem: Problem, gpu: Gpu) -> Sequence[C]:
        """Configs that are offered for a problem whatever the catalogue has; not all need be legal."""
        return ()

    def special_kernel_kinds(self) -> Iterable[tuple[Problem, C]]:
        """Kernels that only :meth:`special_candidates` offers, each with a problem that may have it."""
        return ()

    def unaligned_candidates(self, problem: Problem, gpu: Gpu, listed: Sequence[C]) -> Iterable[C]:
        """Configs for a problem whose rows are not 16-byte aligned, by those of the catalogue; none where there is no
        :attr:`any_alignment`."""
        return ()

    def adapted_to_problem(self, problem: Problem, config: C) -> C:
        """The config as a catalogue's one is offered for a problem."""
        return config

    def transposed(self, config: C) -> C:
        """The config that computes C's transpose as this one computes C, where M and N do not differ in kind."""
        return config

    def near_tile_choice(self, choice: TileChoice) -> Iterable[C]:
        """Configs by how little they differ from a choice of nvMatmulHeuristics, where it :attr:`follows_heuristics`;
        not all need be legal."""
        return ()

    def proof_shapes(self, problem: Problem, config: C, gpu: Gpu) -> Sequence[tuple[int, int, int]]:
        """M, N, K of problems on which the family's kernels are proved besides those of all families."""
        return ()

    # --- what it costs -----------------------------------------------------------------------------

    @abstractmethod
    def registers(self, problem: Problem, config: C, shape: Geometry) -> int:
        """Registers per thread, which bound the CTAs of an SM."""

    @abstractmethod
    def cost_columns(self, problem: Problem, config: C, shape: Geometry) -> Mapping[str, Any]:
        """Column -> value, of what differs from :data:`outblas.kernels.cost.columns.COLUMN_DEFAULTS`."""

    @abstractmethod
    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        """GPU time by coefficients ``x``, over columns of a problem and of configs that broadcast together,
        microseconds."""

    def kind_index(self, c: Columns) -> NDArray[np.intp]:
        """Index into :attr:`kinds` of every config."""
        return np.zeros(len(c["bm"]), dtype=np.intp)

    def switch_values(self, p: Columns, c: Columns, waves: Floats) -> Floats:
        """float64[configs, len(residual_switches)]."""
        return np.zeros((len(waves), 0))
