"""Starting points for free kernels: CUTLASS and CuTe texts whose placeholders are filled with legal values."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import resources
from typing import Literal, Union

from outblas.core.errors import ConfigError
from outblas.core.problem import ELEMENT_BYTES
from outblas_lab.custom.free_kernel import FreeKernel

Schedule = Literal["warp_specialized", "pingpong", "cooperative"]
Scheduler = Literal["persistent", "stream_k"]
Stages = Union[int, Literal["auto"]]

#: Shared memory of a CTA on sm_90, bytes; and the most that barriers and alignment take of it.
_SHARED_LIMIT, _SHARED_REST = 232448, 2048
#: Maximum fp32 accumulators per thread of a consumer warpgroup.
_ACCUMULATORS = 192
_PORTABLE_CLUSTER = 8
_PLACE = re.compile(r"\{\{([A-Z_]+)\}\}")
_KERNEL = {
    "warp_specialized": "KernelTmaWarpSpecialized",
    "pingpong": "KernelTmaWarpSpecializedPingpong",
    "cooperative": "KernelTmaWarpSpecializedCooperative",
}
_AUTO = "cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>"


class Template(ABC):
    """Base of the templates. The constructor raises ConfigError for values that :meth:`why_not` finds impossible."""

    def __post_init__(self) -> None:
        reason = self.why_not()
        if reason is not None:
            wrong, _, expected = reason.partition(", ")
            raise ConfigError(f"invalid template values: {wrong}", expected or "other values", "change them")

    @abstractmethod
    def why_not(self) -> str | None:
        """Return why the values are impossible, with the possible ones; None if they are possible.

        A reason reads, e.g., ``100 rows per tile, a multiple of 64 up to 256``.
        """

    @abstractmethod
    def text(self) -> str:
        """Return the CUDA C++ text with its launch block, all placeholders filled."""

    def kernel(self) -> FreeKernel:
        return FreeKernel.parse(self.text())


@dataclass(frozen=True)
class CutlassSm90(Template):
    """A CUTLASS 3.x kernel for Hopper, made by the collective builder.

    It has form ``host``, TN and NN, fp16 and bf16, and accumulates in fp32.

    Attributes:
        tile: (rows of C, columns of C, K per step) of a CTA, elements. Rows: a multiple of 64 (cooperative: 128) up to
            256. Columns: a multiple of 32 up to 256. K: 32, 64 or 128. Rows times columns is at most 24576
            (cooperative: 49152).
        cluster: CTAs along M and N that multicast operand tiles to each other: 1, 2 or 4 a side, at most 8 together.
        schedule: ``warp_specialized``: one consumer warpgroup, one tile per CTA. ``pingpong``: two that alternate whole
            tiles. ``cooperative``: two that share a tile.
        stages: stages of the operand ring, 2 or more if they fit; ``auto``: as many as fit beside the epilogue.
        scheduler: ``persistent``, or ``stream_k``, which splits the K of the last tiles (cooperative only).
        swizzle: maximum tiles in a row of the persistent scheduler's order; 1, 2, 4 or 8; 1 for ``warp_specialized``.

    Raises:
        ConfigError: values that CUTLASS or the GPU cannot handle (:meth:`why_not`).
    """

    tile: tuple[int, int, int] = (128, 128, 64)
    cluster: tuple[int, int] = (1, 1)
    schedule: Schedule = "pingpong"
    stages: Stages = "auto"
    scheduler: Scheduler = "persistent"
    swizzle: int = 1

    @property
    def name(self) -> str:
        """Return a short unique name, e.g. ``128x128x64_2x1_pingpong``."""
        parts = ["x".join(map(str, self.tile)), "x".join(map(str, self.cluster)), self.schedule]
        if self.stages != "auto":
            parts.append(f"s{self.stages}")
        if self.scheduler != "persistent":
            parts.append(self.scheduler)
        if self.swizzle != 1:
            parts.append(f"w{self.swizzle}")
        return "_".join(parts)

    def why_not(self) -> str | None:
        m, n, k = self.tile
        if self.schedule not in _KERNEL:
            return f"schedule {self.schedule!r}, one of {', '.join(_KERNEL)}"
        if self.scheduler not in ("persistent", "stream_k"):
            return f"scheduler {self.scheduler!r}, persistent or stream_k"
        groups = 2 if self.schedule == "cooperative" else 1  # warpgroups that share a tile
        if m not in (64, 128, 192, 256) or m % (64 * groups):
            return f"{m} rows per tile, a multiple of {64 * groups} up to 256"
        if not 32 <= n <= 256 or n % 32:
            return f"{n} columns per tile, a multiple of 32 up to 256"
        if k not in (32, 64, 128):
            return f"{k} of K per step, 32, 64 or 128"
        if m * n > _ACCUMULATORS * 128 * groups:
            return f"{m * n // (128 * groups)} accumulators per thread, at most {_ACCUMULATORS}"
        if any(size not in (1, 2, 4) for size in self.cluster) or self.cluster[0] * self.cluster[1] > _PORTABLE_CLUSTER:
            return (
                f"a cluster of {self.cluster[0]} x {self.cluster[1]}, 1, 2 or 4 per side and {_PORTABLE_CLUSTER} in all"
            )
        if self.swizzle not in (1, 2, 4, 8):
            return f"swizzle {self.swizzle}, 1, 2, 4 or 8"
        if self.scheduler == "stream_k" and self.schedule != "cooperative":
            return f"stream_k with schedule {self.schedule}, schedule cooperative"
        if self.schedule == "warp_specialized" and self.swizzle != 1:
            return f"swizzle {self.swizzle} without a persistent scheduler, swizzle 1"
        return self._stages_reason()

    def _stages_reason(self) -> str | None:
        """Return why the number of stages is impossible; None if it is possible."""
        m, n, k = self.tile
        least = 2
        if self.stages != "auto" and (type(self.stages) is not int or self.stages < least):
            return f"{self.stages!r} stages, auto or at least {least}"
        stages = least if self.stages == "auto" else self.stages
        epilogue = 4 * min(m, 128) * 32 * 2  # at most four chunks of C
        need = stages * 2 * k * (m + n) + epilogue + _SHARED_REST
        if need > _SHARED_LIMIT:
            return f"{stages} stages need {need} bytes of shared memory, at most {_SHARED_LIMIT}"
        return None

    def text(self) -> str:
        stages = _AUTO if self.stages == "auto" else f"cutlass::gemm::collective::StageCount<{self.stages}>"
        scheduler = {"persistent": "PersistentScheduler", "stream_k": "StreamKScheduler"}[self.scheduler]
        cooperative = self.schedule == "cooperative"
        return _filled(
            "cutlass_sm90.cu",
            WHAT=self.name,
            TILE_M=self.tile[0],
            TILE_N=self.tile[1],
            TILE_K=self.tile[2],
            CLUSTER_M=self.cluster[0],
            CLUSTER_N=self.cluster[1],
            STAGES=stages,
            KERNEL_SCHEDULE=_KERNEL[self.schedule],
            EPILOGUE_SCHEDULE="TmaWarpSpecializedCooperative" if cooperative else "TmaWarpSpecialized",
            # One tile per CTA needs no scheduler.
            SCHEDULER_TYPE="void" if self.schedule == "warp_specialized" else f"cutlass::gemm::{scheduler}",
            SWIZZLE=self.swizzle,
        )


@dataclass(frozen=True)
class CutlassSm80(Template):
    """A CUTLASS 2.x kernel for Ampere: mma.sync m16n8k16 and a ring of cp.async stages, through ``GemmUniversal``.

    It has form ``host``, TN and NN, fp16 (bf16 with fp32 accumulation, too).

    Attributes:
        tile: (rows of C, columns of C, K per step) of a CTA, elements. K: 32 or 64.
        warp: (rows, columns) of the tile that a warp computes, elements: multiples of 16 that divide the tile. A CTA
            has 1 to 8 warps, and a thread at most 128 accumulators.
        stages: stages of the ring, 3 or more if they fit.
        swizzle: ``identity``: a tile is one CTA's. ``stream_k``: CTAs share the K of tiles, through a workspace.
        width: tile columns of the identity swizzle's band: 1, 2, 4 or 8.
        splits: equal parts of K with ``stream_k``, 1 to 16; 1: CUTLASS chooses the shares itself.
        acc: accumulator, ``fp32`` or ``fp16``.

    Raises:
        ConfigError: values that CUTLASS or the GPU cannot handle (:meth:`why_not`).
    """

    tile: tuple[int, int, int] = (128, 128, 32)
    warp: tuple[int, int] = (64, 64)
    stages: int = 4
    swizzle: Literal["identity", "stream_k"] = "identity"
    width: int = 1
    splits: int = 1
    acc: Literal["fp32", "fp16"] = "fp32"

    @property
    def name(self) -> str:
        """Return a short unique name, e.g. ``64x64x64_32x32_s5_k4_fp16`` for four parts of K."""
        order = f"i{self.width}" if self.swizzle == "identity" else f"k{self.splits}" if self.splits > 1 else "stream_k"
        sizes = ["x".join(map(str, self.tile)), "x".join(map(str, self.warp))]
        return "_".join([*sizes, f"s{self.stages}", order, self.acc])

    @property
    def shared_bytes(self) -> int:
        """Return the dynamic shared memory of a CTA's ring, bytes; the epilogue uses the same memory."""
        m, n, k = self.tile
        return self.stages * ELEMENT_BYTES * k * (m + n)

    def why_not(self) -> str | None:
        m, n, k = self.tile
        rows, columns = self.warp
        if k not in (32, 64):
            return f"{k} of K per step, 32 or 64"
        if rows < 16 or columns < 16 or rows % 16 or columns % 16 or m % rows or n % columns:
            return f"{rows} x {columns} per warp of a {m} x {n} tile, multiples of 16 that divide the tile"
        warps = (m // rows) * (n // columns)
        if warps > 8 or rows * columns > 128 * 32:
            return f"{warps} warps with {rows * columns // 32} accumulators per thread, at most 8 and 128"
        if m * k % (warps * 32 * 8) or n * k % (warps * 32 * 8):
            return f"a tile of {m} x {n} x {k}, one that {32 * warps} threads copy in equal shares of 16 bytes"
        if type(self.stages) is not int or self.stages < 3:
            return f"{self.stages!r} stages, 3 or more"
        if self.shared_bytes > _SHARED_LIMIT:
            return f"{self.stages} stages need {self.shared_bytes} bytes of shared memory, at most {_SHARED_LIMIT}"
        if self.acc not in ("fp32", "fp16"):
            return f"accumulator {self.acc!r}, fp32 or fp16"
        return self._order_reason()

    def _order_reason(self) -> str | None:
        """Return why the order of the tiles is impossible; None if it is possible."""
        if self.swizzle not in ("identity", "stream_k"):
            return f"swizzle {self.swizzle!r}, identity or stream_k"
        if self.width not in (1, 2, 4, 8) or (self.width != 1 and self.swizzle != "identity"):
            return f"width {self.width} with {self.swizzle}, 1, 2, 4 or 8 with identity"
        if not 1 <= self.splits <= 16 or (self.splits != 1 and self.swizzle != "stream_k"):
            return f"{self.splits} splits with {self.swizzle}, 1 to 16 with stream_k"
        return None

    def text(self) -> str:
        identity = f"GemmIdentityThreadblockSwizzle<{self.width}>"
        return _filled(
            "cutlass_sm80.cu", WHAT=self.name, ACC=self.acc,
            ACCUMULATOR={"fp32": "float", "fp16": "cutlass::half_t"}[self.acc], TILE_M=self.tile[0],
            TILE_N=self.tile[1], TILE_K=self.tile[2], WARP_M=self.warp[0], WARP_N=self.warp[1], STAGES=self.stages,
            SWIZZLE=identity if self.swizzle == "identity" else "ThreadblockSwizzleStreamK", SPLITS=self.splits,
        )  # fmt: skip


@dataclass(frozen=True)
class CuteSm80(Template):
    """A CuTe kernel with mma.sync and a ring of cp.async stages.

    It has form ``device``, TN and NN, fp16 and bf16, and accumulates in fp32. ``threads`` (32 per warp) and
    ``shared_bytes`` (dynamic shared memory of a CTA) follow from the values: 128 and 65536 for the defaults.

    Attributes:
        tile: (rows of C, columns of C, K per step) of a CTA, elements. Rows and columns: multiples of 32 up to 256, and
            of 16 per warp. K: 32 or 64. Rows times columns is at most 128 times the threads.
        stages: stages of the ring, 2 to 8.
        warps: warps along M and N, 1, 2 or 4 per side and 2 to 8 in total. Each computes tile / warps of C.

    Raises:
        ConfigError: values that the text or the GPU cannot handle (:meth:`why_not`).
    """

    tile: tuple[int, int, int] = (128, 128, 32)
    stages: int = 4
    warps: tuple[int, int] = (2, 2)

    @property
    def shared_bytes(self) -> int:
        """Return the dynamic shared memory of a CTA, bytes."""
        m, n, k = self.tile
        return self.stages * 2 * k * (m + n)

    @property
    def threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    def why_not(self) -> str | None:
        m, n, k = self.tile
        across, along = self.warps
        if any(size not in (1, 2, 4) for size in self.warps) or not 2 <= across * along <= 8:
            return f"{across} x {along} warps, 1, 2 or 4 per side and 2 to 8 in total"
        if m % (16 * across) or n % (16 * along) or m % 32 or n % 32 or not (32 <= m <= 256 and 32 <= n <= 256):
            return f"a tile of {m} x {n}, multiples of 32 and of 16 per warp up to 256"
        if k not in (32, 64):
            return f"{k} of K per step, 32 or 64"
        if m * n > 128 * self.threads:
            return f"{m * n // self.threads} accumulators per thread, at most 128"
        # Each thread copies whole vectors of 8, and all threads copy the same number.
        spans = [(m, k), (n, k), (k, 64 if n % 64 == 0 else 32)]
        if any(rows % (self.threads // (min(span, 64) // 8)) for rows, span in spans):
            return f"a tile of {m} x {n} x {k}, one that {self.threads} threads copy in equal shares"
        if type(self.stages) is not int or not 2 <= self.stages <= 8:
            return f"{self.stages!r} stages, 2 to 8"
        if self.shared_bytes > _SHARED_LIMIT:
            return f"{self.stages} stages need {self.shared_bytes} bytes of shared memory, at most {_SHARED_LIMIT}"
        return None

    def text(self) -> str:
        return _filled(
            "cute_sm80.cu", TILE_M=self.tile[0], TILE_N=self.tile[1], TILE_K=self.tile[2], STAGES=self.stages,
            WARPS_M=self.warps[0], WARPS_N=self.warps[1], THREADS=self.threads, SHARED=self.shared_bytes,
        )  # fmt: skip


def template_text(name: str) -> str:
    """Return the text of a template with its placeholders ``{{NAME}}``, e.g. ``{{TILE_M}}``.

    Raises:
        ConfigError: no such template.
    """
    found = resources.files(__package__) / name
    if not re.fullmatch(r"\w+\.cu", name) or not found.is_file():
        known = "cutlass_sm90.cu, cutlass_sm80.cu or cute_sm80.cu"
        raise ConfigError(f"unknown template {name!r}", known, "pass one of them")
    return found.read_text(encoding="utf-8")


def _filled(name: str, **values: object) -> str:
    """Return the template with every placeholder filled. Raises ConfigError unless names and placeholders match."""
    text = template_text(name)
    placeholders = set(_PLACE.findall(text))
    if placeholders != set(values):
        raise ConfigError(
            f"the placeholders and values of {name} differ: {', '.join(sorted(placeholders ^ set(values)))}",
            "one value per placeholder",
            "correct the template",
        )
    return _PLACE.sub(lambda place: str(values[place[1]]), text)
