"""Kernel configurations: one frozen record per kernel family, one named field per knob.

``name`` is canonical (equal configs have equal names, names parse back), JSON goes both ways.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Union, get_args

from outblas.errors import ConfigError
from outblas.free.kernel import FAMILY as FREE
from outblas.free.kernel import FreeKernel

Schedule = Literal["coop", "stagger", "pingpong"]
Store = Literal["tma", "direct"]
Raster = Literal["m", "n"]
Cache = Literal["plain", "stream_c", "stream_b", "stream_a", "stream_bc", "stream_ac"]
#: Those that stream C out, which needs TMA stores.
STREAMING_C = ("stream_c", "stream_bc", "stream_ac")
Ring = Literal["registers", "shared"]
SplitKind = Literal["cluster", "workspace"]
#: What a caller allows of a launch, each more than the one before. ``plain``: it begins when its predecessor in the
#: stream has ended. ``pdl``: programmatic dependent launch: its prologue overlaps the predecessor, but no operand is
#: read before that has ended, whatever it writes. ``weights``: B may be read before, which is right only if B is
#: written by nothing that is queued on the stream, or runs there, when the call is made. (Of the predecessor alone to
#: promise that would not do: kernel n may begin while n - 1 still waits for n - 2.)
Launch = Literal["plain", "pdl", "weights"]
LAUNCHES: tuple[Launch, ...] = get_args(Launch)


@dataclass(frozen=True, order=True)
class Sm90WgmmaConfig:
    """Knobs of ``sm90_wgmma_gemm``: TMA loads, mbarrier pipeline, warp-specialised wgmma.

    Attributes:
        bm, bn, bk: tile of C in elements and depth of one pipeline stage.
        stages: pipeline depth.
        consumers: warpgroups that issue wgmma.
        schedule: ``coop``: consumers share one tile; ``stagger``: the same, one behind the other, so that
            their epilogues do not coincide; ``pingpong``: they alternate tiles.
        cluster_m, cluster_n: CTAs of a cluster along M and N; operand tiles are multicast in it.
        split_k: CTAs that share one tile's K.
        persistent: one CTA per SM walks over tiles; else one CTA per tile.
        raster: extent that consecutive tiles walk along first; group: tiles of the other extent
            walked together (L2 reuse).
        store: ``tma``: stmatrix to shared memory, then TMA; ``direct``: registers to global.
        min_blocks: CTAs per SM that the register allocation must allow.
        pdl: launch option, programmatic dependent launch: the prologue overlaps the predecessor.
        l2: what L2 is told: nothing (``plain``), or what streams through it: C, which is not read again; B or A, which
            is read once while the other is read again and again; or C with one of them.
        split_kind: how the parts of a split K meet. ``cluster``: its CTAs are one cluster and add up through
            distributed shared memory; ``workspace``: they may run anywhere, write their parts to global
            memory, and the last to arrive adds up.
        early: launch option on top of pdl, see :data:`Launch`: the first loads of B do not wait for the predecessor.
        a_rows: rows of A that are loaded and kept in a stage, of the 64 that wgmma multiplies; 0: all. For M of at
            most so much: a load that reaches past M is slow, and narrow stages leave room for more of them.
        shift: tiles that would reach past M or N are moved back inside, and some of C is computed twice; else what lies
            outside is clipped.
    """

    family: ClassVar[str] = "sm90_wgmma_gemm"
    #: Knobs of a later version: left out of names and JSON at their default, so that earlier ones stay canonical.
    later_knobs: ClassVar[tuple[str, ...]] = ("split_kind", "l2", "early", "a_rows", "shift")
    #: See :class:`Sm80MmaConfig`; not a knob of this family.
    even: ClassVar[bool] = False
    bm: int
    bn: int
    bk: int = 64
    stages: int = 4
    consumers: int = 1
    schedule: Schedule = "coop"
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    persistent: bool = False
    raster: Raster = "m"
    group: int = 8
    store: Store = "tma"
    min_blocks: int = 1
    pdl: bool = False
    split_kind: SplitKind = "cluster"
    l2: Cache = "plain"
    early: bool = False
    a_rows: int = 0
    shift: bool = False

    @property
    def loaded_rows(self) -> int:
        """Rows of A in a stage."""
        return self.a_rows or self.bm

    @property
    def cluster_split(self) -> int:
        """CTAs of a cluster along K."""
        return 1 if self.split_kind == "workspace" else self.split_k


@dataclass(frozen=True, order=True)
class Sm80MmaConfig:
    """Knobs of ``sm80_mma_gemm``: cp.async multistage, ldmatrix, mma.sync.

    Attributes:
        bm, bn, bk: tile of C and depth of one stage, elements.
        stages: cp.async pipeline depth.
        wm, wn, wk: warps along M, N and K; wk > 1 splits every stage's K inside the CTA.
        split_k: CTAs of a cluster that share one tile's K (sm_90 only), summed through distributed
            shared memory.
        vec: elements per global load (8, 4, 2: cp.async of 16, 8, 4 bytes; 1: predicated scalar
            loads, for rows of any alignment).
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: launch option on top of pdl: the first loads of B do not wait for the predecessor.
        even: launch option on top of pdl: no SM is given more CTAs than an even distribution gives it, see
            :func:`outblas.geometry.launch_smem`; the machine code is the same.
    """

    family: ClassVar[str] = "sm80_mma_gemm"
    later_knobs: ClassVar[tuple[str, ...]] = ("early", "even")
    bm: int
    bn: int
    bk: int = 64
    stages: int = 3
    wm: int = 2
    wn: int = 2
    wk: int = 1
    split_k: int = 1
    vec: int = 8
    pdl: bool = False
    early: bool = False
    even: bool = False


@dataclass(frozen=True, order=True)
class Sm80GemvConfig:
    """Knobs of ``sm80_gemv_mma``: at most 16 rows of A (tokens), bound by the reading of B (weights).

    Attributes:
        bm: tokens that the kernel has room for, 8 or 16.
        bn: weight rows (columns of C) of a CTA.
        wn, wk: warps side by side, and warps that share the K of the same rows.
        unroll: steps in flight per warp; a step is 64 of K for TN, 32 for NN.
        ring: where they wait: in ``registers``, or ``shared``: in shared memory (cp.async).
        split_k: CTAs of a cluster that share K (sm_90 only), summed through distributed shared memory.
        prefetch: bytes that a miss brings into L2, 128 or 256.
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: launch option on top of pdl: the first loads of B do not wait for the predecessor.
        persistent: as many CTAs as are resident walk over the tiles, loads of the next one in flight while one is
            added up and stored; else one CTA per tile.
        l2: what L2 is told: nothing, or (``stream_b``) that B is read once.
        kept_k: with persistent: K up to which a CTA keeps its tokens in shared memory, read once for all tiles; 0: they
            are read through L1 for every tile.
        warm_k: with early: so much of K behind the ring is on its way into L2 while a CTA waits for its predecessor.
    """

    family: ClassVar[str] = "sm80_gemv_mma"
    later_knobs: ClassVar[tuple[str, ...]] = ("early", "persistent", "l2", "kept_k", "warm_k")
    #: See :class:`Sm80MmaConfig`; not a knob of this family.
    even: ClassVar[bool] = False
    #: Elements per global load: always 16 bytes.
    vec: ClassVar[int] = 8
    #: Depth of K that every layout takes in whole steps.
    bk: ClassVar[int] = 64
    bm: int
    bn: int
    wn: int = 1
    wk: int = 8
    unroll: int = 4
    ring: Ring = "registers"
    split_k: int = 1
    prefetch: int = 256
    pdl: bool = False
    early: bool = False
    persistent: bool = False
    l2: Cache = "plain"
    kept_k: int = 0
    warm_k: int = 0


@dataclass(frozen=True, order=True)
class Sm80DirectConfig:
    """Knobs of ``sm80_direct_gemm``: tiny products, operands from global memory straight to registers.

    Attributes:
        bm, bn: tile of C in elements.
        wm, wn, wk: warps along M, N and K; wk > 1 splits K inside the CTA.
        unroll: chunks of 32 of K that a warp loads before it multiplies.
        pdl: launch option, programmatic dependent launch (sm_90 only).
        early: launch option on top of pdl: the first loads of B do not wait for the predecessor.
        even: launch option on top of pdl: no SM is given more CTAs than an even distribution gives it.
    """

    family: ClassVar[str] = "sm80_direct_gemm"
    later_knobs: ClassVar[tuple[str, ...]] = ("early", "even")
    #: Elements per global load: always 16 bytes.
    vec: ClassVar[int] = 8
    #: Elements of K that a quad of lanes loads at once.
    bk: ClassVar[int] = 32
    split_k: ClassVar[int] = 1
    bm: int
    bn: int
    wm: int = 1
    wn: int = 1
    wk: int = 1
    unroll: int = 2
    pdl: bool = False
    early: bool = False
    even: bool = False


KernelConfig = Union[Sm90WgmmaConfig, Sm80MmaConfig, Sm80GemvConfig, Sm80DirectConfig]
#: Whatever an evaluator may be asked for.
Candidate = Union[KernelConfig, FreeKernel]
#: Values of the knobs that are words, by the name of their type.
WORDS: dict[str, tuple[str, ...]] = {
    "Schedule": get_args(Schedule),
    "Store": get_args(Store),
    "Raster": get_args(Raster),
    "Cache": get_args(Cache),
    "Ring": get_args(Ring),
    "SplitKind": get_args(SplitKind),
}
FAMILIES: dict[str, type[KernelConfig]] = {
    c.family: c for c in (Sm90WgmmaConfig, Sm80MmaConfig, Sm80GemvConfig, Sm80DirectConfig)
}


def launch_of(config: Candidate) -> Launch:
    """The launch option that a kernel needs."""
    return "weights" if config.early else "pdl" if config.pdl else "plain"


def allows(launch: Launch, config: KernelConfig) -> bool:
    """Whether a kernel may run where a caller allows ``launch``."""
    return LAUNCHES.index(launch_of(config)) <= LAUNCHES.index(launch)


def config_name(config: Candidate) -> str:
    """Canonical name: ``family:knob=value,...`` with every knob in field order (a later one unless at its default).

    A free kernel's is its own, ``free_<hash>``; its text cannot be read back from that.
    """
    if isinstance(config, FreeKernel):
        return config.name
    knobs = ",".join(f"{name}={_text(value)}" for name, value in _written(config).items())
    return f"{config.family}:{knobs}"


def config_from_name(name: str) -> KernelConfig:
    """Inverse of :func:`config_name`.

    Raises:
        ConfigError: for an unknown family, a missing or unknown knob, a value that the knob cannot
            have, or a name that is not the canonical one.
    """
    family, _, rest = name.partition(":")
    pairs = dict(re.findall(r"(\w+)=([^,]*)", rest))
    config = template_from_json({**{k: _value(v) for k, v in pairs.items()}, "family": family})
    if config_name(config) != name:
        raise ConfigError(f"config name {name!r}", config_name(config), "use the canonical name")
    return config


def config_to_json(config: Candidate) -> dict[str, Any]:
    """``{"family": ..., knob: value, ...}``, the knobs that :func:`config_name` writes; a free kernel's ``text``."""
    if isinstance(config, FreeKernel):
        return {"family": config.family, "text": config.text}
    return {"family": config.family, **_written(config)}


