"""Kernels for shapes that no library has: which are chosen, when none is, and what a decision makes of it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig, Launch
from outblas.core.errors import RecordError, UsageError
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.dispatch import device_registry, unlisted_shapes
from outblas.dispatch.decide import Operand, decide
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.legality import why_illegal
from outblas.predict import any_shape
from outblas.predict.any_shape import AnyShapeModel, is_left_to_torch, network_inputs, shape_features
from outblas.predict.posterior import Regressor, _on_one_core, read_arrays
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from support.gpus.known import H200

FAST, SCALAR = Sm90WgmmaConfig(128, 128, stages=4, consumers=2), Sm80MmaConfig(64, 64, 64, 3, 2, 4, vec=1)
KERNELS: tuple[KernelConfig, ...] = (SCALAR, FAST)
NOTHING = Library("h200", ())
ALIGNED, ODD = Problem(333, 1000, 520), Problem(333, 1001, 521)


def nets(gains: dict[KernelConfig, tuple[float, float]]) -> Regressor:
    """Two nets that see of a kernel whether it is FAST (its feature of the family) and say mean + and - deviation."""
    columns = network_inputs(ALIGNED, list(gains), H200)
    if len(gains) == 1:
        column, size = 0, 0.0
    else:
        column = int(np.flatnonzero(columns[0] != columns[1])[0])
        size = 1 / float(columns[1, column] - columns[0, column])
    wide = columns.shape[1]
    weights, biases = np.zeros((2, wide, 1), np.float32), np.zeros((2, 1, 1), np.float32)
    (first, spread), (second, other) = (list(gains.values()) * 2)[:2]
    for net, sign in enumerate((1, -1)):
        at = [first + sign * spread, second + sign * other]
        weights[net, column] = (at[1] - at[0]) * size
        biases[net] = at[0] - weights[net, column, 0] * columns[0, column]
    return Regressor(np.zeros(wide, np.float32), np.ones(wide, np.float32), (weights,), (biases,))


def made(fast: tuple[float, float], scalar: tuple[float, float] = (0.0, 0.0), **changes: Any) -> AnyShapeModel:
    found = AnyShapeModel(nets({SCALAR: scalar, FAST: fast}), 1.1, 2.0, 3.0, "a test", KERNELS)
    return replace(found, **changes)


@pytest.fixture(autouse=True)
def both_kernels_are_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranking model's opinion of the two kernels does not matter here."""
    monkeypatch.setattr(any_shape, "WITHIN", 100.0)


def test_the_kernel_with_the_highest_bound_is_chosen_where_that_clears_the_margin() -> None:
    choice = made(fast=(0.3, 0.05)).choose(ALIGNED, H200, KERNELS)
    assert choice is not None and choice.config == FAST
    assert np.log([choice.speedup, choice.low, choice.high]) == pytest.approx([0.3, 0.2, 0.4], abs=1e-4)
    unsure = made(fast=(0.5, 0.2), scalar=(0.2, 0.0)).choose(ALIGNED, H200, KERNELS)
    assert unsure is not None and unsure.config == SCALAR, "more, but less surely"
    assert made(fast=(0.3, 0.11)).choose(ALIGNED, H200, KERNELS) is None
    assert made(fast=(0.3, 0.05), margin=1.25).choose(ALIGNED, H200, KERNELS) is None


def test_only_legal_kernels_are_chosen_and_none_for_narrow_products() -> None:
    assert why_illegal(ODD, FAST, H200) and not why_illegal(ODD, SCALAR, H200)
    assert made(fast=(0.5, 0.0)).choose(ODD, H200, KERNELS) is None, "the scalar one gains nothing"
    choice = made(fast=(0.5, 0.0), scalar=(0.2, 0.0)).choose(ODD, H200, KERNELS)
    assert choice is not None and choice.config == SCALAR
    assert made(fast=(0.5, 0.0)).choose(ODD, H200, (FAST,)) is None
    assert made(fast=(0.5, 0.0)).choose(ODD, H200, ()) is None
    for narrow in (Problem(4096, 1, 4096), Problem(512, 512, 7)):
        assert is_left_to_torch(narrow, H200)
        assert made(fast=(0.5, 0.0), scalar=(0.5, 0.0)).choose(narrow, H200, KERNELS) is None
    assert not is_left_to_torch(ALIGNED, H200) and not is_left_to_torch(Problem(1, 4096, 4096), H200)


