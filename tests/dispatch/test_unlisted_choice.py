"""Choices for problems of no list, without a GPU: kernels on offer to a call, and the question to cuBLASLt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig, Launch, launch_of
from outblas.core.errors import DeviceError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.dispatch import unlisted_shapes
from outblas.dispatch.decide import LeftToTorch, NotWhileCapturing, Operand, decide
from outblas.dispatch.device_state import DeviceState
from outblas.dispatch.unlisted_shapes import (
    WAITED_CLASSES,
    ClassChooser,
    any_shape_chooser,
    class_of_rows,
    offered_kernels,
)
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.predict import any_shape
from outblas.predict.answer_choice import AnswerModel
from outblas.predict.any_shape import AnyShapeModel, likeliest, network_inputs
from outblas.predict.posterior import Regressor
from outblas.records.library import Library
from outblas.records.library_row import AnswerChoice, LibraryChoice, LibraryRow
from outblas.runtime import cublaslt
from outblas.runtime.cublaslt import LtAlgorithms
from support.gpus.known import H200
from support.gpus.modelled_gpu import LARGE

PROBLEM = Problem(333, 1000, 520)
GENERAL: KernelConfig = Sm90WgmmaConfig(128, 128, stages=4, consumers=2)
INSTALLED: KernelConfig = Sm90WgmmaConfig(64, 64, stages=4)
PDL = INSTALLED.with_knobs(pdl=True)
EARLY = INSTALLED.with_knobs(pdl=True, early=True)
ANSWER = "id=66 tile=20 splitk=1 reduction=0 swizzle=0 custom=1 stages=35 inner=0 cluster=3"
OTHER = ANSWER.replace("tile=20", "tile=15")


def preferring(*order: KernelConfig) -> Regressor:
    """Return a net that predicts more for a kernel the earlier it stands in the order, and no other difference."""
    inputs = network_inputs(PROBLEM, order, H200).astype(np.float64)
    wanted = np.linspace(1.0, 0.5, len(order))
    weights, *_ = np.linalg.lstsq(np.c_[inputs, np.ones(len(order))], wanted, rcond=None)
    zeros, ones = np.zeros(inputs.shape[1], np.float32), np.ones(inputs.shape[1], np.float32)
    parts = weights[:-1].astype(np.float32).reshape(1, -1, 1), weights[-1:].astype(np.float32).reshape(1, 1, 1)
    return Regressor(zeros, ones, (parts[0],), (parts[1],))


def other_answer(problem: Problem, gpu: Any, answers: Sequence[str]) -> AnswerChoice | None:
    """Choose the second answer, if there is one."""
    return AnswerChoice(answers[1], 1.2, 1.1) if len(answers) > 1 else None


@pytest.fixture
def chooser(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A chooser whose model prefers kernels that need more of a call, over a library that installs three of them."""
    won = {"plain": INSTALLED, "pdl": PDL, "weights": EARLY}
    row = LibraryRow(Problem(64, 64, 64), "torch", **{n: LibraryChoice(c, 1.2, 1.1, 1.3) for n, c in won.items()})
    model = AnyShapeModel(preferring(EARLY, PDL, INSTALLED, GENERAL), 1.05, 1.0, 1.0, "", (GENERAL,))
    monkeypatch.delenv(unlisted_shapes.ANY_SHAPE_VARIABLE, raising=False)
    monkeypatch.setattr(AnyShapeModel, "load", lambda name: model)
    monkeypatch.setattr(AnswerModel, "load", lambda name: SimpleNamespace(choose=other_answer))
    monkeypatch.setattr(any_shape, "WITHIN", 100.0)
    return lambda ask=None: any_shape_chooser("h200", Library("h200", (row,)), ask)


@pytest.mark.parametrize(("launch", "wanted"), [("plain", INSTALLED), ("pdl", PDL), ("weights", EARLY)])
def test_a_librarys_kernels_are_on_offer_to_calls_that_allow_them(
    launch: Launch, wanted: KernelConfig, chooser: Any
) -> None:
    assert launch_of(wanted) == launch and not why_illegal(PROBLEM, wanted, H200)
    assert chooser()(PROBLEM, H200, launch).config == wanted


