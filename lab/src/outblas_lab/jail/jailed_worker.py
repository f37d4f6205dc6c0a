"""The jailed worker of free kernels: the handler of outblas.workers.handler, with a proof and checks of their own.

It compiles nothing, for its jail starts no program: kernels come built. It lives for one batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from outblas.core.errors import OutblasError, ProblemError, UsageError
from outblas.core.evaluation import GateFailed, Status, Timing, Verdict
from outblas.core.problem import Problem
from outblas.core.rivals import Bindable
from outblas.core.roofline import Gpu
from outblas.judge.bench_cell import Baselines, BenchCell, Options
from outblas.judge.programmatic_edges import count_programmatic_edges
from outblas.judge.rounds import Prune
from outblas.judge.rules import check_nodes
from outblas.runtime.driver import capture_graph, driver
from outblas.workers.handler import Handler, ProvenCandidate, WorkItem
from outblas.workers.sandbox import Emit
from outblas_lab.custom.contract import LaunchBlock
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.build import BuiltKernel
from outblas_lab.jail.confinement import Jail, scrub_environment
from outblas_lab.jail.free_launch import load
from outblas_lab.jail.judged_clock import JudgedClock, JudgedEntry
from outblas_lab.jail.plausibility import least_us, why_too_fast


@dataclass(frozen=True)
class JailedCell:
    """The place where a worker is confined.

    Attributes:
        cudart: path of the CUDA run-time library of host-form kernels; None: none is expected.
        jailed: False in tests only.
    """

    folder: str
    cudart: str | None = None
    jailed: bool = True


def import_ahead() -> None:
    """Prepare a worker that waits for its turn: scrub its environment, then import torch, which takes seconds.

    This module has imported the judge. CUDA stays untouched, because another worker may be timing on the GPU.
    """
    scrub_environment()
    import torch  # noqa: F401


def start_libraries(gpu_index: int, entries: Iterable[Bindable]) -> None:
    """Start CUDA, torch and the libraries of some entries on a GPU, for a process that is confined afterwards.

    An entry that fails is ignored.
    """
    import torch

    from outblas.judge.gates import reference_blas

    torch.cuda.set_device(gpu_index)
    x, y, z = (torch.ones((16, 16), dtype=torch.float16, device=f"cuda:{gpu_index}") for _ in range(3))
    stream = int(torch.cuda.current_stream(gpu_index).cuda_stream)
    for entry in (reference_blas(gpu_index), *entries):
        with contextlib.suppress(OutblasError):  # one that cannot is left out where it is asked for, with the reason
            entry.bind(Problem(16, 16, 16), x, y, z)(stream)
    torch.cuda.synchronize(gpu_index)


def make_handler(
    options: Options, cell: JailedCell, handler_of: Callable[[Options, JailedCell], FreeHandler] | None = None
) -> FreeHandler:
    """Return the handler of a jailed worker. With ``cell.jailed`` this process is confined, for good, when it returns.

    CUDA and torch are started before the files are confined, so that a GPU is needed.

    Args:
        handler_of: makes the handler; None: :class:`FreeHandler`.
    """
    jail = Jail(cell.folder, tuple(os.path.dirname(path) for path in (cell.cudart,) if path))
    if cell.jailed:
        _no_words()
        jail.environment()
    handler = (handler_of or FreeHandler)(options, cell)
    handler.warm()  # CUDA does not start behind landlock on every machine (error 304)
    if cell.jailed:
        jail.files()
        jail.calls()
    return handler


class FreeHandler(Handler):
    """The handler for items whose configs are free kernels and whose ``built`` has the compiled kernel.

    It is called as :class:`outblas.workers.handler.Handler`. An item with another config gets the status ILLEGAL.
    """

    def __init__(self, options: Options, cell: JailedCell) -> None:
        super().__init__(options)
        self._cell = cell
        self._before: dict[str, dict[str, object]] = {}

    def warm(self) -> None:
        """Start CUDA, torch and the baselines' libraries: later calls need only memory and the GPU.

        A baseline that fails is ignored.
        """
        ready = [entry for name, entry in self._baselines.items() if name not in ("lt_auto", "nvmmh")]
        start_libraries(self._options.gpu_index, ready)

    def _why_illegal(self, problem: Any, config: Any) -> str | None:
        if not isinstance(config, FreeKernel):
            return "this worker runs only free kernels"
        return config.launch.why_not(problem, self._options.gpu)

    def _kernel_of(self, item: WorkItem) -> tuple[Any, dict[str, float]]:
        assert item.built is not None
        built: BuiltKernel = item.built
        name = built.kernel.name
        self._before[name] = snapshot() if built.kernel.launch.form == "host" else {}
        kernel = load(built, self._cell.folder, self._cell.cudart, self._options.gpu)
        return kernel, built.counters()

    def _prove(
        self, bench_cell: BenchCell, kernel: Bindable, config: Any, proved: bool, emit: Emit, index: int
    ) -> Verdict:
        """In full on the problem, or a small sister, and all its neighbours."""
        from outblas.judge.gates import prove
        from outblas.judge.trials import ProofTrials

        worst, gates = 0.0, tuple[str, ...]()
        if self._options.level == "full" and not proved:
            allowed = free_proof_shapes(bench_cell.problem, config.launch, self._options.gpu)
            for small in allowed or [bench_cell.problem]:
                emit.begin(index)  # a sign of life: each proof has the time limit to itself
                verdict = self._guarded(
                    kernel, prove(kernel, small, None, "full", self._options.gpu_index, trials=ProofTrials.secret())
                )
                if verdict.status is not Status.PASSED:
                    return replace(verdict, detail=f"on {small.mnk}: {verdict.detail}")
                worst, gates = max(worst, verdict.max_err_ratio or 0.0), verdict.gates
            emit.begin(index)
        if config.launch.form == "host":
            call = kernel.bind(bench_cell.problem, *bench_cell.bench.operands(0))
            call(bench_cell.bench.stream)
            try:
                check_launches(call, bench_cell.bench.stream)
            except GateFailed as failure:
                return Verdict(failure.status, gates, failure.detail)
        return self._guarded(kernel, Verdict(Status.PASSED, gates or ("static",), "", worst))

    def _guarded(self, kernel: Any, verdict: Verdict) -> Verdict:
        """A verdict, unless the workspace's guards or the process say otherwise."""
        if verdict.status is not Status.PASSED:
            return verdict
        if kernel.broken_workspace():
            return Verdict(Status.MEMORY_VIOLATION, ("static",), "the canary around the workspace was overwritten")
        kernel.release()
        offence = what_changed(self._before[kernel.name]) if self._before.get(kernel.name) else ""
        return Verdict(Status.RULE_BROKEN, verdict.gates, offence) if offence else verdict

    def _ready(self, bench_cell: BenchCell, kernel: Any) -> JudgedEntry:
        return JudgedEntry(kernel)

    def _measure(self, bench_cell: BenchCell, graphs: dict[str, Any], prune: Prune) -> dict[str, Timing]:
        """In replays that are judged one by one."""
        from outblas_lab.jail.fresh_operands import FreshOperands

        if self._options.mode != "offline":
            raise UsageError(
                f"mode {self._options.mode} does not support free kernels",
                "mode offline, in which each replay is judged",
                "use mode offline",
            )
        bench, options = bench_cell.bench, self._options
        operands = FreshOperands(bench.problem, bench.repeats, f"cuda:{bench.gpu_index}")
        rounds = max(bench_cell.usual_rounds(options), options.near_rounds)
        return JudgedClock(bench, operands).measure(bench_cell.entries, graphs, options, rounds, prune)

    def _again(
        self, bench_cell: BenchCell, candidate: ProvenCandidate, timing: Timing, baselines: Baselines
    ) -> Verdict:
        """Judge by its replays, then by its time against the least plausible one."""
        entry = candidate.graph
        if entry.failure is not None:
            return cast(Verdict, entry.failure)
        new = Verdict(Status.PASSED, ("fresh",), "", entry.max_err_ratio)
        held = self._guarded(entry.kernel, new)
        if held.status is not Status.PASSED:
            return held
        known = {name: t.median_us for name, t in baselines.timings.items()}
        least = least_us(bench_cell.problem, self._options.gpu)
        if suspicion := why_too_fast(timing.median_us, known, least):
            return Verdict(Status.RULE_BROKEN, (), suspicion)
        return replace(new, detail=f"within noise of the floor of {least:.3f} us" if timing.median_us < least else "")


