"""``OUTBLAS_EXCLUDE``: excluded products and kernels run on torch on every path. A malformed item excludes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.config import config_name  # noqa: E402
from outblas.core.errors import DeviceError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.core.weight import Weight  # noqa: E402
from outblas.dispatch import device_registry, exclusion, fused, linear  # noqa: E402
from outblas.dispatch.aten_override import Override  # noqa: E402
from outblas.dispatch.decide import CallTerms, Decision, decide  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.dispatch.exclusion import Exclusions, exclusions_of_environment  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import AnswerChoice, LibraryChoice, LibraryInterval, LibraryRow  # noqa: E402
from support.aten_native_fixture import Device, device_fixture, on_fixture  # noqa: E402
from support.dispatch_fixture import DEPENDENT, LIBRARY, PLAIN, WEIGHT, A, rows, transposed  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.native_fixture import FakeCuda, built_fixture, cuda_fixture, needs_compiler  # noqa: E402
from support.served_fixture import ANY, Served, numbers, served_fixture  # noqa: E402

__all__ = ["built_fixture", "cuda_fixture", "device_fixture", "host_fixture", "on_fixture", "served_fixture"]

NOTHING = Exclusions()
CHOICE = LibraryChoice(PLAIN, 1.25, 1.2, 1.3)
ALGORITHM = "id=66 tile=20 splitk=1 reduction=0"


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variable is not set, and no list was read."""
    monkeypatch.delenv(exclusion.EXCLUDE_VARIABLE, raising=False)
    exclusion._parsed.cache_clear()
    yield
    exclusion._parsed.cache_clear()


def parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> Exclusions:
    monkeypatch.setenv("OUTBLAS_EXCLUDE", text)
    return exclusions_of_environment()


def choose(exclude: Exclusions, b: Any = WEIGHT, library: Library = LIBRARY, **options: Any) -> Decision:
    terms = CallTerms(options.pop("guarantee", "none"), "stream", exclude)
    return decide(A, b, None, gpu=H200, library=library, terms=terms, **options)