@pytest.mark.parametrize("other", [{"layout": "NN"}, {"dtype": "bf16"}])
def test_a_librarys_kernels_serve_only_the_layout_and_dtype_in_which_they_ship(other: Any, chooser: Any) -> None:
    assert chooser()(replace(PROBLEM, **other), H200, "weights").config == GENERAL


def test_the_likeliest_kernels_are_legal_few_and_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Sm90WgmmaConfig(64, 64, stages=4, cluster_m=2, split_k=2)
    times = {INSTALLED: 1.0, PDL: 1.3, GENERAL: 1.4, EARLY: 1.2, odd: 0.1}
    monkeypatch.setattr(any_shape, "predict_many", lambda p, configs, gpu: np.array([times[c] for c in configs]))
    monkeypatch.setattr(any_shape, "why_illegal", lambda p, c, gpu: "odd" if c == odd else None)
    assert likeliest(PROBLEM, list(times), H200) == [INSTALLED, EARLY, PDL], "within 1.35 of the best legal one"
    monkeypatch.setattr(any_shape, "MAX_LIKELIEST", 2)
    assert likeliest(PROBLEM, list(times), H200) == [INSTALLED, EARLY]
    assert likeliest(PROBLEM, [odd], H200) == []


def test_kernels_for_unaligned_rows_are_likely_for_them_alone() -> None:
    odd: KernelConfig = Sm90OddrowsConfig(64, 64)
    assert why_illegal(PROBLEM, odd, H200) is None and likeliest(PROBLEM, [odd], H200) == []
    assert likeliest(replace(PROBLEM, k=521), [odd], H200) == [odd]


def test_libraries_with_the_same_kernels_share_their_rankings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning asks for a ranking that the choice has made, by a merged library that installs nothing more."""
    row = LibraryRow(Problem(64, 64, 64), "torch", plain=LibraryChoice(INSTALLED, 1.2, 1.1, 1.3))
    one, other = (
        offered_kernels("h200", Library("h200", rows), "TN", "fp16", "plain")
        for rows in ((row,), (row, replace(row, problem=Problem(128, 64, 64))))
    )
    assert one is other and one[-1] == INSTALLED
    first = likeliest(PROBLEM, one, H200)
    monkeypatch.setattr(any_shape, "predict_many", None)
    assert likeliest(PROBLEM, other, H200) == first
    assert offered_kernels("h200", Library("h200", ()), "TN", "fp16", "plain") != one


def test_an_answer_is_among_the_inputs_of_a_choice(chooser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    inputs = any_shape.network_inputs
    monkeypatch.setattr(any_shape, "network_inputs", lambda *given: seen.append(given[3]) or inputs(*given))
    asked: list[Problem] = []
    choose = chooser(lambda problem: asked.append(problem) or (ANSWER,))
    for _ in range(2):
        choose(PROBLEM, H200, "plain")
    assert asked == [PROBLEM] and seen == [ANSWER]
    choose(Problem(333, 1, 520), H200, "plain")
    assert asked == [PROBLEM], "a product of one column is left to torch without a question"


def test_another_algorithm_is_chosen_where_no_kernel_is(chooser: Any) -> None:
    long = Problem(8192, 8192, 8192)
    choose = chooser(lambda problem: (ANSWER, OTHER))
    assert choose(PROBLEM, H200, "plain").config == INSTALLED
    assert choose(long, H200, "plain") == AnswerChoice(OTHER, 1.2, 1.1)
    a, b = Operand((8192, 8192), (8192, 1), "fp16", "cuda:0"), Operand((8192, 8192), (1, 8192), "fp16", "cuda:0")
    found = decide(a, b, None, gpu=H200, library=Library("h200", ()), any_shape=choose)
    assert (found.config, found.problem, found.algorithm) == (None, long, OTHER)
    assert "predicted at 1.20 times torch.matmul, surely 1.10" in found.reason
    found = decide(a._replace(offset=2), b, None, gpu=H200, library=Library("h200", ()), any_shape=choose)
    assert found.problem is None and "not aligned to 16 bytes" in found.reason
    assert chooser(lambda problem: (ANSWER,))(long, H200, "plain") is None


@pytest.mark.parametrize(("low", "kernel"), [(1.0, True), (9.0, False)])
def test_the_higher_bound_wins(low: float, kernel: bool, chooser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = AnswerChoice(OTHER, low, low)
    monkeypatch.setattr(AnswerModel, "load", lambda name: SimpleNamespace(choose=lambda *_: answer))
    found = chooser(lambda problem: (ANSWER, OTHER))(PROBLEM, H200, "plain")
    assert found.config == INSTALLED if kernel else found is answer


class Lt:
    """A cuBLASLt without a GPU that proposes one algorithm."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.broken = False

    def plan(self, problem: Problem) -> Any:
        return SimpleNamespace(heuristic=lambda count, *_: self.heuristic(problem, count), close=lambda: None)

    def heuristic(self, problem: Problem, count: int) -> list[Any]:
        self.asked.append((problem, count))
        if self.broken:
            raise DeviceError("it proposes nothing", "one", "use another")
        return [SimpleNamespace(algo=ANSWER)]


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> Lt:
    monkeypatch.setattr(cublaslt, "describe", lambda algo: algo)
    return Lt()