def _no_words() -> None:
    """Redirect the candidate's stdout and stderr to /dev/null: untrusted output may contain terminal escapes."""
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    os.close(null)


#: Files whose machine code measures or judges, by a part of their name.
_WATCHED = re.compile(r"libcuda\.so|cuda/bindings/.*\.so|\[vdso\]|/libc\.so|/libc-|libpython|/python3")
#: Descriptors that CUDA opens when it likes.
_OWN_FILES = re.compile(r"/dev/(?:nvidia|null|zero|urandom)|/memfd:|/usr/|/sys/|/proc/driver|\.so")
_MOST_BYTES = 256 << 20


def snapshot() -> dict[str, object]:
    """Return the present state of this process that a candidate must not change. Pass it to :func:`what_changed` later.

    Returns:
        A new dictionary of four entries, deed -> state: ``set a timer``, ``handles signals``, ``opened files`` and
        ``changed the code that measures it``. ``opened files`` is a frozenset of paths.
    """
    return {
        "set a timer": tuple(signal.getitimer(which)[0] > 0 for which in (0, 1, 2)),
        "handles signals": _status("SigCgt"),
        "opened files": _files(),
        "changed the code that measures it": _code(),
    }


def what_changed(before: Mapping[str, object]) -> str:
    """Return the first deed since an earlier :func:`snapshot`, in words; "" if nothing changed.

    Example: ``"it opened files (/tmp/x)"`` or ``"it set a timer"``. Only one deed is named. Files that were closed
    since do not count.
    """
    for what, state in snapshot().items():
        was = before[what]
        if what == "opened files":
            more = sorted(state - was)  # type: ignore[operator]
            if more:
                return f"it {what} ({more[0]})"
        elif what == "changed the code that measures it":
            changed = [name for name, crc in state.items() if was.get(name, crc) != crc]  # type: ignore[attr-defined]
            if changed:
                return f"it {what} ({os.path.basename(changed[0][0])})"
        elif state != was:
            return f"it {what}"
    return ""


