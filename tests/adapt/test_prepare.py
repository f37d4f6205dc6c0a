"""``outblas.prepare``: a model's products, the code that runs each, and the kernels that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="models are of torch")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import outblas  # noqa: E402
from outblas.core.errors import RecordError, UsageError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.dispatch import device_registry  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.tune import prepare as prepare_module  # noqa: E402
from outblas.tune import tune_captured  # noqa: E402
from outblas.tune.prepare import ALGORITHM, LIBRARY, TORCH, UNLISTED, PreparedProduct, PrepareReport  # noqa: E402
from support.fused_fixture import host_fixture  # noqa: F401  # noqa: E402
from support.gpus.known import H200  # noqa: E402
from support.models import decoder_blocks as blocks  # noqa: E402
from support.served_fixture import ANY, Served, served_fixture  # noqa: F401  # noqa: E402

CHOICE = LibraryChoice(ANY, 1.2, 1.1, 1.3)
ROWS = {
    256: LibraryRow(Problem(8, 256, 128), "lt_auto", plain=CHOICE),
    512: LibraryRow(Problem(8, 512, 128), "torch"),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTBLAS_PDL", "OUTBLAS_WEIGHTS", "OUTBLAS_FUSED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(prepare_module, "gpu_count", lambda: 0)


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with two rows, and a chooser that has a kernel for N = 384 alone."""
    library = Library("h200", tuple(ROWS.values()))
    monkeypatch.setattr(Library, "packaged", lambda name: library)
    choose = lambda problem, gpu, launch: CHOICE if problem.n == 384 else None  # noqa: E731
    monkeypatch.setattr(prepare_module, "any_shape_chooser", lambda name, library: choose)


def layers(*sizes: tuple[int, bool, Any]) -> nn.Sequential:
    """Return layers of 128 inputs without data: (outputs, bias, dtype) each."""
    return nn.Sequential(*[nn.Linear(128, n, bias=bias, dtype=dtype, device="meta") for n, bias, dtype in sizes])


def ways(report: PrepareReport) -> dict[tuple[int, str], str]:
    return {(one.n, one.dtype): one.way for one in report.products}


def test_each_product_goes_the_way_of_the_dispatch(packaged: None) -> None:
    half = torch.float16
    model = layers((256, False, half), (256, False, half), (512, False, half), (384, False, half), (640, False, half),
                   (256, False, torch.bfloat16), (64, False, torch.float32))  # fmt: skip
    report = outblas.prepare(model, m=8)
    assert ways(report) == {
        (256, "fp16"): LIBRARY, (512, "fp16"): TORCH, (384, "fp16"): UNLISTED, (640, "fp16"): TORCH,
        (256, "bf16"): TORCH, (64, "float32"): TORCH,
    }  # fmt: skip
    counts = {(one.n, one.dtype): one.count for one in report.products}
    assert counts[256, "fp16"] == 2 and counts[256, "bf16"] == 1
    assert sum(one.share for one in report.products) == pytest.approx(1)
    assert [one.share for one in report.products] == sorted((one.share for one in report.products), reverse=True)
    assert all(one.ready is None and one.fused is None for one in report.products)
    assert report.gpu == "h200" and report.basis == "roofline floors"
    assert report.notes == ["no CUDA GPU: nothing was tuned, compiled or loaded"]


def test_shares_are_floors_times_counts(packaged: None) -> None:
    from outblas.core.roofline import floor_us

    report = outblas.prepare(
        layers((256, False, torch.float16), (256, False, torch.float16), (8192, False, torch.float16)), m=4096
    )
    floors = {n: floor_us(Problem(4096, n, 128), H200) for n in (256, 8192)}
    share = 2 * floors[256] / (2 * floors[256] + floors[8192])
    assert {one.n: one.share for one in report.products} == pytest.approx({256: share, 8192: 1 - share})


