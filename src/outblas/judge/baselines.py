"""Baselines of the comparison, with the interface of the project's kernels: ``.name`` and ``.bind() -> Call``.

``call(stream)`` enqueues one GEMM on the raw CUstream, without synchronisation or allocation. Every baseline solves the
same problem: same layout, dtype, accumulator width and 32 MiB of workspace. torch and cuBLAS keep their defaults, which
allow fp16 partial sums of a split K to be added in fp16. If that makes a difference, it favours them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outblas.core.config import KernelConfig, KernelKind, config_name, kernel_kind
from outblas.core.errors import DeviceError, OutblasError, RecordError, UsageError
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.core.rivals import (
    AUTO_REQUEST,
    BASELINE_NAMES,
    CLOCK,
    LT_AUTO,
    LT_EDGES,
    TORCH_FULL,
    BaselineCall,
    CallFromC,
)
from outblas.core.roofline import architecture
from outblas.judge.matmul_heuristics import nvmmh_configs
from outblas.judge.programmatic_edges import make_edges_programmatic
from outblas.judge.torch_baselines import TorchFull, TorchMm, TorchOnCurrentStream
from outblas.runtime.device import gpu_of_device

if TYPE_CHECKING:
    from outblas.judge.gpu_clock import GpuClock
    from outblas.runtime.cublas import Algo, BlasShape, Cublas, CublasLt, HeuristicResult, LtPlan


def make_baselines(
    gpu_index: int = 0, names: tuple[str, ...] = BASELINE_NAMES, current_stream: bool = False
) -> dict[str, Any]:
    """Return name -> new baseline, in the order of ``names``. Nothing is loaded before the first ``bind``.

    So a missing library or GPU is no error here; ``bind`` raises it.

    Args:
        names: some of torch, cublas, lt_heuristic, lt_auto, nvmmh (by default these five), torch_full, lt_edges and
            clock. Another name raises KeyError.
        current_stream: True makes "torch" a :class:`TorchOnCurrentStream`, False a :class:`TorchMm`.
    """
    makers: dict[str, Callable[[int], Any]] = {
        "torch": TorchOnCurrentStream if current_stream else TorchMm,
        "cublas": CublasGemm,
        "lt_heuristic": LtHeuristic,
        "lt_auto": LtAuto,
        "nvmmh": NvMatmulHeuristics,
        TORCH_FULL: TorchFull,
        CLOCK: lambda _: ClockAlone(),
    }
    made: dict[str, Any] = {name: makers[name](gpu_index) for name in names if name != LT_EDGES}
    if LT_EDGES in names:
        made[LT_EDGES] = LtEdges(made.get(LT_AUTO) or LtAuto(gpu_index))
    return {name: made[name] for name in names}


class CublasGemm:
    """Baseline "cublas": cublasGemmEx with its default algorithm. ``detail(problem)`` is "cublasGemmEx default".

    cuBLAS is loaded at the first ``bind``, which raises ToolchainMissing or DeviceError if it cannot.
    """

    name = "cublas"

    def __init__(self, gpu_index: int = 0) -> None:
        self._gpu = gpu_index
        self._workspace: Any = None
        self._cublas: Cublas | None = None

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        blas, shape, scalars, (pa, pb, pc) = self._bound(problem, a, b, c)
        return lambda stream: blas.gemm(shape, scalars, pa, pb, pc, stream)

    def bind_native(self, problem: Problem, a: Any, b: Any, c: Any, stream: int) -> CallFromC:
        """Return the call for a caller in C, on a raw stream. The arguments are those of :meth:`bind`."""
        blas, shape, scalars, (pa, pb, pc) = self._bound(problem, a, b, c)
        return blas.native(shape, scalars, pa, pb, pc, stream)

    def _bound(
        self, problem: Problem, a: Any, b: Any, c: Any
    ) -> tuple[Cublas, BlasShape, tuple[Any, Any], tuple[int, int, int]]:
        """Return the handle, and the arguments of its product: shape, scalars and addresses."""
        from outblas.runtime.cublas import BlasShape, Cublas

        if self._cublas is None:
            self._workspace = _workspace(self._gpu)
            self._cublas = Cublas(self._workspace.data_ptr())
        shape = BlasShape.of(problem)
        return self._cublas, shape, shape.scalars(), _addresses(a, b, c)

    def detail(self, problem: Problem) -> str:
        return "cublasGemmEx default"


class _Lt:
    """A handle, a workspace and the descriptors of the problem in hand."""

    def __init__(self, gpu_index: int = 0) -> None:
        self._gpu = gpu_index
        self._workspace: Any = None
        self._lt: CublasLt | None = None
        self._plans: dict[Problem, LtPlan] = {}

    def plan(self, problem: Problem) -> LtPlan:
        from outblas.runtime.cublas import CublasLt

        if self._lt is None:
            self._workspace = _workspace(self._gpu)
            self._lt = CublasLt(self._workspace.data_ptr())
        if problem not in self._plans:
            # Calls that are still bound hold their own plan, so nothing is closed here: a few
            # hundred bytes per problem.
            self._plans[problem] = self._lt.plan(problem)
        return self._plans[problem]

    def call(self, problem: Problem, algo: Algo, a: Any, b: Any, c: Any) -> BaselineCall:
        plan, (pa, pb, pc) = self.plan(problem), _addresses(a, b, c)
        return lambda stream: plan.matmul(algo, pa, pb, pc, stream)

    def native(self, problem: Problem, algo: Algo, a: Any, b: Any, c: Any, stream: int) -> CallFromC:
        pa, pb, pc = _addresses(a, b, c)
        return self.plan(problem).native(algo, pa, pb, pc, stream)


class LtHeuristic:
    """Baseline "lt_heuristic": cuBLASLt with the first algorithm of its heuristic, chosen at ``bind``.

    ``detail(problem)`` is e.g. ``"id=66 tile=20 splitk=1 ..."``; an empty string before the first ``bind``.
    """

    name = "lt_heuristic"

    def __init__(self, gpu_index: int = 0) -> None:
        self._lt = _Lt(gpu_index)
        self._algos: dict[tuple[Problem, int], HeuristicResult] = {}

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        return self._lt.call(problem, self._algorithm(problem, a, b, c), a, b, c)

    def bind_native(self, problem: Problem, a: Any, b: Any, c: Any, stream: int) -> CallFromC:
        """Return the call for a caller in C, on a raw stream. The arguments are those of :meth:`bind`."""
        return self._lt.native(problem, self._algorithm(problem, a, b, c), a, b, c, stream)

    def _algorithm(self, problem: Problem, a: Any, b: Any, c: Any) -> Algo:
        key = (problem, _alignment(a, b, c))
        if key not in self._algos:
            self._algos[key] = self._lt.plan(problem).heuristic(1, key[1])[0]
        return self._algos[key].algo

    def detail(self, problem: Problem) -> str:
        from outblas.runtime.cublas import describe

        found = next((r for (p, _), r in self._algos.items() if p == problem), None)
        return "" if found is None else describe(found.algo)


class LtAuto:
    """Baseline "lt_auto": cuBLASLt with the fastest of up to 100 algorithms by :meth:`GpuClock.quick_choice`.
    :meth:`prepare` chooses, once per problem; ``bind`` does so if nobody has. ``detail(problem)`` describes the choice,
    e.g. ``"index=3/100 id=66 tile=20 ..."``; it is an empty string before.
    """

    name = "lt_auto"

    def __init__(self, gpu_index: int = 0) -> None:
        self._gpu = gpu_index
        self._lt = _Lt(gpu_index)
        self._chosen: dict[Problem, tuple[Algo, str]] = {}
        self._cache: AlgorithmCache | None = None

    def use_cache(self, cache: AlgorithmCache) -> None:
        """Take the choices that a cache holds, and add to it each one that :meth:`prepare` makes from now on.

        Args:
            cache: an open cache of the same cuBLASLt and GPU. A choice for a known problem replaces the known one.
        """
        for problem, algo, detail in cache:
            self.set_algorithm(problem, algo, detail)
        self._cache = cache

    def prepare(self, bench: GpuClock) -> None:
        """Choose the algorithm of ``bench.problem`` on the bench's own operands. A known choice is kept.

        An algorithm that fails to run is passed over. :meth:`choice` returns the result.

        Raises:
            DeviceError: none of them runs.
        """
        from outblas.runtime.cublas import describe

        problem = bench.problem
        if problem in self._chosen:
            return
        a, b, c = bench.operands(0)
        results = self._lt.plan(problem).heuristic(AUTO_REQUEST, _alignment(a, b, c))
        entries = {str(i): _LtAlgo(self._lt, r.algo) for i, r in enumerate(results)}
        times = bench.quick_choice(entries, skip=DeviceError) if len(entries) > 1 else {}
        if len(entries) > 1 and not times:
            raise DeviceError(
                f"none of the {len(entries)} cuBLASLt algorithms runs {problem.key}", "at least one", "check the driver"
            )
        best = min(times, key=lambda i: times[i].median_us) if times else "0"
        algo = results[int(best)].algo
        self._chosen[problem] = (algo, f"index={best}/{len(results)} {describe(algo)}")
        if self._cache is not None:
            with contextlib.suppress(RecordError):  # what the disk refuses is chosen again, by the next process
                self._cache.add(problem, *self.choice(problem))

    def choice(self, problem: Problem) -> tuple[bytes, str]:
        """Return (the 64 bytes of the chosen algorithm, its description).

        Raises:
            KeyError: nothing was chosen yet for the problem.
        """
        algo, detail = self._chosen[problem]
        return bytes(algo), detail

    def set_algorithm(self, problem: Problem, algo: bytes, detail: str) -> None:
        """Take the :meth:`choice` of another process, of the same cuBLASLt and GPU. It replaces an earlier choice.

        ``algo`` has 64 bytes; fewer raise ValueError. :meth:`choice` returns ``detail`` unchanged.
        """
        from outblas.runtime.cublas import Algo

        self._chosen[problem] = (Algo.from_buffer_copy(algo), detail)

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        if problem not in self._chosen:
            from outblas.judge.gpu_clock import GpuClock

            with GpuClock(problem, self._gpu, gpu=gpu_of_device(self._gpu)) as bench:
                self.prepare(bench)
        return self._lt.call(problem, self._chosen[problem][0], a, b, c)

    def bind_native(self, problem: Problem, a: Any, b: Any, c: Any, stream: int) -> CallFromC:
        """Return the call for a caller in C, on a raw stream, of a problem that was bound before.

        The arguments are those of :meth:`bind`.
        """
        return self._lt.native(problem, self._chosen[problem][0], a, b, c, stream)

    def detail(self, problem: Problem) -> str:
        return self._chosen[problem][1] if problem in self._chosen else ""


class ClockAlone:
    """An entry that enqueues nothing, so its time is what the clock itself adds to every figure."""

    name = CLOCK

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        return lambda stream: None

    def detail(self, problem: Problem) -> str:
        """Return ``""``: nothing runs."""
        return ""


class LtEdges:
    """Autotuned cuBLASLt, its captured nodes joined by programmatic edges (outblas.judge.programmatic_edges).

    cuBLASLt has no public option for it, and its kernels do not wait for their predecessor's writes. So its results may
    be wrong, and nothing may run it but a bench.
    """

    name = LT_EDGES

    def __init__(self, auto: LtAuto) -> None:
        self._auto = auto

    def prepare(self, bench: GpuClock) -> None:
        """Choose the algorithm as ``auto.prepare(bench)`` does, once per problem; return None.

        Raises:
            DeviceError: no algorithm runs.
        """
        self._auto.prepare(bench)

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        return self._auto.bind(problem, a, b, c)

    def change_graph(self, graph: Any) -> None:
        """Make the edges between kernels of a captured graph programmatic, in place; return None."""
        make_edges_programmatic(graph)

    def detail(self, problem: Problem) -> str:
        return self._auto.detail(problem)


class _LtAlgo:
    """A single algorithm of cuBLASLt as an entry for the clock."""

    def __init__(self, lt: _Lt, algo: Algo) -> None:
        self.name, self._lt, self._algo = "lt", lt, algo

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        return self._lt.call(problem, self._algo, a, b, c)


class LtAnswers:
    """All answers of cuBLASLt's heuristic, to be timed beside each other."""

    def __init__(self, gpu_index: int = 0) -> None:
        self._lt = _Lt(gpu_index)

    def times(self, clock: GpuClock) -> dict[str, float]:
        """Return description -> microseconds of each answer that runs, in the heuristic's order."""
        from outblas.runtime.cublas import describe

        problem = clock.problem
        results = self._lt.plan(problem).heuristic(AUTO_REQUEST, _alignment(*clock.operands(0)))
        entries = {describe(result.algo): _LtAlgo(self._lt, result.algo) for result in results}
        times = clock.quick_choice(entries, skip=DeviceError)
        return {answer: times[answer].median_us for answer in entries if answer in times}


