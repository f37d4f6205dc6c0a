"""Choose kernels, or algorithms of cuBLASLt, for problems that the packaged library does not have."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from outblas.core.background import BackgroundQueue
from outblas.core.config import KernelConfig, Launch
from outblas.core.errors import OutblasError
from outblas.core.gpu_records import data_of_architecture, packaged_records
from outblas.core.problem import Dtype, Layout, Problem
from outblas.core.roofline import Gpu
from outblas.core.switches import is_off
from outblas.dispatch.decide import Choose, LeftToTorch, NotWhileCapturing
from outblas.kernels.legality import why_illegal
from outblas.kernels.same_object import SameObject
from outblas.records.library import Library
from outblas.records.library_row import AnswerChoice, LibraryChoice
from outblas.runtime.cublaslt import LtAlgorithms

#: Set to ``0``, it leaves such problems to torch.
ANY_SHAPE_VARIABLE = "OUTBLAS_ANY_SHAPE"
#: Number of cached choices: the same problem returns with other addresses, outputs and launch options.
MAX_CACHED_CHOICES = 4096
#: Folders of the fitted data of kernels and of algorithms.
_FITTED = ("any_shape", "answers")
#: Folders of the package's other data on which choices depend: the ranking model and the kernels on offer.
_OTHER_DATA = ("models", "libraries")
#: M up to which a call waits for a choice, in any case: engines capture graphs up to there. Of larger M it waits for
#: this many classes of a weight.
WAITED_M, WAITED_CLASSES = 512, 8
#: (M, step): up to this M, a class of M has this width; beyond the last one it has :data:`_WIDEST`.
_CLASSES, _WIDEST = ((16, 1), (256, 8), (512, 16), (2048, 64), (4096, 128)), 256
_QUEUE = BackgroundQueue("outblas-choices")
_LOG = logging.getLogger(__name__)
#: Returns the answers of cuBLASLt's heuristic for a problem, the first in front; empty without cuBLASLt. It raises
#: :class:`outblas.dispatch.decide.NotWhileCapturing` if it must wait for the end of a capture.
Ask = Callable[[Problem], Sequence[str]]


def any_shape_chooser(gpu_name: str, library: Library, ask: Ask | None = None) -> AnyShapeChooser | None:
    """Return the chooser for a GPU.

    Return None if the package has no data for this GPU, or if ``OUTBLAS_ANY_SHAPE`` is 0, false, no or off.

    Args:
        gpu_name: name in this package (:attr:`outblas.core.roofline.Gpu.name`), e.g. ``"h200"``; not torch's device
            name.
        library: the packaged library. Its kernels are on offer for the layouts and dtypes in which it installs them,
            so that their machine code ships.
        ask: see :data:`Ask`; None: choose kernels alone, without an answer.
    """
    if is_off(ANY_SHAPE_VARIABLE) or any(data_of_architecture(gpu_name, folder) is None for folder in _FITTED):
        return None
    return AnyShapeChooser(gpu_name, library, ask)


class AnyShapeChooser:
    """Chooses for a problem of no library, by data that it reads at its first call. It is a :data:`Choose`.

    It chooses a kernel by :mod:`outblas.predict.any_shape`, or an algorithm by :mod:`outblas.predict.answer_choice` if
    its lower bound is higher. If the data cannot be read or numpy cannot be imported, it warns once and returns None
    from then on. The arguments are those of :func:`any_shape_chooser`.

    Attributes:
        by_class: chooses for whole classes of M by this chooser.
    """

    def __init__(self, gpu_name: str, library: Library, ask: Ask | None) -> None:
        self._gpu_name, self._library, self._ask = gpu_name, library, ask
        self._is_broken = False
        self._cached = functools.lru_cache(MAX_CACHED_CHOICES)(self._choose)
        self.by_class = ClassChooser(self)

    def __call__(self, problem: Problem, gpu: Gpu, launch: Launch) -> LibraryChoice | AnswerChoice | None:
        return self._cached(problem, gpu, launch)

    def _choose(self, problem: Problem, gpu: Gpu, launch: Launch) -> LibraryChoice | AnswerChoice | None:
        if self._is_broken:
            return None
        try:
            from outblas.predict.answer_choice import AnswerModel  # with numpy
            from outblas.predict.any_shape import AnyShapeModel, is_narrow

            kernels, algorithms = AnyShapeModel.load(self._gpu_name), AnswerModel.load(self._gpu_name)
        except (OutblasError, ImportError, OSError) as error:
            self._is_broken = True
            warnings.warn(f"outblas uses torch for shapes outside the library: {error}", RuntimeWarning, stacklevel=3)
            return None
        gpu = _fitted_gpu(gpu)
        answers = () if self._ask is None or is_narrow(problem) else self._ask(problem)
        offered = offered_kernels(self._gpu_name, self._library, problem.layout, problem.dtype, launch)
        kernel = kernels.choose(problem, gpu, offered, answers[0] if answers else "")
        algorithm = algorithms.choose(problem, gpu, answers)
        if kernel is None or algorithm is None:
            return kernel or algorithm
        return kernel if kernel.low >= algorithm.low else algorithm


def class_of_rows(m: int) -> int:
    """Return the M whose choice holds for ``m``: of its class the smallest one; multiples of the width have their own.

    Tiles of a class are equally many, but odd M are predicted to be slower. Example: 17 stands for 17 to 23, 24 for
    itself, and 3,969 for 3,969 to 4,095.
    """
    step = class_width(m)
    return m if m % step == 0 else m - (m - 1) % step


def class_width(m: int) -> int:
    """Return the number of M in the class of ``m``: 1 up to 16, 8 up to 256, 16 up to 512, and more beyond."""
    return next((step for most, step in _CLASSES if m <= most), _WIDEST)


class ClassChooser:
    """Chooses for a class of M at once, for calls of programs that bring ever new M, such as a server's prompts.

    A choice takes milliseconds. So a call waits for a class of small M, which graphs are captured for, and for the
    first classes of a weight. Later ones are chosen on a thread of their own, and torch computes meanwhile.
    """

    def __init__(self, choose: Choose) -> None:
        self._choose, self._lock = choose, threading.RLock()
        self._known: dict[tuple[Problem, Launch], LibraryChoice | AnswerChoice | None] = {}
        self._under_way: set[tuple[Problem, Launch]] = set()
        self._waited: dict[tuple[Problem, Launch], int] = {}
        self._failures, self._first_failure = 0, ""

    def __call__(self, problem: Problem, gpu: Gpu, launch: Launch) -> LibraryChoice | AnswerChoice | None:
        """Return the choice of the problem's class; None for torch.

        Raises:
            LeftToTorch: the choice is being made, or failed.
            NotWhileCapturing: as :data:`Ask`.
        """
        key = replace(problem, m=class_of_rows(problem.m)), launch
        with self._lock:
            is_known, choice = key in self._known, self._known.get(key)
            if not is_known and not self._waits(key):
                self._begin(key, gpu)
                raise LeftToTorch("its kernel is still being chosen", provisional=True)
        if not is_known:
            choice = self._chosen(key, gpu)
        if isinstance(choice, LibraryChoice) and why_illegal(problem, choice.config, gpu) is not None:
            return None
        return choice

    @property
    def failed(self) -> str:
        """The number of choices that failed, and the first error, in one line; empty if none did."""
        return f"{self._failures} choices failed, the first one: {self._first_failure}" if self._failures else ""

    def _waits(self, key: tuple[Problem, Launch]) -> bool:
        problem, launch = key
        if problem.m <= WAITED_M:
            return True
        weight = replace(problem, m=1), launch
        if len(self._waited) >= MAX_CACHED_CHOICES and weight not in self._waited:
            self._waited.clear()
        self._waited[weight] = self._waited.get(weight, 0) + (key not in self._under_way)
        return self._waited[weight] <= WAITED_CLASSES

    def _chosen(self, key: tuple[Problem, Launch], gpu: Gpu) -> LibraryChoice | AnswerChoice | None:
        """Choose for a class and keep the choice. Other threads' calls go on meanwhile.

        Raises:
            LeftToTorch: as for a call.
        """
        try:
            choice = self._choose(key[0], gpu, key[1])
        except LeftToTorch:
            raise
        except Exception as error:
            raise LeftToTorch(self._note_failure(key[0], error)) from error
        with self._lock:
            if len(self._known) >= MAX_CACHED_CHOICES:
                self._known.clear()
            self._known[key] = choice
        return choice

    def _note_failure(self, problem: Problem, error: Exception) -> str:
        """Count a failed choice, and log the first one; return it in one line."""
        words = " ".join(f"its choice failed with {type(error).__name__}: {error}".split())
        with self._lock:
            self._failures += 1
            is_first = self._failures == 1
            if is_first:
                self._first_failure = f"{problem.key}, {words}"
        if is_first:
            _LOG.warning("outblas uses torch for %s: %s; later failures are only counted", problem.key, words)
        return words

    def _begin(self, key: tuple[Problem, Launch], gpu: Gpu) -> None:
        if key in self._under_way:
            return
        self._under_way.add(key)
        if _QUEUE.submit(self._later, key, gpu) is None:
            self._under_way.discard(key)

    def _later(self, key: tuple[Problem, Launch], gpu: Gpu) -> None:
        """Choose on the queue's thread. A choice that cannot be made now is made at a later call."""
        try:
            self._chosen(key, gpu)
        except LeftToTorch as error:
            _LOG.info("outblas uses torch for %s for now: %s", key[0].key, error)
        finally:
            with self._lock:
                self._under_way.discard(key)


