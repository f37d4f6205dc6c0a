"""The base record of kernel configurations, and the schema of their knobs: one named field per knob.

A kernel family derives a frozen record from :class:`KernelConfig`. Its name is canonical: equal configs have equal
names, and names parse back (:mod:`outblas.kernels.config_text`). This module knows no family.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast, get_args, get_type_hints

#: What a caller allows of a launch, each more than the one before. ``plain``: it begins when its predecessor in the
#: stream has ended. ``pdl``: programmatic dependent launch: its prologue overlaps the predecessor, but no operand is
#: read before that has ended, whatever it writes. ``weights``: B may be read before, which is right only if B is
#: written by nothing that is queued on the stream, or runs there, when the call is made. (Of the predecessor alone to
#: promise that would not do: kernel n may begin while n - 1 still waits for n - 2.)
Launch = Literal["plain", "pdl", "weights"]
LAUNCHES: tuple[Launch, ...] = get_args(Launch)
#: What a knob's values are: a switch, a number, or one of a few words.
KnobKind = Literal["bool", "int", "word"]
AnyConfig = TypeVar("AnyConfig", bound="KernelConfig")


class Candidate(Protocol):
    """Whatever an evaluator may be asked for: a config of a kernel family, or a free kernel."""

    family: ClassVar[str]

    @property
    def pdl(self) -> bool:
        """Whether the kernel is launched by programmatic dependent launch."""

    @property
    def early(self) -> bool:
        """Whether the kernel reads B before its predecessor has ended."""

    @property
    def even(self) -> bool:
        """Whether no SM is given more CTAs than an even distribution gives it."""

    @property
    def name(self) -> str:
        """The canonical name: equal names, equal kernels."""

    def to_json(self) -> dict[str, Any]:
        """The candidate as JSON types, its family among them."""

    def __hash__(self) -> int:
        """Equal for equal candidates."""


@dataclass(frozen=True, order=True)
class KernelConfig:
    """What the records of all kernel families share.

    A family's record is a frozen dataclass with one field per knob. What a family cannot choose it gives as a class
    variable of the same name.

    Attributes:
        bm: Rows of a tile of C, elements.
        bn: Columns of a tile of C, elements.
        bk: Elements of K that a family's kernel takes in whole steps.
        split_k: CTAs that share one tile's K.
        pdl: Launch option: programmatic dependent launch.
        early: Launch option on top of pdl, see :data:`Launch`: the first loads of B do not wait for the predecessor.
        even: Launch option on top of pdl: no SM is given more CTAs than an even distribution gives it.
    """

    #: The family's name, which is that of its kernel and of its kernel file.
    family: ClassVar[str]
    #: Knobs of a later version: left out of names and JSON at their default, so that earlier ones stay canonical.
    later_knobs: ClassVar[tuple[str, ...]] = ()
    #: Knobs that say how a kernel is launched, or that mean something only beside these: for callers to allow.
    launch_knobs: ClassVar[tuple[str, ...]] = ("pdl", "early", "even")
    bm: int
    bn: int
    if TYPE_CHECKING:

        @property
        def bk(self) -> int: ...

        @property
        def split_k(self) -> int: ...

        @property
        def pdl(self) -> bool: ...

        @property
        def early(self) -> bool: ...

        @property
        def even(self) -> bool: ...
    else:  # for families that have no such knob; no annotations, which would make them fields
        split_k, pdl, early, even = 1, False, False, False

    @property
    def name(self) -> str:
        """``family:knob=value,...`` with every knob in field order, a later one unless at its default."""
        knobs = ",".join(f"{name}={_text(value)}" for name, value in self.written_knobs().items())
        return f"{self.family}:{knobs}"

    def to_json(self) -> dict[str, Any]:
        """``{"family": ..., knob: value, ...}``, the knobs that :attr:`name` writes."""
        return {"family": self.family, **self.written_knobs()}

    def knobs(self) -> dict[str, Any]:
        """Knob -> value, of every knob, in field order."""
        return {knob.name: getattr(self, knob.name) for knob in knob_schema(type(self))}

    def changed_knobs(self) -> dict[str, Any]:
        """Knob -> value, of the knobs that have a default and are not at it."""
        values = self.knobs()
        return {name: values[name] for name, default in self.defaults().items() if values[name] != default}

    def with_knobs(self: AnyConfig, **values: Any) -> AnyConfig:
        """The config with other values of some of its knobs."""
        return replace(self, **values)

    def written_knobs(self) -> dict[str, Any]:
        """Knob -> value, of the knobs that are written down: all but later ones at their default."""
        found = {}
        for name, later, default in _name_parts(cast(Hashable, type(self))):
            value = getattr(self, name)
            if not later or value != default:
                found[name] = value
        return found

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Knob -> default, of the knobs that have one."""
        return {knob.name: knob.default for knob in knob_schema(cls) if knob.default is not None}


@dataclass(frozen=True)
class Knob:
    """One knob of a family's record.

    Attributes:
        name: The field's name.
        kind: What its values are.
        words: The values of a knob of kind ``word``, in the order of its type; empty for the others.
        default: The value where none is given; None: one must be given.
        later: Whether it is written only where it differs from its default.
        launch_option: Whether it says how a kernel is launched, see :attr:`KernelConfig.launch_knobs`.
    """

    name: str
    kind: KnobKind
    words: tuple[str, ...]
    default: bool | int | str | None
    later: bool
    launch_option: bool

    @property
    def all_values(self) -> tuple[bool, ...] | tuple[str, ...]:
        """Every value that a switch or a word can have; empty for a number."""
        return (False, True) if self.kind == "bool" else self.words


def knob_schema(config: type[KernelConfig]) -> tuple[Knob, ...]:
    """The knobs of a family's record, in field order."""
    return _schema(cast(Hashable, config))


@functools.cache
def _schema(config: Any) -> tuple[Knob, ...]:
    hints = get_type_hints(config)
    found = []
    for field in fields(config):
        kind: KnobKind = "bool" if hints[field.name] is bool else "int" if hints[field.name] is int else "word"
        words = get_args(hints[field.name]) if kind == "word" else ()
        default = None if field.default is MISSING else field.default
        later, option = field.name in config.later_knobs, field.name in config.launch_knobs
        found.append(Knob(field.name, kind, words, default, later, option))
    return tuple(found)


def launch_of(config: Candidate) -> Launch:
    """The launch option that a kernel needs."""
    return "weights" if config.early else "pdl" if config.pdl else "plain"


def launch_allows(launch: Launch, config: Candidate) -> bool:
    """Whether a kernel may run where a caller allows ``launch``."""
    return LAUNCHES.index(launch_of(config)) <= LAUNCHES.index(launch)


def config_name(config: Candidate) -> str:
    """Canonical name of a candidate: :attr:`KernelConfig.name`, or a free kernel's own, ``free_<hash>``."""
    return config.name


def config_to_json(config: Candidate) -> dict[str, Any]:
    """JSON form of a candidate: the knobs of :meth:`KernelConfig.to_json`, or a free kernel's ``text``."""
    return config.to_json()


@functools.cache
def _name_parts(config: Any) -> tuple[tuple[str, bool, Any], ...]:
    """Of each knob: its name, whether it is a later one, its default."""
    return tuple((knob.name, knob.later, knob.default) for knob in knob_schema(config))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