def _workspace(gpu_index: int) -> Any:
    import torch

    from outblas.runtime.cublas import WORKSPACE_BYTES

    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{gpu_index}")


def _addresses(a: Any, b: Any, c: Any) -> tuple[int, int, int]:
    return a.data_ptr(), b.data_ptr(), c.data_ptr()


def _alignment(*tensors: Any) -> int:
    """Largest power of two up to 256 that divides every address, bytes."""
    return math.gcd(256, *(t.data_ptr() for t in tensors))


class NvMatmulHeuristics:
    """Baseline "nvmmh": nvMatmulHeuristics' first choice, built with our own family.

    :mod:`outblas.judge.matmul_heuristics` makes the choice. ``detail(problem)`` is the name of the config; an empty
    string if no config is legal. ``bind`` loads into the current CUDA context, whatever ``gpu_index`` is.
    """

    name = "nvmmh"

    def __init__(self, gpu_index: int = 0) -> None:
        self._gpu = gpu_index
        self._loaded: dict[KernelKind, Any] = {}
        self._configs: dict[Problem, KernelConfig | None] = {}

    def set_configs(self, configs: dict[Problem, KernelConfig | None]) -> None:
        """Take choices made beforehand in one batch, by :func:`outblas.judge.matmul_heuristics.nvmmh_configs`.

        Args:
            configs: problem -> config, or None if the problem has no legal config. They replace earlier ones.
        """
        self._configs.update(configs)

    def bind(self, problem: Problem, a: Any, b: Any, c: Any) -> BaselineCall:
        """Return a call, ``call(stream)``, of the kernel that nvMatmulHeuristics proposes, on these operands.

        The kernel is compiled on first use. A, B and C are as for :meth:`outblas.core.rivals.Bindable.bind`.

        Raises:
            DeviceError: no proposal can be built by the GEMM family for this problem.
            CompileError: the kernel does not compile.
            ToolchainMissing: a compiler or the package is not installed.
        """
        from outblas.kernels.source import make_source
        from outblas.runtime.launch import load
        from outblas.runtime.nvrtc import compile_source

        config = self._config(problem)
        if config is None:
            raise DeviceError(
                f"OutBLAS has no legal kernel for the nvMatmulHeuristics choice on {problem.key}",
                "a tile that an OutBLAS kernel family supports",
                "omit this baseline",
            )
        key = kernel_kind(problem, config)
        if key not in self._loaded:
            self._loaded[key] = load(
                compile_source(make_source(problem, config), architecture(gpu_of_device(self._gpu))), config
            )
        return self._loaded[key].bind(problem, a, b, c)

    def detail(self, problem: Problem) -> str:
        config = self._config(problem)
        return "" if config is None else config_name(config)

    def _config(self, problem: Problem) -> KernelConfig | None:
        if problem not in self._configs:
            self._configs.update(nvmmh_configs([problem], gpu_of_device(self._gpu)))
        return self._configs[problem]