def test_the_heuristic_is_asked_once_for_a_problem(lt: Lt) -> None:
    answers = LtAlgorithms(lambda: lt, lambda: 77)
    assert [answers.first_answer(PROBLEM) for _ in range(3)] == [ANSWER] * 3
    assert lt.asked == [(PROBLEM, 1)]


@pytest.mark.parametrize("ask", [LtAlgorithms.first_answer, LtAlgorithms.answers])
def test_few_answers_are_kept(ask: Any, lt: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "MAX_ANSWERS", 2)
    answers = LtAlgorithms(lambda: lt, lambda: 77)
    first, second, third = (replace(PROBLEM, m=m) for m in (1, 2, 3))
    for problem in (first, second, third, third, second, first):
        ask(answers, problem)
    assert [problem.m for problem, _ in lt.asked] == [1, 2, 3, 1], "the oldest goes first"


def test_cublaslt_is_not_opened_while_a_graph_is_captured(lt: Lt) -> None:
    answers = LtAlgorithms(lambda: lt, lambda: 77)
    assert answers.first_answer(PROBLEM, may_open=False) is None and not lt.asked
    assert answers.first_answer(ODD := replace(PROBLEM, m=334)) == ANSWER
    assert answers.first_answer(PROBLEM, may_open=False) == ANSWER, "it is open, and only the host works"
    assert [problem for problem, _ in lt.asked] == [ODD, PROBLEM]


def test_a_missing_or_failing_cublaslt_has_no_answer(lt: Lt) -> None:
    opened: list[int] = []

    def missing() -> Any:
        opened.append(1)
        raise ToolchainMissing("libcublasLt is not installed", "it", "install it")

    answers = LtAlgorithms(missing, lambda: 77)
    assert [answers.first_answer(replace(PROBLEM, m=m), may_open=m > 1) for m in (2, 3, 1)] == ["", "", ""]
    assert opened == [1]
    lt.broken = True
    assert LtAlgorithms(lambda: lt, lambda: 77).first_answer(PROBLEM) == ""


def test_a_choice_that_must_wait_for_the_end_of_a_capture_is_not_kept() -> None:
    pytest.importorskip("torch")
    from outblas.dispatch.device_state import DeviceState
    from outblas.runtime.kernel_loader import load_kernel

    capturing = True

    def choose(problem: Problem, gpu: Any, launch: Launch) -> LibraryChoice:
        if capturing:
            raise NotWhileCapturing("cuBLASLt is not opened")
        return LibraryChoice(GENERAL, 1.3, 1.2, 1.4)

    state = DeviceState(H200, Library("h200", ()), load_kernel, any_shape=choose)
    a, b = Operand((333, 520), (520, 1), "fp16", "cuda:0"), Operand((520, 1000), (1, 520), "fp16", "cuda:0")
    found = state.decide(a, b, None, "plain")
    assert found.problem is None and found.reason.endswith("and cuBLASLt is not opened")
    assert not state.is_left_to_torch(found), "torch computes this call alone"
    capturing = False
    again = state.decide(a, b, None, "plain")
    assert again.config == GENERAL and not again.provisional