def predicted_kernels(
    gpu: Gpu, library: Library, problem: Problem, launch: Launch, answer: str, deviations: float
) -> tuple[LibraryChoice, ...]:
    """Return the legal kernels on offer for a problem, by predicted speed-up over torch.matmul, which may be below 1.

    Those come first whose speed-up is highest with some standard deviations added. Bounds are one deviation away.

    Args:
        answer: first answer of cuBLASLt's heuristic; empty: unknown.
        deviations: 1: first those that may well be fastest; -1: first those with the highest lower bound.

    Raises:
        UsageError: the package has no data for the GPU.
        RecordError: the data are damaged.
    """
    import numpy as np

    from outblas.predict.any_shape import AnyShapeModel

    offered = offered_kernels(gpu.name, library, problem.layout, problem.dtype, launch)
    configs, gain, deviation = AnyShapeModel.load(gpu.name).predict(problem, _fitted_gpu(gpu), offered, answer)
    figures = np.exp(np.stack([gain, gain - deviation, gain + deviation])).T.tolist()
    order = (-gain - deviations * deviation).argsort(kind="stable").tolist()
    return tuple(LibraryChoice(configs[i], *figures[i]) for i in order)


def promising_answers(gpu: Gpu, problem: Problem, answers: Sequence[str]) -> list[str]:
    """Return the answers of cuBLASLt's heuristic but the first, those that may well be fastest in front.

    They are in the order of the predicted speed-up plus one standard deviation. Those that round partial sums are left
    out.

    Args:
        answers: descriptions of all answers, the first in front.

    Raises:
        UsageError: the package has no data for the GPU.
        RecordError: the data are damaged.
    """
    from outblas.predict.answer_choice import AnswerModel

    others, gain, deviation = AnswerModel.load(gpu.name).predict(problem, _fitted_gpu(gpu), answers)
    return [answers[others[i]] for i in (-gain - deviation).argsort(kind="stable").tolist()]


