"""The interface of a kernel family. A new kernel implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from outblas.core.config import KernelConfig, knob_schema
from outblas.core.problem import ELEMENT_BYTES, ROW_ALIGN_BYTES, Problem
from outblas.kernels.cost.terms import Columns, Floats
from outblas.kernels.geometry_terms import Geometry

if TYPE_CHECKING:
    from outblas.core.roofline import Gpu

C = TypeVar("C", bound=KernelConfig)

#: L2 cache hints: none, or the operands that stream through L2.
CacheHint = Literal["plain", "stream_c", "stream_b", "stream_a", "stream_bc", "stream_ac"]
#: Order in which a kernel adds the products of an element of C. Kernels of one order give the same bits, whatever their
#: tiles. ``wgmma``: one chain of wgmma over ascending K into one fp32 sum, 16 elements each. ``mma``: the same chain by
#: mma.sync.m16n8k16. The two instructions may add their 16 products differently.
Summation = Literal["wgmma", "mma"]
#: Place of a family that does not choose one: after those that do.
LAST_PLACE = 100


@dataclass(frozen=True)
class TileChoice:
    """A choice of nvMatmulHeuristics.

    Attributes:
        bm: rows of a tile.
        bn: columns of a tile.
        bk: depth of a stage, elements of K.
        stages: pipeline depth.
        split_k: parts of K.
        cluster_m: CTAs of a cluster along M.
        cluster_n: CTAs of a cluster along N.
        order: tile order. 0: consecutive tiles go along M first; 1: along N first.
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

    Methods and attributes with a default are optional. Every record has the knobs ``pdl`` and ``early``. The
    constructor takes no arguments; :data:`outblas.kernels.families.registry.FAMILIES` holds one instance of each
    family.

    Attributes:
        kinds: ``residual_kinds``, or ``(name,)`` if they are empty.
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
        without_wgmma: True if its kernels are tried only on GPUs without wgmma. The pool leaves them out.
        for_unaligned_rows: True if its kernels are tried only on problems whose rows are not multiples of 16 bytes. The
            pool leaves them out.
        combs: TMA maps of each operand: 1, or 8 for rows of any length (:meth:`tensor_boxes`).
        paired_stores: True if its epilogue reads and writes two adjacent elements at a time.
        any_alignment: knob setting with which its kernels accept unaligned operands, e.g. ``vec=1``; empty: none.
        follows_heuristics: True if the choices of nvMatmulHeuristics apply to its kernels.
        instructions: tensor instructions of its kernels: ``mma`` (mma.sync) or ``wgmma``.
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
    without_wgmma: ClassVar[bool] = False
    for_unaligned_rows: ClassVar[bool] = False
    combs: ClassVar[int] = 1
    paired_stores: ClassVar[bool] = False
    any_alignment: ClassVar[str] = ""
    follows_heuristics: ClassVar[bool] = False
    instructions: ClassVar[Literal["mma", "wgmma"]] = "mma"

    def __init__(self) -> None:
        self.name = self.config.family
        #: True if its kernels can be spread evenly over SMs by the knob ``even``.
        self.has_even = any(knob.name == "even" for knob in knob_schema(self.config))
        self.kinds = self.residual_kinds or (self.name,)

    # --- what is legal, and what follows from a config ---------------------------------------------

    @abstractmethod
    def why_illegal(self, problem: Problem, config: C, gpu: Gpu) -> str | None:
        """Return why the config cannot run a problem by the family's own rules, in words; None if it can.

        Callers pass a problem whose extents are 1, so an implementation must not use M, N or K:
        :meth:`extent_rules` has the rules about them. Rules of all families are in
        :func:`outblas.kernels.legality.why_illegal`, which calls this.
        """

    def extent_rules(self, problem: Problem, config: Any) -> Sequence[tuple[Any, str]]:
        """Return the family's rules about M, N and K as (broken, reason) pairs; by default none.

        One text serves a single config and many configs at once: use ``&`` and ``|``, not ``and`` and ``or``.

        Args:
            config: a config, or an object with an array of values per knob.

        Returns:
            ``broken`` is a bool, or bool[configs] for arrays. ``reason`` is a format string of ``p``, the problem,
            ``c``, the config, and the config's ``workspace_bytes`` and ``k_tiles``.
        """
        return ()

    @abstractmethod
    def geometry(self, problem: Problem, config: C) -> Geometry:
        """Return the geometry of a config for the problem's layout, dtype and accumulator.

        Callers pass a problem whose extents are 1, so an implementation must not use M, N or K.
        """

    @abstractmethod
    def grid(self, problem: Problem, config: C, sms: int) -> tuple[int, int, int]:
        """Return the number of CTAs along x, y and z. All CTAs of clusters count.

        Args:
            sms: number of SMs, for kernels that launch only as many CTAs as are resident.
        """

    def k_tiles(self, problem: Problem, config: C) -> int:
        """Return the number of pipeline stages into which K is divided; by default K / ``bk`` rounded up."""
        return -(-problem.k // config.bk)

    def min_blocks(self, config: C) -> int:
        """Return the CTAs per SM for which shared memory must have room: the knob ``min_blocks``; 1 without it."""
        return int(getattr(config, "min_blocks", 1))

    def workspace_bytes(self, problem: Problem, config: C) -> int:
        """Return the size of the workspace, bytes, counters included; by default 0: none."""
        return 0

    def summation(self, config: C) -> Summation | None:
        """Return the order in which a kernel adds the products of an element of C.

        None, the default: an order of its own, for example with a split K.
        """
        return None

    def split_sector_us(self, problem: Problem, config: C, gpu: Gpu) -> float:
        """Return the least time of all loads if rows of A or B begin within a sector of memory (32 bytes).

        In microseconds. By default 0: the loads take no longer than others. The cost model does not know these times,
        and :func:`outblas.kernels.fixed_order.fastest` adds them.
        """
        return 0.0

    # --- source and launch -------------------------------------------------------------------------

    def source_lines(self, config: C) -> Sequence[str]:
        """Return lines of the prelude that precede the constants; by default an empty tuple.

        Example: ``sm90_wgmma_gemm`` returns ``["#define SPLIT_WORKSPACE 0"]``.
        """
        return ()

    def headers(self, problem: Problem, config: C) -> tuple[tuple[str, str], ...]:
        """Return (name as included, text) pairs of generated headers; by default an empty tuple."""
        return ()

    def tensor_boxes(self, problem: Problem, config: C) -> tuple[tuple[int, int, int, int], ...]:
        """Return (rows, cols, box rows, box cols), elements, of the TMA descriptors of A, B and C, in this order.

        Empty, the default: the kernel takes addresses. With eight :attr:`combs` there are those of A and B, and the
        kernel takes the addresses of B and C, too. Rows and columns are then those of the whole matrix, and box rows
        those of a box of one comb.
        """
        return ()

    def alignment(self, config: C) -> int:
        """Return the alignment that the address of each of A, B and C needs, bytes: a load by ``vec``, or TMA's 16."""
        return int(getattr(config, "vec", 0)) * ELEMENT_BYTES or ROW_ALIGN_BYTES

    def why_no_epilogue(self, config: C) -> str | None:
        """Return why the kernel of a config cannot have an epilogue, in words; None, the default, if it can.

        A stacked gate does not count: :meth:`why_not_stacked` speaks of it.
        """
        return None

    def why_not_stacked(self, problem: Problem, config: C) -> str | None:
        """Return why a kernel cannot take the rows of B's upper and lower half by turns; None if it can.

        By default it cannot.
        """
        return self.why_no_epilogue(config) or "it loads the rows of B in their order"

    def rows_of_a_turn(self, config: C) -> int:
        """Return the rows of B's upper half that a stacked kernel takes before as many of the lower half."""
        return 1

    def without_early(self, config: C) -> C:
        """Return a copy of the config with ``early`` False and without knobs that need it. Other knobs, also ``pdl``,
        stay.
        """
        return config.with_knobs(early=False)

    # --- what is tried -----------------------------------------------------------------------------

    @abstractmethod
    def pool(self) -> Iterable[C]:
        """Return the family's part of the pool, launch options off, in a fixed order. A config may occur twice.

        With :attr:`without_wgmma`, it is a part of the pool for GPUs without wgmma alone.
        """

    @abstractmethod
    def neighbours(self, problem: Problem, config: C) -> Sequence[Iterable[C]]:
        """Return configs near this one: one iterable per idea, the most successful idea first.

        Some may be illegal or equal to the config, and an iterable may be empty. Launch options are not among the
        ideas; :func:`outblas_lab.build.refine.neighbours` adds them.
        """

    def special_candidates(self, problem: Problem, gpu: Gpu) -> Sequence[C]:
        """Return configs for a problem in addition to the catalogue; by default an empty tuple. Some may be illegal."""
        return ()

    def special_kernel_kinds(self) -> Iterable[tuple[Problem, C]]:
        """Return (problem, config) pairs of kernels that only :meth:`special_candidates` offers; by default none.

        The problem is one for which the kernel is meant. Some pairs may be illegal.
        """
        return ()

    def unaligned_candidates(self, problem: Problem, gpu: Gpu, listed: Sequence[C]) -> Iterable[C]:
        """Return configs for a problem whose rows are not 16-byte aligned; some may be illegal or repeated.

        By default, and for every family without :attr:`any_alignment`, the result is empty.
        """
        return ()

    def fixed_order_candidates(self, problem: Problem) -> Iterable[C]:
        """Return configs with a :meth:`summation` for a problem, in addition to the pool; by default an empty tuple.

        Some may be illegal.
        """
        return ()

    def adapted_to_problem(self, problem: Problem, config: C) -> C:
        """Return the variant of a catalogue's config that is offered for a problem; by default the config itself."""
        return config

    def transposed(self, config: C) -> C:
        """Return the config that computes the transpose of C in the same way; by default the config itself.

        It may be illegal.
        """
        return config

    def near_tile_choice(self, choice: TileChoice) -> Iterable[C]:
        """Return configs by rising distance from a choice of nvMatmulHeuristics. Some may be illegal.

        By default, and for every family without :attr:`follows_heuristics`, the result is empty.
        """
        return ()

    def proof_shapes(self, problem: Problem, config: C, gpu: Gpu) -> Sequence[tuple[int, int, int]]:
        """Return (M, N, K) of further problems on which the family's kernels are proved; by default none.

        Some may be illegal for the config. The problem gives layout, dtype and accumulator; its extents do not matter.
        """
        return ()

    # --- what it costs -----------------------------------------------------------------------------

    @abstractmethod
    def registers(self, problem: Problem, config: C, shape: Geometry) -> int:
        """Return the registers per thread, which limit the CTAs of an SM in the cost model.

        Args:
            shape: the config's :meth:`geometry`.
        """

    @abstractmethod
    def cost_columns(self, problem: Problem, config: C, shape: Geometry) -> Mapping[str, Any]:
        """Return column -> value where it differs from :data:`outblas.kernels.cost.columns.COLUMN_DEFAULTS`.

        It must have every column of :attr:`own_columns`. Columns that are in neither list are ignored.

        Args:
            shape: the config's :meth:`geometry`.
        """

    @abstractmethod
    def time_us(self, x: Mapping[str, float], p: Columns, c: Columns, gpu: Gpu) -> Floats:
        """Return the GPU time per call, microseconds, over columns that broadcast together, without residual.

        Args:
            x: coefficients: name -> value, with the names of :attr:`start`.
        """

    def kind_index(self, c: Columns) -> NDArray[np.intp]:
        """Return the index into :attr:`kinds` of every config, int[configs]; by default zeros."""
        return np.zeros(len(c["bm"]), dtype=np.intp)

    def switch_values(self, p: Columns, c: Columns, waves: Floats) -> Floats:
        """Return float64[configs, len(residual_switches)]; by default without columns.

        Args:
            waves: number of waves of each config, before rounding.
        """
        return np.zeros((len(waves), 0))
