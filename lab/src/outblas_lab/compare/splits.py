"""Splits of a recording's problems: agents learn from one part and are compared on the other.

Across GPUs, each agent learns from the judged GPU, from another one, or from both. An arm is ``AGENT@SOURCE``, e.g.
``regressor@other``. An agent that learns nothing before a search is an arm by itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from outblas.core.errors import UsageError, unknown_name
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent
from outblas_lab.recordings.recording import Recording
from outblas_lab.train.training_part import TrainingPart

#: name -> what is drawn, in words. ``layout`` draws nothing: it trains on TN and holds out the other layouts. There are
#: splits of an extent, too, as ``k=64``.
SPLITS = {"shapes": "(M, N, K) shapes", "families": "(N, K) pairs", "layout": "layouts other than TN"}
TRAINING_LAYOUT = "TN"
_EXTENT = re.compile(r"([mnk])=([1-9]\d*)", re.ASCII)

#: split -> group of a problem; a group is never on both sides.
_GROUP: dict[str, Callable[[Problem], Hashable]] = {
    "shapes": lambda p: (p.m, p.n, p.k),
    "families": lambda p: (p.n, p.k),
}


@dataclass(frozen=True)
class Split:
    """A division of a recording's problems.

    Attributes:
        training: problems to learn from, in the order of the recording.
        held_out: all other problems, in the same order.
    """

    name: str
    training: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def is_split(name: str) -> bool:
    """Return True if there is a split of this name."""
    return name in SPLITS or bool(_EXTENT.fullmatch(name))


def check_split(name: str) -> None:
    """Check the name of a split; return None. Raises UsageError if there is no such split."""
    if not is_split(name):
        raise unknown_name("split", name, (*SPLITS, "k=64", "m=16384"), "pass one or more of them as --splits")


def held_out_words(name: str) -> str:
    """Return in words what a split holds out, e.g. ``(N, K) pairs`` or ``K = 64``."""
    if name in SPLITS:
        return SPLITS[name]
    check_split(name)
    return name.upper().replace("=", " = ")


def make_split(name: str, problems: Sequence[Problem], share: float = 0.2, seed: int = 0) -> Split:
    """Split problems for a comparison on problems that no agent has learned from before.

    ``shapes`` holds out a seeded ``share`` of the (M, N, K), each in all its layouts, dtypes and accumulators.
    ``families`` holds out a seeded ``share`` of the (N, K), each with all its M. ``layout`` holds out every layout but
    TN. An extent such as ``k=64`` holds out every problem that has it: agents extrapolate. The number of groups is
    rounded, but at least one is on each side. The draw depends on the seed and the set of shapes, not on their order.

    Args:
        name: ``shapes``, ``families``, ``layout``, or one extent as ``m=16384``, ``n=64`` or ``k=64``.
        share: held-out share of the groups, above 0 and below 1; unused where nothing is drawn.
        seed: seed of the draw; unused where nothing is drawn.

    Raises:
        UsageError: the split is unknown, the share is not between 0 and 1, or one side would be empty.
    """
    check_split(name)
    if name == "layout":
        return _by_layout(problems)
    group = _group_of(name)
    if name not in SPLITS:
        extent = int(name.partition("=")[2])
        split = _cut(name, problems, lambda p: group(p) == extent)
        if not split.training or not split.held_out:
            found = f"{len(split.held_out)} of {len(problems)} problems"
            raise UsageError(f"split {name} holds out {found}", "some problems, but not all", "pass another --splits")
        return split
    if not 0 < share < 1:
        raise UsageError(f"the held-out share is {share:g}", "a number between 0 and 1", "pass e.g. --held-out 0.2")
    groups = sorted({group(p) for p in problems})  # type: ignore[type-var]
    if len(groups) < 2:
        raise UsageError(f"split {name} has {len(groups)} {SPLITS[name]}", "2 or more of them", "pass other --splits")
    count = min(max(1, round(share * len(groups))), len(groups) - 1)
    drawn = set(random.Random(f"{seed}/{name}").sample(groups, count))
    return _cut(name, problems, lambda p: group(p) in drawn)


def outside_held_out(split: Split, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the problems of which no group is held out, in their order. They may be of another GPU's recording.

    Args:
        split: a split of kind ``shapes`` or ``families``, or of an extent.

    Raises:
        UsageError: the split is of another kind.
    """
    if split.name == "layout":
        raise UsageError("split 'layout' does not support --across", "another split", "pass other --splits")
    group = _group_of(split.name)
    held_out = {group(p) for p in split.held_out}
    return tuple(p for p in problems if group(p) not in held_out)