def test_long_prompts_in_a_models_layers_are_torchs_without_a_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = Problem(5000, 4096, 4096), Problem(1000, 4096, 4096)
    assert is_left_to_torch(long, H200)
    assert not is_left_to_torch(short, H200) and not is_left_to_torch(replace(long, n=4104), H200)
    sure = made(fast=(0.5, 0.0))
    assert sure.choose(short, H200, KERNELS) is not None
    monkeypatch.setattr(any_shape, "why_illegal", lambda *_: pytest.fail("it was thought about"))
    assert sure.choose(long, H200, KERNELS) is None


def test_it_is_what_was_saved_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    path, found = tmp_path / "h200.npz", made(fast=(0.3, 0.05))
    found.save(path)
    again = AnyShapeModel.parse(path.read_bytes())
    assert (again.kernels, again.margin, again.about) == (KERNELS, 1.1, "a test")
    assert (again.sure, again.sure_unaligned) == (2.0, 3.0)
    assert again.choose(ALIGNED, H200, KERNELS) == found.choose(ALIGNED, H200, KERNELS)
    for data in (path.read_bytes()[:-100], b"", b"nonsense"):
        with pytest.raises(RecordError, match="reinstall the package"):
            AnyShapeModel.parse(data)
    with pytest.raises(UsageError, match="a GPU that is not there"):
        AnyShapeModel.load("a GPU that is not there")


def test_features_tell_alignment_and_layout_apart() -> None:
    assert not np.array_equal(shape_features(ALIGNED, H200), shape_features(ODD, H200))
    assert not np.array_equal(shape_features(ALIGNED, H200), shape_features(replace(ALIGNED, layout="NN"), H200))
    assert np.isfinite(network_inputs(ODD, [SCALAR], H200)).all()


def operands(problem: Problem, offset: int = 0) -> tuple[Operand, Operand]:
    m, n, k = problem.m, problem.n, problem.k
    strides = (1, k) if problem.layout == "TN" else (n, 1)
    return Operand((m, k), (k, 1), "fp16", "cuda:0", offset), Operand((k, n), strides, "fp16", "cuda:0")


@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_a_decision_asks_for_problems_that_the_library_does_not_have(layout: Any) -> None:
    problem, asked = replace(ALIGNED, layout=layout), []

    def choose(problem: Problem, gpu: Gpu, launch: Launch) -> LibraryChoice:
        asked.append(problem)
        return LibraryChoice(FAST, 1.3, 1.2, 1.4)

    library = Library("h200", (LibraryRow(Problem(64, 64, 64), "torch"),))
    a, b = operands(problem)
    found = decide(a, b, None, gpu=H200, library=library, any_shape=choose)
    assert (found.config, found.problem, asked) == (FAST, problem, [problem])
    assert "predicted at 1.30 times torch.matmul, surely 1.20" in found.reason
    kept = decide(*operands(Problem(64, 64, 64)), None, gpu=H200, library=library, any_shape=choose)
    assert kept.config is None and len(asked) == 1, "what the library knows is the library's"
    off = decide(*operands(problem, offset=2), None, gpu=H200, library=library, any_shape=choose)
    assert off.config is None and "not aligned to 16 bytes" in off.reason


def test_a_decision_without_a_sure_kernel_is_torchs() -> None:
    library = Library("h200", ())
    found = decide(*operands(ALIGNED), None, gpu=H200, library=library, any_shape=lambda *_: None)
    assert found.problem is None and "no kernel is surely predicted to be faster" in found.reason
    found = decide(*operands(ALIGNED), None, gpu=H200, library=library)
    assert found.problem is None and found.reason.endswith("(0 problems)")