def config_from_json(data: dict[str, Any]) -> Candidate:
    """Inverse of :func:`config_to_json`, of free kernels too.

    Raises:
        ConfigError: as :func:`config_from_name`. ContractError: a free kernel's text breaks the contract.
    """
    return FreeKernel.parse(data.get("text", "")) if data.get("family") == FREE else template_from_json(data)


def template_from_json(data: dict[str, Any]) -> KernelConfig:
    """Inverse of :func:`config_to_json` for the template families; raises :class:`ConfigError` as
    :func:`config_from_name`."""
    cls = FAMILIES.get(str(data.get("family")))
    if cls is None:
        raise ConfigError(
            f"unknown kernel family {data.get('family')!r}", " or ".join(FAMILIES), "use a config made by this version"
        )
    knobs = {k: v for k, v in data.items() if k != "family"}
    known = {f.name: f for f in fields(cls)}
    odd = sorted((set(knobs) ^ set(known)) - (set(_later(cls.family)) - set(knobs)))
    if odd:
        raise ConfigError(
            f"{cls.family}: knobs {odd} missing or unknown", f"exactly {sorted(known)}", "write every knob by name"
        )
    for key, value in knobs.items():
        kind = str(known[key].type)
        want = bool if kind == "bool" else int if kind == "int" else str
        if type(value) is not want:
            raise ConfigError(f"{cls.family}: {key}={value!r}", f"a value of type {want.__name__}", "correct the knob")
        if kind in WORDS and value not in WORDS[kind]:
            raise ConfigError(f"{cls.family}: {key}={value!r}", " or ".join(WORDS[kind]), "correct the knob")
    return cls(**knobs)


@functools.cache
def _later(family: str) -> dict[str, Any]:
    """Knobs that earlier versions did not have, and their defaults: what kernels of before did."""
    cls = FAMILIES[family]
    later: tuple[str, ...] = getattr(cls, "later_knobs", ())
    return {f.name: f.default for f in fields(cls) if f.name in later}


@functools.cache
def _knobs(family: str) -> tuple[str, ...]:
    return tuple(f.name for f in fields(FAMILIES[family]))


def _written(config: KernelConfig) -> dict[str, Any]:
    later, knobs = _later(config.family), ((name, getattr(config, name)) for name in _knobs(config.family))
    return {name: value for name, value in knobs if name not in later or value != later[name]}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