@pytest.mark.parametrize(
    ("variable", "way", "follows"),
    [(None, LIBRARY, "bias in graphs"), ("1", LIBRARY, "bias"), ("0", TORCH, "")],
)
def test_the_report_says_when_a_kernel_adds_a_bias(
    packaged: None, monkeypatch: pytest.MonkeyPatch, variable: str | None, way: str, follows: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("OUTBLAS_FUSED", variable)
    (one,) = outblas.prepare(layers((256, True, torch.float16)), m=8).products
    assert (one.way, one.follows) == (way, follows)
    assert ("OUTBLAS_FUSED=0" in one.reason) == (variable == "0")
    (single,) = outblas.prepare(layers((256, True, torch.float32)), m=8).products
    assert (single.way, single.follows) == (TORCH, ""), "no kernel is for fp32"


def test_several_numbers_of_rows_are_listed_one_after_the_other(packaged: None) -> None:
    report = outblas.prepare(layers((256, False, torch.float16), (512, False, torch.float16)), m=(8, 16))
    assert [one.m for one in report.products] == [8, 8, 16, 16]
    assert {(one.m, one.n): one.way for one in report.products}[16, 256] == TORCH, "no row of 16 rows"


def test_the_text_is_a_table_with_its_notes(packaged: None) -> None:
    lines = str(outblas.prepare(layers((256, False, torch.float16)), m=8)).splitlines()
    assert lines[0] == "products on h200; shares: roofline floors"
    assert lines[1].split() == ["M", "N", "K", "dtype", "count", "share", "runs", "in", "then"]
    assert lines[2].split() == ["8", "256", "128", "fp16", "1", "100.0%", "library", "kernel"]
    assert lines[3] == "no CUDA GPU: nothing was tuned, compiled or loaded"
    odd = PreparedProduct(1, 2, 3, "fp16", "gated silu", 1, 1.0, LIBRARY, "", ready=False, fused=False)
    assert "library kernel (not loaded)  gated silu (by torch)" in str(PrepareReport("x", "y", [odd]))


def test_merged_layers_are_one_product_with_what_follows(packaged: None) -> None:
    model = blocks.Decoder().eval().to(torch.float16)
    apart = outblas.prepare(model, m=8)
    assert {(one.n, one.k, one.count) for one in apart.products} == {(32, 32, 8), (48, 32, 4), (32, 48, 2)}
    outblas.optimize(model)
    report = outblas.prepare(model, m=8)
    assert sorted((one.n, one.k, one.count, one.follows) for one in report.products) == [
        (32, 32, 2, "+ residual"), (32, 48, 2, "+ residual"), (96, 32, 2, ""), (96, 32, 2, "gated gelu_tanh"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("m", "seconds"),
    [
        (0, 0),
        ((), 0),
        ((1, -2), 0),
        ("8", 0),
        (8.0, 0),
        (None, 0),
        (True, 0),
        (1, -1.0),
        (1, float("inf")),
        (1, "5"),
        (1, True),
        (1, 10**400),
    ],
)
def test_wrong_arguments_are_refused(m: Any, seconds: Any) -> None:
    with pytest.raises(UsageError):
        outblas.prepare(nn.Linear(8, 8), m=m, tune_seconds=seconds)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="no linear layer"):
        outblas.prepare(nn.ReLU())


@pytest.fixture
def gpu(served: Served, host: Any, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A device that serves CPU tensors, and notes which kernels and algorithms it loads."""
    served.loaded = []  # type: ignore[attr-defined]

    def ready(problem: Problem, config: Any, capturing: Any = None) -> bool:
        served.loaded.append(problem)  # type: ignore[attr-defined]
        return problem.n != 640

    monkeypatch.setattr(device_registry, "devices", {None: served, 0: served})
    monkeypatch.setattr(served, "kernel_ready", ready)
    monkeypatch.setattr(served, "algorithm_ready", ready)
    return served


def test_a_gpu_loads_every_kernel_that_is_needed(gpu: Served) -> None:
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(128, 640, bias=False), nn.Linear(128, 64)).half()
    report = outblas.prepare(model, m=(8, 16))
    assert sorted(one.mnk for one in gpu.loaded) == ["16_256_128", "16_640_128", "8_256_128", "8_640_128"]  # type: ignore[attr-defined]
    assert {(one.n, one.ready) for one in report.products} == {(256, True), (640, False), (64, True)}
    assert report.basis == "the ranking model" and report.notes == []


def test_a_gpu_finds_the_algorithms_that_the_library_names(gpu: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from outblas.dispatch.decide import Decision

    decision = Decision(None, Problem(8, 256, 128), "the fastest rival", "algorithm 7")
    monkeypatch.setattr(gpu, "decide", lambda a, b, out, launch, guarantee: decision)
    (one,) = outblas.prepare(nn.Linear(128, 256, bias=False).half(), m=8).products
    assert (one.way, one.ready) == (ALGORITHM, True) and gpu.loaded == [Problem(8, 256, 128)]  # type: ignore[attr-defined]


def test_a_gpu_compiles_the_fused_kernels_of_an_optimised_model(gpu: Served, host: Any) -> None:
    model = blocks.Decoder().eval().to(torch.float16)
    outblas.optimize(model)
    report = outblas.prepare(model, m=8)
    assert {one.follows: one.fused for one in report.products} == {
        "": None,
        "gated gelu_tanh": True,
        "+ residual": True,
    }
    launched = host.launched
    with torch.no_grad():
        model(blocks.rows(1, 8, dtype=torch.float16))
    assert launched == 3, "each kind ran once"
    assert host.launched == launched + 2 * 3 and host.status()["being_compiled"] == 0


def test_a_gpu_tunes_what_no_library_lists(gpu: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[Any] = []
    monkeypatch.setattr(gpu, "library", Library("h200", (ROWS[256],)))
    monkeypatch.setattr(tune_captured, "tune_counts", lambda *given: (tuned.append(given), (Path("mine.json"), 1))[1])
    renewed: list[Any] = []
    monkeypatch.setitem(device_registry._choosers, 0, None)
    monkeypatch.setattr(device_registry, "replace_library", lambda library, index: renewed.append((library, index)))
    model = nn.Sequential(*[nn.Linear(128, n, bias=False) for n in (256, 640, 640)]).half()
    report = outblas.prepare(model, m=8, tune_seconds=30, progress=print)
    (counts, where, seconds, command, progress), *more = tuned
    assert progress is print
    assert not more and counts == {Problem(8, 640, 128): 2} and str(where) == "cuda:0"
    assert seconds == 30 and command == "outblas.prepare" and renewed == [(None, 0)]
    assert report.notes == ["tuned: 1 of 1 problems within 30 s, winners in mine.json"]
    assert outblas.prepare(model[0], m=8, tune_seconds=30).notes == ["not tuned: the library contains every problem"]
    monkeypatch.delitem(device_registry._choosers, 0)
    (note,) = outblas.prepare(model, m=8, tune_seconds=30).notes
    assert note.endswith("outblas.use_library(None) uses them instead of the current library")
    assert len(renewed) == 1, "the program's library stays"


def test_layers_whose_bias_torch_adds_are_not_tuned(gpu: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(gpu, "library", Library("h200", ()))
    monkeypatch.setattr(tune_captured, "tune_counts", lambda *given: (asked.append(given[0]), (Path("a"), 1))[1])
    monkeypatch.setattr(device_registry, "replace_library", lambda library, index: None)
    model = nn.Sequential(nn.Linear(128, 640), nn.Linear(128, 384, bias=False)).half()
    outblas.prepare(model, m=8, tune_seconds=30)
    monkeypatch.setenv("OUTBLAS_FUSED", "0")
    outblas.prepare(model, m=8, tune_seconds=30)
    assert [sorted(problem.n for problem in counts) for counts in asked] == [[384, 640], [384]]


def test_a_bias_that_a_kernel_adds_is_compiled(gpu: Served, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_is_on_gpu", lambda one: True)
    model = nn.Sequential(nn.Linear(128, 384)).half()
    (one,) = outblas.prepare(model, m=8).products
    assert one.fused is True and one.ready is True and one.follows == "bias in graphs" and host.launched == 1
    monkeypatch.setattr(prepare_module, "warm", lambda *given, **more: False)
    (one,) = outblas.prepare(model, m=8).products
    assert one.fused is False and one.way == TORCH and one.ready is None
    monkeypatch.setenv("OUTBLAS_FUSED", "0")
    assert outblas.prepare(model, m=8).products[0].fused is None


def test_without_a_gpu_nothing_is_tuned(packaged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_captured, "tune_counts", lambda *given: pytest.fail("tuned"))
    assert "no CUDA GPU" in outblas.prepare(layers((640, False, torch.float16)), m=8, tune_seconds=5).notes[0]


def test_counts_are_tuned_by_their_share_into_the_users_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[Any]
) -> None:
    from outblas.runtime.device import Device

    small, large = Problem(4096, 256, 128), Problem(4096, 4096, 4096)
    alone = Problem(1, 256, 128)
    monkeypatch.setattr(tune_captured, "gpu_of_device", lambda index: H200)
    monkeypatch.setenv("OUTBLAS_LIBRARY", str(tmp_path / "mine.json"))
    counts = {small: 3, large: 1, alone: 1}
    path, reached = tune_captured.tune_counts(counts, Device(gpu_index=0), 30.0, "outblas.prepare")
    (request,) = searches
    assert list(request.problems) == [alone, large, small], "every number of rows has the same share"
    assert request.seconds == 30 and request.budgets[large] > request.budgets[small] == 4
    assert request.launch == "plain", "no call of this process runs kernels with PDL"
    assert path == tmp_path / "mine.json" and len(Library.load(path).rows) == reached == 3


@pytest.mark.parametrize(("place", "error"), [("", UsageError), ("{tmp}/file/mine.json", RecordError)])
def test_a_library_that_cannot_be_written_stops_the_search_before_it_begins(
    place: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searches: list[Any]
) -> None:
    from outblas.runtime.device import Device

    (tmp_path / "file").touch()
    monkeypatch.setattr(tune_captured, "gpu_of_device", lambda index: H200)
    monkeypatch.setenv("OUTBLAS_LIBRARY", place.format(tmp=tmp_path))
    with pytest.raises(error):
        tune_captured.tune_counts({Problem(8, 256, 128): 1}, Device(gpu_index=0), 30.0, "outblas.prepare")
    assert not searches