def test_the_packaged_kernels_are_legal_where_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(unlisted_shapes.ANY_SHAPE_VARIABLE, raising=False)
    choose = unlisted_shapes.any_shape_chooser("h200", NOTHING)
    assert choose is not None
    problems = [Problem(m, n, k) for m in (7, 100, 1000) for n in (1001, 3000, 9000) for k in (520, 5000)]
    chosen = {p: choice for p in problems if (choice := choose(p, H200, "plain")) is not None}
    assert chosen and len(chosen) < len(problems)
    for problem, choice in chosen.items():
        assert not why_illegal(problem, choice.config, H200) and not choice.config.pdl
        assert 1 < choice.low <= choice.speedup <= choice.high


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(unlisted_shapes.ANY_SHAPE_VARIABLE, "0")
    assert unlisted_shapes.any_shape_chooser("h200", NOTHING) is None
    monkeypatch.delenv(unlisted_shapes.ANY_SHAPE_VARIABLE)
    assert (
        unlisted_shapes.any_shape_chooser("h200", NOTHING) is not None
        and unlisted_shapes.any_shape_chooser("another", NOTHING) is None
    )


def test_what_is_no_number_and_sums_in_fp16_choose_nothing() -> None:
    assert made(fast=(float("nan"), 0.0), scalar=(float("nan"), 0.0)).choose(ALIGNED, H200, KERNELS) is None
    assert made(fast=(0.5, 0.0)).choose(replace(ALIGNED, acc="fp16"), H200, KERNELS) is None


def test_nets_of_other_inputs_are_refused(tmp_path: Path) -> None:
    path, found = tmp_path / "h200.npz", made(fast=(0.3, 0.05))
    for wrong in (
        replace(found.nets, mean=found.nets.mean[:-1], scale=found.nets.scale[:-1]),
        replace(found.nets, weights=(found.nets.weights[0][:, :-1],)),
        replace(found.nets, biases=(found.nets.biases[0][:1],)),
    ):
        replace(found, nets=wrong).save(path)
        with pytest.raises(RecordError, match="cannot be read"):
            AnyShapeModel.parse(path.read_bytes())


@pytest.mark.parametrize("name", ["format", "layers", "mean", "w0", "b0", "kernels", "margin", "sure"])
@pytest.mark.parametrize("value", [1j, "word", [1.0, 2.0], [[1.0]]])
def test_arrays_of_another_kind_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "h200.npz"
    made(fast=(0.3, 0.05)).save(path)
    np.savez(path, **{**read_arrays(path.read_bytes()), name: np.array(value)})
    with pytest.raises(RecordError, match="cannot be read"):
        AnyShapeModel.parse(path.read_bytes())


@pytest.mark.parametrize("error", [RecordError("damaged", "whole", "install it"), ImportError("No module named numpy")])
def test_data_that_cannot_be_read_leave_products_to_torch_with_one_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(gpu_name: str) -> AnyShapeModel:
        asked.append(gpu_name)
        raise error

    monkeypatch.delenv(unlisted_shapes.ANY_SHAPE_VARIABLE, raising=False)
    monkeypatch.setattr(AnyShapeModel, "load", load)
    choose = unlisted_shapes.any_shape_chooser("h200", NOTHING)
    assert choose is not None
    with pytest.warns(RuntimeWarning, match="uses torch for shapes outside the library: ") as warned:
        for problem in (ALIGNED, ODD, ALIGNED):
            found = decide(*operands(problem), None, gpu=H200, library=Library("h200", ()), any_shape=choose)
            assert found.problem is None
    assert len(warned) == 1 and asked == ["h200"]


def test_a_problem_is_predicted_once_however_its_operands_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = [], made(fast=(0.3, 0.05))
    monkeypatch.delenv(unlisted_shapes.ANY_SHAPE_VARIABLE, raising=False)
    monkeypatch.setattr(AnyShapeModel, "load", lambda name: found)
    monkeypatch.setattr(AnyShapeModel, "choose", lambda self, problem, *_: asked.append(problem))
    choose = unlisted_shapes.any_shape_chooser("h200", NOTHING)
    for offset in (0, 2, 4):
        decide(*operands(ALIGNED, offset), None, gpu=H200, library=Library("h200", ()), any_shape=choose)
    assert asked == [ALIGNED]


