"""The base record of kernel configurations and the schema of their knobs. Each knob is one named field.

A kernel family derives a frozen record from :class:`KernelConfig`. Names are canonical: equal configs have equal names,
and :mod:`outblas.kernels.config_text` parses a name back. This module knows no family.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast, get_args, get_type_hints

from outblas.core.problem import Problem

#: What a caller permits at a launch; each option includes the ones before it. ``plain``: the kernel starts after its
#: predecessor in the stream has ended. ``pdl``: programmatic dependent launch. The prologue overlaps the predecessor,
#: but no operand is read before the predecessor has ended. ``weights``: B may be read earlier. This is right only if no
#: work that is queued or running on the stream at the call writes B. It is not enough that the predecessor does not
#: write B: kernel n may start while n - 1 still waits for n - 2.
Launch = Literal["plain", "pdl", "weights"]
LAUNCHES: tuple[Launch, ...] = get_args(Launch)
#: Type of a knob's values: a switch, an integer, or one of a few words.
KnobKind = Literal["bool", "int", "word"]


class Candidate(Protocol):
    """A kernel that an evaluator can try: a config of a kernel family, or a free kernel.

    Attributes:
        family: name of the kernel family, e.g. ``sm80_mma_gemm``; ``free`` for a free kernel.
    """

    family: ClassVar[str]

    @property
    def pdl(self) -> bool:
        """Return whether the kernel uses programmatic dependent launch."""

    @property
    def early(self) -> bool:
        """Return whether the kernel reads B before its predecessor in the stream has ended."""

    @property
    def even(self) -> bool:
        """Return whether the launch limits the CTAs per SM to those of an even distribution."""

    @property
    def name(self) -> str:
        """Return the canonical name. Equal names mean equal kernels."""

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as a new dict of JSON values.

        A config gives ``{"family": ..., knob: value, ...}``, a free kernel ``{"family": "free", "text": ...}``.
        """

    def __hash__(self) -> int:
        """Return a hash; equal candidates have equal hashes."""