def _group_of(name: str) -> Callable[[Problem], Hashable]:
    """Return the function that gives a problem's group in a split: its extent in a split such as ``k=64``."""
    return _GROUP[name] if name in _GROUP else attrgetter(name.partition("=")[0])


def _by_layout(problems: Sequence[Problem]) -> Split:
    split = _cut("layout", problems, lambda p: p.layout != TRAINING_LAYOUT)
    if not split.training or not split.held_out:
        layouts = ", ".join(sorted({p.layout for p in problems})) or "none"
        wrong = f"split 'layout' needs two layouts, but the recording has only {layouts}"
        do = "record another layout into the same folder, or remove 'layout' from --splits"
        raise UsageError(wrong, f"{TRAINING_LAYOUT} and another layout", do)
    return split


def _cut(name: str, problems: Sequence[Problem], is_held_out: Callable[[Problem], bool]) -> Split:
    training = tuple(p for p in problems if not is_held_out(p))
    return Split(name, training, tuple(p for p in problems if is_held_out(p)))


#: Source -> the problems that an agent learns from, in words. Held-out problems are those of the judged GPU.
SOURCES = {
    "other": "the other GPU's, without the held-out shapes",
    "other-all": "all of the other GPU's, the held-out shapes included",
    "both": "those of own and of other",
    "own": "the judged GPU's that are not held out",
}
_ARM_MARK = "@"


def arm_parts(arm: str) -> tuple[str, str]:
    """Return (agent, source) of an arm; the source of an agent by itself is empty.

    Example: ``arm_parts("ppo@both")`` returns ``("ppo", "both")``. The path of an agent file may have the mark, too.
    """
    agent, _, source = arm.rpartition(_ARM_MARK)
    return (agent, source) if source in SOURCES else (arm, "")


def arms_of(agents: Sequence[str], sources: Sequence[str], gpu: Gpu) -> list[str]:
    """Return the arms of some agents, agent after agent.

    An agent that learns from one recording has no arm with ``both``.

    Args:
        sources: keys of :data:`SOURCES`, each once.

    Raises:
        UsageError: a source is unknown or given twice, or none is given; or an agent would have no arm.
    """
    for source in sources:
        if source not in SOURCES:
            raise unknown_name("source", source, SOURCES, "pass one or more of them as --learn-from")
    if not sources or len(set(sources)) != len(sources):
        raise UsageError(f"--learn-from is {','.join(sources)!r}", "distinct sources", "correct --learn-from")
    found = []
    for name in agents:
        agent = make_agent(name, 0, gpu)
        usable = [source for source in sources if agent.across or source != "both"]
        if not usable:
            wrong = f"agent {name} does not support source 'both'"
            raise UsageError(wrong, "another source", "add another source to --learn-from")
        own = type(agent)
        learns_before = own.prepare is not Agent.prepare or own.prepare_across is not Agent.prepare_across
        found += [f"{name}{_ARM_MARK}{source}" for source in usable] if learns_before else [name]
    return found


def parts_of(source: str, split: Split, judged: Recording, other: Recording | None) -> list[TrainingPart]:
    """Return the training problems of an arm. The recordings hold no other problems, so an agent cannot read them.

    Args:
        source: a key of :data:`SOURCES`, or empty for an agent by itself; it gets the part ``own``.

    Raises:
        UsageError: the other recording has no problem outside the held-out ones, or the split is of another kind.
    """
    own = [_part(judged, split.training)]
    if other is None or source in ("", "own"):
        return own
    problems = other.problems if source == "other-all" else outside_held_out(split, other.problems)
    if not problems:
        wrong = f"split {split.name} holds out all problems of the other GPU"
        raise UsageError(wrong, "only some of them", "pass a smaller --held-out")
    return [*(own if source == "both" else []), _part(other, problems)]


def _part(recording: Recording, problems: tuple[Problem, ...]) -> TrainingPart:
    return TrainingPart(recording.restricted_to(problems), problems)


#: Kind, seed and held-out share of the public split.
PUBLIC_SPLIT, PUBLIC_SEED, PUBLIC_SHARE = "shapes", 0, 0.2


def public_split(problems: Sequence[Problem]) -> Split:
    """Return the public split of a recording's problems: a fifth of the (M, N, K) is held out.

    Raises:
        UsageError: there are fewer than two (M, N, K).
    """
    return make_split(PUBLIC_SPLIT, problems, PUBLIC_SHARE, PUBLIC_SEED)