def test_threads_do_not_wait_for_the_choice_of_another() -> None:
    pytest.importorskip("torch")
    from outblas.dispatch.device_state import DeviceState
    from outblas.runtime.kernel_loader import load_kernel

    begun, may_end = threading.Event(), threading.Event()

    def choose(problem: Problem, gpu: Gpu, launch: Launch) -> LibraryChoice | None:
        if problem == ALIGNED:
            begun.set()
            assert may_end.wait(60)
        return LibraryChoice(SCALAR, 1.3, 1.2, 1.4)

    state, found = DeviceState(H200, Library("h200", ()), load_kernel, any_shape=choose), []
    slow = threading.Thread(target=lambda: found.append(state.decide(*operands(ALIGNED), None, "plain")))
    fast = threading.Thread(target=lambda: found.append(state.decide(*operands(ODD), None, "plain")))
    slow.start()
    assert begun.wait(60)
    fast.start()
    fast.join(30)
    assert [decision.problem for decision in found] == [ODD]
    may_end.set()
    slow.join(60)
    assert [decision.problem for decision in found] == [ODD, ALIGNED]


def test_a_digest_changes_with_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which Inductor's cached graphs are."""
    pytest.importorskip("torch")
    from outblas.dispatch.device_state import DeviceState
    from outblas.runtime.kernel_loader import load_kernel

    def digest() -> str:
        unlisted_shapes.choices_id.cache_clear()
        return device_registry.libraries_id()

    state = DeviceState(H200, Library("h200", ()), load_kernel, any_shape=lambda *_: None)
    monkeypatch.setattr(device_registry, "devices", {0: state})
    packaged, data = digest(), tmp_path / "h200.npz"
    data.write_bytes(b"others")
    monkeypatch.setattr(unlisted_shapes, "data_of_architecture", lambda name, folder: data)
    others = digest()
    state.any_shape = None
    assert len({packaged, others, digest()}) == 3
    unlisted_shapes.choices_id.cache_clear()


def test_a_damaged_library_leaves_all_to_torch_as_its_warning_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(name: str, missing_ok: bool = False) -> Library:
        raise RecordError("the library is damaged", "a whole one", "install it again")

    monkeypatch.delenv(unlisted_shapes.ANY_SHAPE_VARIABLE, raising=False)
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(device_registry, "library_for_device", lambda library, index: (library, ()))
    monkeypatch.setattr(device_registry, "libraries", {})
    assert device_registry._new_device(0).any_shape is not None
    monkeypatch.setattr(Library, "packaged", staticmethod(damaged))
    with pytest.warns(RuntimeWarning, match="outblas uses torch.matmul: the library is damaged"):
        assert device_registry._new_device(0).any_shape is None


def test_every_kernel_on_offer_ships_wherever_it_is_legal() -> None:
    from outblas.kernels.source import make_source
    from outblas_lab.build.cubin_build import any_shape_files, pairs_for_any_shape

    packaged = {make_source(p, c) for p, c in pairs_for_any_shape(any_shape_files())}
    extents = [(m, n, k) for m in (2, 8, 16, 64, 333) for n in (8, 1001, 4096) for k in (8, 521, 2048, 8192, 16384)]
    for config in AnyShapeModel.load("h200").kernels:
        for layout in ("TN", "NN"):
            problems = (Problem(*mnk, layout, "bf16") for mnk in extents)  # type: ignore[arg-type]
            legal = next((p for p in problems if not why_illegal(p, config, H200)), None)
            assert legal is None or make_source(legal, config) in packaged, (config, legal)


def test_a_choice_wakes_no_threads_of_blas() -> None:
    products = []

    class Seen(np.ndarray):
        def __matmul__(self, other: Any) -> Any:
            products.append(self.shape[1] * other.shape[1] * other.shape[2])
            return np.asarray(self) @ other

    rng, (w, *_) = np.random.default_rng(0), AnyShapeModel.load(H200.name).nets.weights
    for rows in (0, 1, any_shape.MAX_LIKELIEST):
        h = rng.normal(size=(1, rows, w.shape[1])).astype(np.float32)
        np.testing.assert_allclose(_on_one_core(h.view(Seen), w), h @ w, rtol=1e-4, atol=1e-4)
    assert max(products) <= 4 * 65536 and len(products) > 3