def test_a_chooser_that_waits_decides_after_the_capture(chooser: Any) -> None:
    answers: list[tuple[str, ...] | None] = [None, (ANSWER,)]

    def ask(problem: Problem) -> tuple[str, ...]:
        answer = answers.pop(0)
        if answer is None:
            raise NotWhileCapturing("cuBLASLt is not opened")
        return answer

    choose, library = chooser(ask), Library("h200", ())
    a, b = Operand((333, 520), (520, 1), "fp16", "cuda:0"), Operand((520, 1000), (1, 520), "fp16", "cuda:0")
    first = decide(a, b, None, gpu=H200, library=library, any_shape=choose)
    second = decide(a, b, None, gpu=H200, library=library, any_shape=choose)
    assert first.provisional and first.config is None and second.config == INSTALLED and not answers


# -- classes of M: a call waits for some choices, and torch computes while others are made -----------------------------

CHOICE = LibraryChoice(LARGE, 1.2, 1.1, 1.3)


class Chosen:
    """A chooser that ends when a test lets it."""

    def __init__(self, choice: Any = CHOICE) -> None:
        self.asked: list[int] = []
        self.may_end, self._choice = threading.Event(), choice
        self.may_end.set()

    def __call__(self, problem: Problem, gpu: Any, launch: Any) -> Any:
        self.asked.append(problem.m)
        assert self.may_end.wait(30)
        if isinstance(self._choice, Exception):
            raise self._choice
        return self._choice


def problem(m: int, n: int = 4096) -> Problem:
    return Problem(m, n, 4096, "TN", "bf16")


def ask(chooser: ClassChooser, m: int, n: int = 4096) -> Any:
    return chooser(problem(m, n), H200, "plain")


def is_idle() -> None:
    """Wait for the queue's thread."""
    future = unlisted_shapes._QUEUE.submit(int)
    assert future is not None and future.result(30) == 0


@pytest.mark.parametrize(
    ("m", "of"),
    [(1, 1), (15, 15), (17, 17), (23, 17), (24, 24), (270, 257), (512, 512), (575, 513), (2050, 2049), (5000, 4865)],
)
def test_classes_are_narrow_where_m_is_small(m: int, of: int) -> None:
    assert class_of_rows(m) == of == class_of_rows(of)


def test_a_choice_holds_for_its_class() -> None:
    chosen = Chosen()
    chooser = ClassChooser(chosen)
    assert [ask(chooser, m) for m in (18, 17, 23, 24, 25)] == [CHOICE] * 5
    assert chosen.asked == [17, 24, 25]
    assert ask(chooser, 20, 8192) is CHOICE and chosen.asked == [17, 24, 25, 17], "each weight has its own"


def test_an_illegal_kernel_is_torchs() -> None:
    chooser = ClassChooser(Chosen())
    assert chooser(Problem(40, 4095, 4096, "NN", "bf16"), H200, "plain") is None


def test_a_weights_first_classes_are_waited_for_and_later_ones_chosen_meanwhile() -> None:
    chosen = Chosen()
    chooser = ClassChooser(chosen)
    first = [576 + 64 * step for step in range(WAITED_CLASSES)]
    assert [ask(chooser, m) for m in first] == [CHOICE] * WAITED_CLASSES
    chosen.may_end.clear()
    for _ in range(3):
        with pytest.raises(LeftToTorch, match="its kernel is still being chosen") as left:
            ask(chooser, 8000)
        assert left.value.provisional
    chosen.may_end.set()
    is_idle()
    assert ask(chooser, 8000) is CHOICE and chosen.asked.count(7937) == 1
    assert ask(chooser, 100) is CHOICE and chosen.asked[-1] == 97, "small M are waited for in any case"
    assert ask(chooser, 8000, 8192) is CHOICE, "and so are those of another weight"