def _status(key: str) -> str:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next((line.split()[1] for line in file if line.startswith(f"{key}:")), "")
    except OSError:
        return ""


def _files() -> frozenset[str]:
    """Targets of the open descriptors, but for those of CUDA."""
    found = []
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
        if target.startswith("/") and not _OWN_FILES.search(target) and f"/proc/{os.getpid()}/fd" not in target:
            found.append(target)
    return frozenset(found)


def _code() -> dict[tuple[str, int], tuple[str, int]]:
    """(file, offset in it) of every executable mapping that is watched -> (its rights, checksum)."""
    found: dict[tuple[str, int], tuple[str, int]] = {}
    total = 0
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return found
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or "x" not in parts[1] or not _WATCHED.search(parts[5]):
            continue
        begin, end = (int(x, 16) for x in parts[0].split("-"))
        total += end - begin
        if "r" not in parts[1] or total > _MOST_BYTES:
            continue
        code = (ctypes.c_char * (end - begin)).from_address(begin)
        found[parts[5].strip(), int(parts[2], 16)] = (parts[1], zlib.crc32(memoryview(code)))
    return found


#: A full proof's references cost some 40 products in fp64: larger problems are proved on a smaller sister, FLOP.
MAX_FLOPS = 2 * 1024**3
#: Problems proved in full at most.
MAX_PROBLEMS = 14
#: Shapes that expose a kernel for the requested shape alone, if its contract allows them. They are ragged, less than
#: one tile, long in K, N = K (products can be chained), or have rows that are not whole 16 bytes.
_ALWAYS = (
    (256, 256, 256), (1, 8, 8), (129, 136, 264), (127, 1001, 333), (16, 64, 4104), (33, 520, 72), (300, 257, 129),
    (512, 384, 1024),
)  # fmt: skip