@pytest.mark.parametrize("shape", ["64_128_256", "64_*_256", "*_128_*", "*_*_*"])
def test_a_shape_is_torchs_and_the_reason_names_the_item(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exclude = parsed(f"1_2_3, {shape}", monkeypatch)
    for launch in ("plain", "pdl", "weights"):
        found = choose(exclude, launch=launch)
        assert found == Decision(None, None, f"excluded by OUTBLAS_EXCLUDE ({shape})")


@pytest.mark.parametrize("shape", ["64_128_25", "*_128_64", "128_64_*", "6_*_*"])
def test_another_shape_keeps_its_kernel(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(parsed(shape, monkeypatch)).config == PLAIN


def test_a_shape_that_names_an_algorithm_is_torchs_too() -> None:
    library = Library("h200", (LibraryRow(Problem(64, 128, 256), "lt_auto", ALGORITHM),))
    assert choose(NOTHING, library=library).algorithm == ALGORITHM
    assert choose(Exclusions(("64_128_256",)), library=library).problem is None


def test_a_family_excludes_its_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exclude = parsed("sm90_wgmma_gemm", monkeypatch)
    found = choose(exclude)
    reason = "64_128_256_TN_fp16_fp32: its kernel is excluded by OUTBLAS_EXCLUDE (sm90_wgmma_gemm)"
    assert found == Decision(None, None, reason)
    other = LibraryChoice(Sm80MmaConfig(64, 64), 1.2, 1.1, 1.3)
    library = Library("h200", (LibraryRow(Problem(64, 128, 256), "lt_auto", plain=other),))
    assert choose(exclude, library=library).config == other.config


def test_a_kernel_excludes_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = config_name(PLAIN)
    exclude = parsed(f"{name},1_1_1,{config_name(Sm80MmaConfig(64, 64))}", monkeypatch)
    assert exclude == Exclusions(("1_1_1",), (name, config_name(Sm80MmaConfig(64, 64))))
    found = choose(exclude)
    assert found.config is None and found.reason.endswith(f"its kernel is excluded by OUTBLAS_EXCLUDE ({name})")
    assert choose(exclude, launch="pdl").config == DEPENDENT


@pytest.mark.parametrize(
    "answer", [CHOICE, AnswerChoice(ALGORITHM, 1.2, 1.1), LibraryRow(Problem(64, 512, 256), "torch", plain=CHOICE)]
)
def test_predicted_and_learned_choices_are_excluded(answer: Any) -> None:
    asked: list[Problem] = []
    options = {"b": transposed(rows(512, 256)), "any_shape": lambda problem, *_: asked.append(problem) or answer}
    assert choose(NOTHING, **options).problem == Problem(64, 512, 256) and asked
    found = choose(Exclusions(("*_512_256",)), **options)
    assert found.reason == "excluded by OUTBLAS_EXCLUDE (*_512_256)" and len(asked) == 1, "so it is not learned"
    by_family = choose(Exclusions((), ("sm90_wgmma_gemm",)), **options)
    assert by_family.config is None and ("excluded" in by_family.reason) == (not isinstance(answer, AnswerChoice))


def test_a_batch_invariant_product_takes_another_kernel_of_its_order() -> None:
    first = choose(NOTHING, guarantee="batch_invariant")
    assert first.config is not None
    second = choose(Exclusions((), (config_name(first.config),)), guarantee="batch_invariant")
    assert second.config not in (None, first.config) and second.reason.startswith("order of summation wgmma")
    none = choose(Exclusions((), ("sm90_wgmma_gemm",)), guarantee="batch_invariant")
    assert none.problem is None and none.reason.endswith("is legal and not excluded by OUTBLAS_EXCLUDE")
    assert choose(NOTHING, guarantee="batch_invariant") == first, "the library is as before"


MALFORMED = (
    "4096x4096x4096 4096_4096 04_1_1 1_2_3_TN_fp16_fp32 -1_2_3 sm99_gemm free_1234 sm80_mma_gemm:bm=64 all "
    f"{config_name(PLAIN)},odd=1"
).split()


@pytest.mark.parametrize("item", MALFORMED)
def test_malformed_items_are_one_warning_and_exclude_nothing(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"expected M_N_K with numbers or \*, a kernel name.*sm90_wgmma_gemm"
    ) as said:
        exclude = parsed(f"{item}, 4_*_4,sm80_mma_gemm,, 5_5_,", monkeypatch)
    assert len(said) == 1 and repr(item) in str(said[0].message) and "'5_5_'" in str(said[0].message)
    assert exclude == Exclusions(("4_*_4",), ("sm80_mma_gemm",)), "the other items hold"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert exclusions_of_environment() == exclude, "said once"


@pytest.mark.parametrize("text", ["", " ", ","])
def test_an_empty_list_excludes_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parsed(text, monkeypatch) == NOTHING


def test_a_device_reads_the_list_when_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Served()
    monkeypatch.setenv("OUTBLAS_EXCLUDE", "64_*_*")
    after = DeviceState(H200, LIBRARY, lambda problem, config: (None, 0.0))
    assert (before.exclude, after.exclude) == (NOTHING, Exclusions(("64_*_*",)))
    assert after.decide(A, WEIGHT, None, "plain").reason == "excluded by OUTBLAS_EXCLUDE (64_*_*)"
    ids = set()
    for state in (before, after):  # so graphs that were compiled without the list are compiled again
        state.library = LIBRARY
        monkeypatch.setattr(device_registry, "devices", {0: state})
        ids.add(device_registry.libraries_id())
    assert len(ids) == 2


def test_calls_and_their_gradients_run_on_torch(served: Served) -> None:
    served.exclude = Exclusions(("3_4_5", "*_5_4"))
    a, w = numbers(3, 5, grad=True), numbers(4, 5, grad=True)
    result = outblas.matmul(a, w.t())
    result.backward(numbers(3, 4))
    assert torch.equal(result, a @ w.t()) and torch.equal(a.grad, numbers(3, 4) @ w)
    assert torch.equal(w.grad, numbers(3, 4).t() @ a) and served.ran == []
    assert outblas.linear(a.detach(), w.detach()).shape == (3, 4) and served.ran == []
    said = outblas.explain(a.detach(), w.detach().t())
    assert said == "torch.matmul: excluded by OUTBLAS_EXCLUDE (3_4_5)"
    outblas.matmul(a.detach()[:2], w.detach().t())
    assert [p.key for p in served.ran] == ["2_4_5_TN_fp16_fp32"], "another M has its kernel"


def test_explain_prints_a_name_that_excludes_the_kernel(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    a, w = numbers(3, 5), numbers(4, 5)
    name = outblas.explain(a, w.t()).partition(" for ")[0]
    assert name == config_name(ANY)
    served.exclude = parsed(name, monkeypatch)
    served.forget_decisions()
    assert name in outblas.explain(a, w.t()) and outblas.explain(a, w.t()).startswith("torch.matmul: 3_4_5_TN")


def test_a_batch_invariant_call_says_why_it_cannot_run(served: Served) -> None:
    served.exclude = Exclusions(("3_*_*",))
    with pytest.raises(DeviceError, match=r"batch_invariant: excluded by OUTBLAS_EXCLUDE \(3_\*_\*\)"):
        outblas.matmul(numbers(3, 8), numbers(16, 8).t(), batch_invariant=True)


def test_a_compiled_graph_decides_by_the_m_of_each_run(served: Served) -> None:
    served.exclude = Exclusions(("3_5_8",))
    torch._dynamo.reset()
    run = torch.compile(lambda x, w: outblas.matmul(x, w.t()) + 1, backend="eager", fullgraph=True, dynamic=True)
    w = numbers(5, 8, seed=1)
    for m in (2, 3, 4):
        x = numbers(m, 8, seed=m)
        assert torch.equal(run(x, w), x @ w.t() + 1)
    assert [p.m for p in served.ran] == [2, 4]


def test_torchs_operators_run_on_torch_under_enable(served: Served) -> None:
    served.exclude = Exclusions((), (ANY.family,))
    replaced = Override("CPU")
    replaced.install()
    try:
        x, w = numbers(3, 8), numbers(8, 5)
        assert torch.equal(torch.mm(x, w).double(), x.double() @ w.double()) and served.ran == []
    finally:
        replaced.remove()


@needs_compiler
def test_the_kernels_in_c_plus_plus_remember_it(on: Override, device: Device, cuda: FakeCuda) -> None:
    device.exclude = Exclusions(("3_*_8",))
    x, w = numbers(3, 8), numbers(8, 5)
    for _ in range(3):
        assert torch.equal(torch.mm(x, w).double(), x.double() @ w.double())
    assert len(device.decided) == 1 and not device.ran and not len(cuda), "one decision, and no launch"
    torch.mm(numbers(4, 8), w)
    assert [p.m for p in device.ran] == [4]


@pytest.mark.parametrize("exclude", [Exclusions(("5_24_16",)), Exclusions((), (ANY.family,))])
def test_fused_products_are_torchs_operations(
    exclude: Exclusions, host: fused.FusedState, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    x, w, bias = numbers(5, 16), numbers(24, 16, seed=1), numbers(24, seed=2)
    with caplog.at_level("INFO", logger="outblas"):
        assert outblas.warm(x, w, bias, activation="silu") and outblas.warm(x, w, gated=True)
    assert sum(f"5_24_16_TN_fp16_fp32: {config_name(ANY)} with " in text for text in caplog.messages) == 2
    launched = host.launched
    served.exclude = exclude
    served.forget_decisions()  # as a new device has none
    assert not outblas.warm(x, w, bias, activation="silu") and not outblas.warm(x, w, gated=True)
    assert "excluded by OUTBLAS_EXCLUDE" in linear.why_not(x, w, bias, activation="silu")
    silu = torch.nn.functional.silu
    assert torch.equal(outblas.linear(x, w, bias, activation="silu"), silu(torch.nn.functional.linear(x, w, bias)))
    y = x @ w.t()
    assert torch.equal(outblas.gated_linear(x, w), silu(y[:, 0::2]) * y[:, 1::2])
    assert host.launched == launched and served.ran == []


@pytest.mark.parametrize("exclude", [Exclusions(("5_24_16",)), Exclusions((), (ANY.family,))])
def test_a_fused_kernel_that_is_predicted_is_excluded(
    exclude: Exclusions, host: fused.FusedState, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions are asked if torch computes the product alone, e.g. since it is excluded."""
    monkeypatch.setattr(fused, "_predict", lambda *_: Decision(ANY, Problem(5, 24, 16), "predicted"))
    served.exclude = exclude
    x, w, bias = numbers(5, 16), numbers(24, 16, seed=1), numbers(24, seed=2)
    assert not outblas.warm(x, w, bias, activation="silu") and not host.launched
    assert "excluded by OUTBLAS_EXCLUDE" in linear.why_not(x, w, bias, activation="silu")


@pytest.mark.parametrize("item", ["8_256_64", "sm90_wgmma_gemm"])
def test_a_gate_of_the_library_is_excluded(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Weight(256, 64, "TN", "fp16")
    choice = LibraryChoice(Sm90WgmmaConfig(64, 64), 1.2, 1.1, 1.3)
    row = LibraryRow(weight.problem(1), "torch", plain=choice)
    library = Library("h200", (), gates=(LibraryInterval(row, 16, (1, 16)),))
    a, w = rows(8, 64), transposed(rows(256, 64))
    assert DeviceState(H200, library, lambda *_: (None, 0.0)).gate(a, w).config == choice.config
    monkeypatch.setenv("OUTBLAS_EXCLUDE", item)
    found = DeviceState(H200, library, lambda *_: (None, 0.0)).gate(a, w)
    assert found.config is None and f"excluded by OUTBLAS_EXCLUDE ({item})" in found.reason