#: Size of a cublasLtMatmulAlgo_t (outblas.runtime.cublas.Algo).
ALGORITHM_BYTES = 64


class AlgorithmCache:
    """A file of chosen cuBLASLt algorithms. Iterate over it for (problem, algorithm, description), in order of adding.

    An algorithm is an opaque value of one cuBLASLt version on one kind of GPU. So a file that is damaged, or about
    another version or GPU, is begun anew: its choices are deleted without an error. It is not locked: a replacement
    need not wait until a hung worker ends.

    Args:
        about: the version and GPU for which the choices hold, as JSON values. Another ``about`` empties the file.

    Raises:
        RecordError: the file cannot be read or written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        try:
            self._journal = Journal(path, about, sole=False)
        except (UsageError, RecordError):
            self._journal = Journal(path, about, resume=False, sole=False)
        try:
            list(self)
        except (OutblasError, AttributeError, KeyError, TypeError, ValueError):
            self._journal.close()
            self._journal = Journal(path, about, resume=False, sole=False)

    def __iter__(self) -> Iterator[tuple[Problem, bytes, str]]:
        """(problem, algorithm, its description), as :meth:`LtAuto.set_algorithm` takes them."""
        for entry in self._journal.entries:
            problem, algorithm, detail = (entry[name] for name in ("problem", "algorithm", "detail"))
            if len(algorithm) != 2 * ALGORITHM_BYTES or not isinstance(detail, str):
                raise ValueError(f"not an algorithm of {ALGORITHM_BYTES} bytes and its description")
            yield Problem.from_key(problem), bytes.fromhex(algorithm), detail

    def add(self, problem: Problem, algorithm: bytes, detail: str) -> None:
        """Append one choice to the file. A second choice for a problem is appended, too; both are iterated over.

        Args:
            algorithm: the 64 bytes of the cublasLtMatmulAlgo_t.

        Raises:
            UsageError: the algorithm has another length. Nothing is written.
            RecordError: the disk refuses.
        """
        if len(algorithm) != ALGORITHM_BYTES:  # one such line would empty the file when it is next opened
            raise UsageError(
                f"the algorithm has {len(algorithm)} bytes", f"{ALGORITHM_BYTES} bytes", "pass a cublasLtMatmulAlgo_t"
            )
        self._journal.append({"problem": problem.key, "algorithm": algorithm.hex(), "detail": detail})

    @classmethod
    def of_gpu(cls, path: Path, gpu_index: int) -> AlgorithmCache:
        """Open the file for the loaded cuBLASLt and one GPU with its driver.

        Choices of another cuBLASLt version, GPU name or driver version are deleted.

        Raises:
            ToolchainMissing: cuBLASLt is not installed.
            RecordError: the file cannot be read or written.
        """
        from outblas.records.provenance import gpu_and_driver
        from outblas.runtime.cublas import version

        gpu, driver = gpu_and_driver(gpu_index)
        return cls(path, {"cublaslt": version(), "gpu": gpu, "driver": driver})