def free_proof_shapes(problem: Problem, launch: LaunchBlock, gpu: Gpu) -> list[Problem]:
    """Return up to 14 different problems on which a free kernel is proved in full; empty if the block allows none.

    All have the layout, dtype and accumulator of ``problem``, at most 2 * 1024**3 FLOP, and are allowed by the launch
    block. The first is ``problem`` itself. If that has more FLOP, it is the sister whose largest extents were halved.
    Example: for 4096 x 4096 x 4096 the first is 1024 x 1024 x 1024.
    """
    found: dict[Problem, None] = {}
    for shape in _shapes(problem):
        if len(found) == MAX_PROBLEMS:
            break
        try:
            each = Problem(*shape, problem.layout, problem.dtype, problem.acc)
        except ProblemError:
            continue
        if each.flops <= MAX_FLOPS and launch.why_not(each, gpu) is None:
            found[each] = None
    return list(found)


def _shapes(problem: Problem) -> Iterator[tuple[int, int, int]]:
    extents = [problem.m, problem.n, problem.k]
    while 2 * extents[0] * extents[1] * extents[2] > MAX_FLOPS:  # a full proof is of a smaller sister then
        extents[extents.index(max(extents))] //= 2
    m, n, k = extents
    yield m, n, k
    for step in (1, 8, 64):  # neighbours of each extent, the others kept
        yield from ((m - step, n, k), (m, n + step, k), (m, n, k + step))
    yield from _ALWAYS
    yield from ((m + 1, n + 8, k + 8), (m + 64, n + 64, k + 64), (2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k))
    yield from ((128 * i, 128 * j, 64 * i * j) for i in (1, 3) for j in (1, 2))
    while max(m, n, k) > 16:  # for kernels that allow little: ever smaller ones
        m, n, k = (max(8, x // 2) if x > 16 else x for x in (m, n, k))
        yield m, n, k


def check_launches(call: Callable[[int], Any], stream: int) -> None:
    """Check what one call, and two in a row, put into a captured graph; nothing runs.

    A call waits for the work before it. Programmatic launches are for callers to allow, and are right only if the
    kernel waits before it reads. The chains of the proof can show that only if N equals K.

    Args:
        call: the bound call, which has run once.
        stream: raw CUstream on which it is captured.

    Raises:
        GateFailed: RULE_BROKEN: it launches anything but kernels and memsets, sets an L2 policy, works on several
            streams, or does not wait for its predecessor.
        DeviceError: it cannot be captured.
    """
    once, twice = _programmatic([call], stream, check_nodes), _programmatic([call, call], stream)
    if twice > 2 * once:
        raise GateFailed(
            Status.RULE_BROKEN, "it starts before the preceding work has ended (programmatic dependent launch)"
        )


def _programmatic(
    calls: Sequence[Callable[[int], Any]], stream: int, check: Callable[[Any], None] | None = None
) -> int:
    """The programmatic edges of some captured calls, whose graph ``check`` is given, too."""
    graph = capture_graph(calls, stream)
    try:
        if check is not None:
            check(graph)
        return count_programmatic_edges(graph)
    finally:
        driver().cuGraphDestroy(graph)