def test_a_choice_that_fails_is_made_anew(caplog: pytest.LogCaptureFixture) -> None:
    chosen = Chosen(DeviceError("cuBLASLt is busy", "a GPU", "wait"))
    chooser = ClassChooser(chosen)
    chooser._waited[problem(1), "plain"] = WAITED_CLASSES
    for count in (1, 2):
        with pytest.raises(LeftToTorch):
            ask(chooser, 8000)
        is_idle()
        assert chosen.asked == [7937] * count
    assert "cuBLASLt is busy" in caplog.text


def test_an_error_of_the_chooser_is_torchs_product_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    by_class = ClassChooser(Chosen(ValueError("odd\nmodel")))
    device = DeviceState(
        H200, Library("h200", ()), lambda *_: (None, 0.0), any_shape=SimpleNamespace(by_class=by_class)
    )  # type: ignore[arg-type]
    b = Operand((4096, 4096), (1, 4096), "bf16", "cuda:0")
    for m in (20, 40):
        found = device.decide(Operand((m, 4096), (4096, 1), "bf16", "cuda:0"), b, None, "plain", by_class=True)
        assert found.problem is None and "its choice failed with ValueError: odd model" in found.reason
        assert not found.provisional, "it is not asked at each call"
    assert len(caplog.records) == 1 and "later failures are only counted" in caplog.text
    (failure,) = device.status()["failures"]
    assert failure.startswith(
        "2 choices failed, the first one: 17_4096_4096_TN_bf16_fp32, its choice failed with Value"
    )


def test_a_choice_keeps_no_other_thread_waiting() -> None:
    chosen = Chosen()
    chooser = ClassChooser(chosen)
    assert ask(chooser, 24) is CHOICE
    chosen.may_end.clear()
    slow = threading.Thread(target=ask, args=(chooser, 32), daemon=True)
    slow.start()
    try:
        while len(chosen.asked) < 2:
            slow.join(0.01)
        found: list[Any] = []
        other = threading.Thread(target=lambda: found.append(ask(chooser, 24)), daemon=True)
        other.start()
        other.join(10)
        assert found == [CHOICE]
    finally:
        chosen.may_end.set()
        slow.join(30)


def test_choices_and_weights_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlisted_shapes, "MAX_CACHED_CHOICES", 3)
    chooser = ClassChooser(Chosen())
    assert [ask(chooser, m) for m in range(1, 9)] == [CHOICE] * 8 and len(chooser._known) <= 3
    assert [ask(chooser, 576, n) for n in range(4096, 8192, 512)] == [CHOICE] * 8 and len(chooser._waited) <= 3


def test_a_device_asks_it_for_the_products_of_unchanged_programs() -> None:
    def choose(asked: Problem, gpu: Any, launch: Any) -> Any:
        return None

    by_class = Chosen()
    choose.by_class = ClassChooser(by_class)  # type: ignore[attr-defined]
    device = DeviceState(H200, Library("h200", ()), lambda *_: (None, 0.0), any_shape=choose)
    a, b = Operand((20, 4096), (4096, 1), "bf16", "cuda:0"), Operand((4096, 4096), (1, 4096), "bf16", "cuda:0")
    assert device.decide(a, b, None, "plain").config is None and not by_class.asked
    assert device.decide(a, b, None, "plain", by_class=True).config == LARGE and by_class.asked == [17]
    assert device.decide(a, b, None, "plain", by_class=True).config == LARGE and by_class.asked == [17]
    found = decide(a, b, None, gpu=H200, library=device.library, any_shape=choose.by_class)  # type: ignore[attr-defined]
    assert found.problem == problem(20), "the kernel runs on the product's own M"
    assert device.weights() == {"4096 x 4096 bf16": {"outblas": [20], "cublaslt": [], "torch": [20]}}, "two ways to ask"