def _fitted_gpu(gpu: Gpu) -> Gpu:
    """The packaged record, with which the bounds were fitted; a calibration would move them."""
    fitted = packaged_records().get(gpu.name)
    return gpu if fitted is None else fitted.gpu


def offered_kernels(
    gpu_name: str, library: Library, layout: Layout, dtype: Dtype, launch: Launch
) -> tuple[KernelConfig, ...]:
    """Return the kernels on offer for unlisted shapes: those for any shape, then those that a library installs.

    Equal requests with the same library object return the same tuple, as long as few others come between.

    Args:
        gpu_name: name of a GPU with packaged data, e.g. ``h200``.
        launch: launch option of the calls; kernels that need more are left out.

    Raises:
        UsageError: the package has no data for the GPU.
        RecordError: the data are damaged.
    """
    return _offered(gpu_name, SameObject(library), layout, dtype, launch)


@functools.lru_cache(maxsize=32)
def _offered(
    gpu_name: str, library: SameObject, layout: Layout, dtype: Dtype, launch: Launch
) -> tuple[KernelConfig, ...]:
    from outblas.predict.any_shape import AnyShapeModel

    installed = library.value.fp32_kernels.get((layout, dtype), ())
    return _one_object(AnyShapeModel.load(gpu_name).offered(launch, installed))


@functools.lru_cache(maxsize=32)
def _one_object(configs: tuple[KernelConfig, ...]) -> tuple[KernelConfig, ...]:
    """Return the first of equal tuples. So libraries that install the same kernels share their rankings."""
    return configs


def ask_cublaslt(lt: LtAlgorithms, index: int, problem: Problem) -> tuple[str, ...]:
    """Return the answers of cuBLASLt's heuristic for a problem on a CUDA device: :data:`Ask`.

    Raises:
        NotWhileCapturing: a CUDA graph is captured, and cuBLASLt is not open yet.
    """
    import torch

    from outblas.runtime.launch import ensure_context

    with torch.cuda.device(index):
        ensure_context()
        answer = lt.first_answer(problem, may_open=not torch.cuda.is_current_stream_capturing())
        if answer is None:
            raise NotWhileCapturing("the choice needs cuBLASLt, which cannot be opened during CUDA graph capture")
        return tuple(dict.fromkeys((answer, *lt.answers(problem)))) if answer else ()


@functools.cache
def choices_id(gpu_name: str) -> str:
    """Return a SHA-256 digest, 64 hexadecimal digits, of all data on which the choices for a GPU depend.

    Args:
        gpu_name: short name of the GPU, e.g. ``h200``. Missing files count as empty ones, without an error.
    """
    others = (resources.files("outblas") / "data" / kind / f"{gpu_name}.json" for kind in _OTHER_DATA)
    files = (*(data_of_architecture(gpu_name, folder) for folder in _FITTED), *others)
    return hashlib.sha256(b"".join(hashlib.sha256(_bytes(file)).digest() for file in files)).hexdigest()


def _bytes(file: Any) -> bytes:
    if file is None:
        return b""
    try:
        return bytes(file.read_bytes())
    except OSError:  # the chooser reports it
        return b""