@dataclass(frozen=True, order=True)
class KernelConfig:
    """Base of the config records of all kernel families.

    A family's record is a frozen dataclass with one field per knob. A knob that a family cannot choose is a class
    variable of the same name instead. Constructors check nothing; :func:`outblas.kernels.legality.why_illegal` does.

    Attributes:
        family: name of the family, e.g. ``sm80_mma_gemm``.
        later_knobs: knobs that names and JSON omit at their default.
        launch_knobs: knobs that change only the launch, or that have a meaning only together with these.
        bm: rows of a C tile, elements.
        bn: columns of a C tile, elements.
        bk: elements of K that the kernel processes per step.
        split_k: number of CTAs that share the K extent of one tile; 1 for a family without this knob.
        pdl: launch with programmatic dependent launch. This and the next two are False without the knob.
        early: needs pdl. Load B before the predecessor has ended, see ``weights`` in :data:`Launch`.
        even: needs pdl. No SM gets more CTAs than an even distribution gives it.
    """

    #: The family's name; its kernel and its kernel file have the same name.
    family: ClassVar[str]
    #: Knobs that a later version added. Names and JSON omit them at their default, so that earlier names stay
    #: canonical.
    later_knobs: ClassVar[tuple[str, ...]] = ()
    #: Knobs that change only the launch, or that have a meaning only together with these. Callers must allow them.
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
    else:  # for families without these knobs; without annotations, which would make them dataclass fields
        split_k, pdl, early, even = 1, False, False, False

    @functools.cached_property
    def name(self) -> str:
        """Return ``family:knob=value,...`` with the knobs of :meth:`written_knobs`; switches as true or false."""
        knobs = ",".join(f"{name}={value_text(value)}" for name, value in self.written_knobs().items())
        return f"{self.family}:{knobs}"

    def to_json(self) -> dict[str, Any]:
        """Return ``{"family": ..., knob: value, ...}`` with the knobs of :meth:`written_knobs`; switches as bools."""
        return {"family": self.family, **self.written_knobs()}

    def knobs(self) -> dict[str, Any]:
        """Return knob -> value for every knob, in field order, those at their default included."""
        return {knob.name: getattr(self, knob.name) for knob in knob_schema(type(self))}

    def changed_knobs(self) -> dict[str, Any]:
        """Return knob -> value for the knobs that have a default and differ from it, in field order.

        ``bm`` and ``bn`` have no default, so they are never in it.
        """
        values = self.knobs()
        return {name: values[name] for name, default in self.defaults().items() if values[name] != default}

    def with_knobs(self, **values: Any) -> Self:
        """Return a copy with some knobs changed; this config stays as it is.

        Args:
            values: knob=value; the values are not checked.

        Raises:
            TypeError: the family has no such knob.
        """
        own = self.knobs()
        if unknown := values.keys() - own.keys():
            raise TypeError(f"{self.family} has no knob {', '.join(sorted(unknown))}")
        made = object.__new__(type(self))  # dataclasses.replace takes longer, and a space makes 100,000 copies
        made.__dict__.update(own, **values)
        return made

    def written_knobs(self) -> dict[str, Any]:
        """Return knob -> value for the knobs that names and JSON contain, in field order.

        These are all knobs, except those of :attr:`later_knobs` at their default. Other knobs are there at their
        default, too.
        """
        found = {}
        for name, later, default in _name_parts(cast(Hashable, type(self))):
            value = getattr(self, name)
            if not later or value != default:
                found[name] = value
        return found

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return knob -> default for the knobs that have a default, in field order.

        ``bm`` and ``bn`` have none, so they are not in it.
        """
        return {knob.name: knob.default for knob in knob_schema(cls) if knob.default is not None}


@dataclass(frozen=True)
class Knob:
    """Schema of a knob: a field of a family's record.

    Attributes:
        name: name of the dataclass field, e.g. ``stages``.
        kind: type of its values: ``bool``, ``int``, or ``word`` (one of a few strings).
        words: the values of a knob of kind ``word``, in the order of its Literal type; empty for other kinds.
        default: the default value; None if a value must be given.
        later: True if names and JSON omit the knob at its default.
        launch_option: True if it changes the launch, see :attr:`KernelConfig.launch_knobs`.
    """

    name: str
    kind: KnobKind
    words: tuple[str, ...]
    default: bool | int | str | None
    later: bool
    launch_option: bool

    @property
    def all_values(self) -> tuple[bool, ...] | tuple[str, ...]:
        """Return every value of a switch (False, True) or of a word; an empty tuple for an integer."""
        return (False, True) if self.kind == "bool" else self.words


def knob_schema(config: type[KernelConfig]) -> tuple[Knob, ...]:
    """Return the knobs of a family's record class, in field order.

    Args:
        config: the class, not an instance, e.g. ``Sm80MmaConfig``. Its first knobs are ``bm`` and ``bn``.
    """
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
    """Return the least launch option that a kernel needs, a string.

    It is ``"weights"`` if ``config.early``, ``"pdl"`` if only ``config.pdl``, else ``"plain"``.
    """
    return "weights" if config.early else "pdl" if config.pdl else "plain"


def launch_allows(launch: Launch, config: Candidate) -> bool:
    """Return True if a kernel may run for a caller who allows ``launch``, which includes the lesser options.

    ``plain`` allows only kernels that need ``plain``. ``pdl`` allows those that need ``plain`` or ``pdl``. ``weights``
    allows all.

    Args:
        launch: what the caller allows: ``plain``, ``pdl`` or ``weights``. Another text raises ValueError.
        config: the kernel; :func:`launch_of` says what it needs.
    """
    return LAUNCHES.index(launch_of(config)) <= LAUNCHES.index(launch)


class KernelKind(NamedTuple):
    """Everything that a kernel's source depends on without an epilogue, plus the launch.

    Equal kinds share a loaded kernel. Kinds that differ only in ``even`` have the same source and cubin, but different
    launches.
    """

    config: KernelConfig
    layout: str
    dtype: str
    acc: str


def kernel_kind(problem: Problem, config: KernelConfig) -> KernelKind:
    """Return the kind of a problem's kernel, a cheap key for caches.

    Problems that differ only in M, N, K have equal kinds.
    """
    return KernelKind(config, problem.layout, problem.dtype, problem.acc)


def config_name(config: Candidate) -> str:
    """Return the canonical name: that of :attr:`KernelConfig.name`, or ``free_<hash>`` for a free kernel.

    A config's name is ``family:knob=value,...``. Knobs that a later version added are left out at their default.
    Example: ``"sm80_direct_gemm:bm=16,bn=16,wm=1,wn=1,wk=1,unroll=2,pdl=false"``.
    """
    return config.name


def config_to_json(config: Candidate) -> dict[str, Any]:
    """Return the candidate as a dict of JSON values.

    It is ``{"family": ..., knob: value, ...}`` of a config, with the knobs of its name, and
    ``{"family": "free", "text": ...}`` of a free kernel.
    """
    return config.to_json()


@functools.cache
def _name_parts(config: Any) -> tuple[tuple[str, bool, Any], ...]:
    """Return (name, is a later knob, default) of each knob of a record class, in field order."""
    return tuple((knob.name, knob.later, knob.default) for knob in knob_schema(config))


def value_text(value: object) -> str:
    """Return a knob's value as names, prompts and pages have it: "true" or "false" of a switch, else ``str(value)``."""
    return str(value).lower() if isinstance(value, bool) else str(value)
