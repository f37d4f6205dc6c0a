"""Ways to compute a product that are ready on this machine: nothing is compiled.

They are kernels whose machine code is shipped or lies in the compile cache, and algorithms of cuBLASLt. Finding them is
work of the host. It is split into small steps, since other threads of the program wait for the interpreter meanwhile.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from outblas.adapt.learning.learned_products import Contender
from outblas.core.config import KernelConfig, Launch, launch_allows
from outblas.core.errors import OutblasError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, architecture
from outblas.dispatch.decide import Choose, LeftToTorch
from outblas.dispatch.exclusion import Exclusions
from outblas.dispatch.unlisted_shapes import predicted_kernels, promising_answers
from outblas.kernels.catalogue import first_search_candidates
from outblas.kernels.geometry import workspace_bytes
from outblas.kernels.source import make_source
from outblas.predict.answer_choice import other_answers
from outblas.predict.any_shape import likeliest
from outblas.records.library import Library
from outblas.records.library_row import AnswerChoice, LibraryChoice
from outblas.runtime.cubin import Cubin
from outblas.runtime.cublas import WORKSPACE_BYTES
from outblas.runtime.cublaslt import LtAlgorithms
from outblas.runtime.nvrtc import cached_cubin
from outblas.runtime.packaged_cubins import PACKAGED
from outblas.runtime.sass import check_static

#: The most contenders while the program runs: kernels, and algorithms of cuBLASLt.
WHILE_RUNNING = (4, 2)
#: The same in ``settle()``. The heuristic gives up to 8 algorithms, of which torch runs the first.
WHILE_SETTLING = (8, 7)
#: Kernels of the catalogue, not of a library, whose machine code is looked for in the compile cache.
MAX_LOOKED_FOR = 16


def at_most(count: int, most: tuple[int, int] = WHILE_SETTLING) -> tuple[int, int]:
    """Return (kernels, algorithms), as many as ``most`` says but ``count`` together at most, 1 each at least."""
    kernels = min(most[0], max(1, round(count * most[0] / sum(most))))
    return kernels, min(most[1], max(1, count - kernels))


@dataclass
class Ready:
    """Contenders and the machine code of their kernels.

    Attributes:
        contenders: kernels in front, then algorithms of cuBLASLt.
        unmeasured: what runs without learning, ready or not; None: torch.
    """

    contenders: list[Contender] = field(default_factory=list)
    cubins: dict[KernelConfig, Cubin] = field(default_factory=dict)
    unmeasured: Contender | None = None


def find_ready(
    problem: Problem, launch: Launch, gpu: Gpu, library: Library, lt: LtAlgorithms, own: Choose | None,
    exclude: Exclusions, most: tuple[int, int] = WHILE_RUNNING,
) -> Generator[None, None, Ready]:  # fmt: skip
    """Find and return the contenders of a product, none if nothing is ready; yield after each small step.

    Args:
        lt: cuBLASLt of the device, whose context is current.
        own: chooser of the device; a kernel that it chooses is the first contender.
    """
    before = _choice(own, problem, gpu, launch)
    chosen = None if before is None else before.config
    ready = Ready(unmeasured=None if exclude.why_not(problem, chosen) else before)
    first = lt.first_answer(problem) or ""
    algorithms = _likely_answers(problem, gpu, lt, first)[: most[1]]
    yield
    for config in _likely_kernels(problem, launch, gpu, library, chosen, first):
        if len(ready.cubins) == most[0]:
            break
        is_out = config in ready.cubins or exclude.why_not(problem, config)
        cubin = None if is_out else ready_cubin(problem, config, architecture(gpu))
        if cubin is not None:
            ready.cubins[config] = cubin
        yield
    ready.contenders = [*(Contender(config) for config in ready.cubins), *algorithms]
    return ready


def _likely_answers(problem: Problem, gpu: Gpu, lt: LtAlgorithms, first: str) -> list[Contender]:
    """Return algorithms of cuBLASLt's heuristic but its ``first`` answer, which torch most likely runs.

    The most promising ones come first. An algorithm that rounds partial sums is left out: its results are less exact.
    """
    answers = list(dict.fromkeys([*([first] if first else []), *lt.answers(problem)]))
    try:
        others = promising_answers(gpu, problem, answers)
    except OutblasError:  # no data for this GPU; the device's chooser has warned if they are damaged
        others = [answers[i] for i in other_answers(answers)]
    return [Contender(None, one) for one in others]


def _likely_kernels(
    problem: Problem, launch: Launch, gpu: Gpu, library: Library, first: KernelConfig | None, answer: str
) -> Iterator[KernelConfig]:
    """Yield legal kernels, the most promising ones early: ``first``, those that ship, then the catalogue's.

    ``answer`` is the first answer of cuBLASLt's heuristic.
    """
    yield from _with_room(problem, [] if first is None else [first])
    shipped = _shipped(problem, launch, gpu, library, answer)
    yield from _with_room(problem, shipped)
    seen = set(shipped)
    others = [one for one in first_search_candidates(problem, gpu) if launch_allows(launch, one) and one not in seen]
    yield from _with_room(problem, likeliest(problem, others, gpu)[:MAX_LOOKED_FOR])


def _with_room(problem: Problem, configs: Iterable[KernelConfig]) -> Iterator[KernelConfig]:
    """Yield the kernels for which the shared workspace is large enough."""
    return (config for config in configs if workspace_bytes(problem, config) <= WORKSPACE_BYTES)


def _choice(own: Choose | None, problem: Problem, gpu: Gpu, launch: Launch) -> Contender | None:
    try:
        choice = None if own is None else own(problem, gpu, launch)
    except LeftToTorch:
        return None
    if isinstance(choice, AnswerChoice):
        return Contender(None, choice.algorithm)
    return Contender(choice.config) if isinstance(choice, LibraryChoice) else None


def _shipped(problem: Problem, launch: Launch, gpu: Gpu, library: Library, answer: str) -> Sequence[KernelConfig]:
    """Return legal kernels for any shape and of those that the library installs, the most promising first."""
    try:
        return [one.config for one in predicted_kernels(gpu, library, problem, launch, answer, deviations=1)]
    except OutblasError:  # no data for this GPU; the device's chooser has warned if they are damaged
        installed = library.fp32_kernels.get((problem.layout, problem.dtype), ())
        return likeliest(problem, [one for one in installed if launch_allows(launch, one)], gpu)


def ready_cubin(problem: Problem, config: KernelConfig, arch: str) -> Cubin | None:
    """Return a kernel's machine code if it is shipped or in the compile cache; None if it would have to be compiled."""
    source = make_source(problem, config)
    packaged = PACKAGED.get(source, arch)
    if packaged is not None:
        return packaged
    try:
        cubin = cached_cubin(source, arch)
    except ToolchainMissing:  # the cache's keys name the compiler
        return None
    return None if cubin is None or check_static(cubin.facts, source, cubin) else cubin
