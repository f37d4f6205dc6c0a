"""The native table in its surroundings: its compilation, its loading, and the dispatch that fills it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.config import kernel_kind
from outblas.core.errors import ToolchainMissing, UsageError
from outblas.core.problem import Problem
from outblas.dispatch import device_registry, device_state, native_table, product
from outblas.dispatch import matmul as dispatch
from outblas.dispatch.call_option import CallOption, call_option
from outblas.dispatch.decide import Decision
from outblas.dispatch.enable import Switch
from outblas.kernels.families.sm90_oddrows_gemm import Sm90OddrowsConfig
from outblas.kernels.families.sm90_wgmma.sm90_wgmma_gemm import FAMILY
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry import geometry, grid
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.runtime import launch, native, native_build
from outblas.runtime.launch import PreparedLaunch
from support.gpus.known import H200
from support.native_fixture import (  # noqa: F401
    MAPPED,
    FakeCuda,
    built_fixture,
    cuda_fixture,
    host_fixture,
    learn,
    needs_compiler,
    open_with_fixture,
    operands,
    prepared,
    table_fixture,
    torch,
)

pytestmark = needs_compiler


# -- building and loading --------------------------------------------------------------------------------


def test_an_extension_of_these_sources_is_used(table: Any, built: tuple[Any, Path]) -> None:
    assert built[0].SOURCE_ID == native_build.source_id() != "" and native.why_not() == ""


def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(ToolchainMissing, match="no-such-cc.*optional"):
        native_build.build(tmp_path, "no-such-cc")
    with pytest.raises(ToolchainMissing, match="does not compile: .*error"):
        native_build.build(tmp_path, "cc -DPyInit__native=1+")
    assert list(tmp_path.iterdir()) == []


def test_building_by_hand_says_where_it_went(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    real = native_build.build
    monkeypatch.setattr(native_build, "build", lambda report: real(tmp_path, report=report))
    assert native_build.main() == 0 and str(tmp_path / native_build.EXTENSION_NAME) in capsys.readouterr().out
    monkeypatch.setattr(native_build, "build", lambda report: real(tmp_path, "no-such-cc", report))
    assert native_build.main() == 2 and capsys.readouterr().err.startswith("error: ")


def test_building_says_when_the_parts_in_c_plus_plus_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    monkeypatch.setenv("CXX", "no-such-c++")
    assert native_build.build(tmp_path, report=told.append).is_file()
    assert len(told) == 1 and "the C++ parts are left out" in told[0] and "no-such-c++" in told[0]


def test_an_extension_that_cannot_be_used_says_why(table: Any, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    assert native.open_table("libnowhere.so.9")[1].endswith("libnowhere.so.9 cannot be loaded from libnowhere.so.9")
    monkeypatch.setenv("OUTBLAS_NATIVE", "0")
    assert native.open_table(cuda.path) == (None, "switched off by OUTBLAS_NATIVE")
    monkeypatch.delenv("OUTBLAS_NATIVE")
    monkeypatch.setattr(native, "source_id", lambda: "another")
    assert "different sources" in native.why_not()

    def absent() -> Any:
        raise ModuleNotFoundError("No module named 'outblas.dispatch._native'")

    monkeypatch.setattr(native, "extension", absent)
    assert "not built" in native.why_not() and "outblas.runtime.native_build" in native.why_not()


def test_a_torch_without_a_hook_is_refused(table: Any, monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    monkeypatch.delattr(torch._C, "_increment_version")
    found, reason = native.open_table(cuda.path)
    assert found is None and "_increment_version" in reason


@pytest.mark.parametrize("inference", [False, True])
def test_an_older_torch_counts_versions_one_by_one(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    tensor, real = torch.zeros(2), torch._C._increment_version
    with torch.inference_mode(inference):
        native._increment_version()((tensor,))

        def old(one: Any) -> None:
            if not isinstance(one, torch.Tensor):
                raise TypeError("expected a tensor")
            real((one,))

        monkeypatch.setattr(torch._C, "_increment_version", old)
        monkeypatch.setattr(torch.autograd.graph, "increment_version", old)
        native._increment_version()((tensor,))
    assert tensor._version == 2


# -- in the dispatch --------------------------------------------------------------------------------------

TUNED = Problem(64, 128, 256)
CONFIG = Sm90WgmmaConfig(64, 64, split_k=2, store="direct", pdl=True)
LIBRARY = Library("h200", (LibraryRow(TUNED, "lt_auto", plain=LibraryChoice(CONFIG, 1.2, 1.1, 1.3)),))


class Kernel:
    """A loaded kernel that hands out its launch, and nothing else."""

    def prepared(self, problem: Problem, c: Any) -> PreparedLaunch:
        return prepared(extents=(problem.m, problem.n, problem.k))


@pytest.fixture
def device(table: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The state of the device that CPU tensors are on, which has no index."""
    state = device_state.DeviceState(H200, LIBRARY, lambda problem, config: (Kernel(), 0.0))
    monkeypatch.setattr(device_registry, "devices", {None: state})
    monkeypatch.setattr(native_table, "table", table)
    monkeypatch.setattr(native_table, "table_matmul", table.matmul)
    monkeypatch.setattr(native_table, "is_compiling", torch.compiler.is_compiling)
    return state


FOUND, NOT_FOUND = Decision(CONFIG, TUNED, "won"), Decision(None, None, "lost")


def test_what_was_run_once_is_answered_by_the_table(table: Any, cuda: FakeCuda, device: Any) -> None:
    a, b, out = operands(m=64, n=128, k=256)
    assert device.kernel_ready(TUNED, CONFIG)
    product.remember(device, FOUND, (a, b, out, CallOption()), out)
    assert dispatch.matmul(a, b, out=out) is out and list(cuda[-1].extents) == [64, 128, 256]
    assert dispatch.matmul(a, b, out=out, pdl=False) is out and len(cuda) == 2
    torch.equal(dispatch.matmul(a, b, out=out, pdl=True), a @ b)  # not the call that was learned
    assert len(cuda) == 2


def test_what_is_torchs_for_good_is_remembered_so(table: Any, cuda: FakeCuda, device: Any) -> None:
    a, b, _ = operands(m=64, n=128, k=256)
    product.remember(device, FOUND, (a, b, None, CallOption()), None)  # not loaded yet, under capture
    assert table.counts()["remembered"] == 0
    device.failed[kernel_kind(TUNED, CONFIG)] = "does not compile"
    product.remember(device, FOUND, (a, b, None, CallOption()), None)
    product.remember(device, NOT_FOUND, (a.float(), b.float(), None, CallOption()), None)
    assert table.counts()["remembered"] == 2
    assert torch.equal(dispatch.matmul(a, b), a @ b) and len(cuda) == 0


def test_another_library_empties_the_table(
    table: Any, cuda: FakeCuda, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, out = operands(m=64, n=128, k=256)
    assert device.kernel_ready(TUNED, CONFIG)
    product.remember(device, FOUND, (a, b, out, CallOption()), out)
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    dispatch.use_library(LIBRARY)
    assert table.matmul(a, b, out, None) is None
    # A call that was under way with the library of before is not remembered.
    monkeypatch.setitem(
        device_registry.devices, None, device_state.DeviceState(H200, LIBRARY, lambda p, c: (Kernel(), 0.0))
    )
    product.remember(device, FOUND, (a, b, out, CallOption()), out)
    assert table.counts()["remembered"] == 0


@pytest.mark.parametrize("guarantee", ["accurate", "batch_invariant"])
def test_what_was_torchs_under_a_guarantee_of_the_process_is_asked_anew_without_it(
    table: Any, device: Any, monkeypatch: pytest.MonkeyPatch, guarantee: Any
) -> None:
    """A call's own guarantee needs torch with fp32 sums, or a refusal: the table gives neither."""
    switch = Switch("CPU", lambda guarantee: "")
    monkeypatch.setattr(native, "why_not", lambda: "the kernels of Python do")
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    a, b = torch.zeros(3, 4), torch.zeros(4, 2)
    assert switch.enable(guarantee)
    code = call_option(pdl=False).code
    assert torch.equal(dispatch.matmul(a, b), a @ b) and torch.equal(table.matmul(a, b, None, code), a @ b)
    switch.disable()
    assert table.matmul(a, b, None, code) is None
    if guarantee == "batch_invariant":
        with pytest.raises(UsageError, match="batch_invariant is not possible: torch.float32"):
            dispatch.matmul(a, b, batch_invariant=True)


def test_status_says_what_serves(table: Any, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_registry, "devices", {0: device})
    way = table.counts()["reads_by"]
    assert dispatch.status()["cuda:0"]["host_path"] == f"native: 0 calls remembered, read by {way}, 0 launched"
    monkeypatch.setattr(native_table, "table", None)
    assert "no product was asked for" in dispatch.status()["cuda:0"]["host_path"]
    monkeypatch.setattr(native_table, "why_no_table", "not built")
    assert dispatch.status()["cuda:0"]["host_path"] == "python: not built"


def test_the_table_is_opened_once_and_never_asked_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    monkeypatch.setattr(native_table, "open_table", lambda: tries.append(1) or (None, "not built"))
    for name, value in (("table", None), ("why_no_table", ""), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    native_table.open_once(), native_table.open_once()
    assert len(tries) == 1 and native_table.table_matmul is None and native_table.why_no_table == "not built"


@pytest.fixture(name="loads")
def loads_fixture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that loads any kernel, as the recording library's; the real one for its enumerations."""
    real = pytest.importorskip("cuda.bindings.driver")

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def cuCtxGetCurrent(self) -> Any:
            return real.CUresult.CUDA_SUCCESS, real.CUcontext(77)

        def cuModuleLoadData(self, image: bytes) -> Any:
            return real.CUresult.CUDA_SUCCESS, real.CUmodule(5)

        def cuModuleGetFunction(self, module: Any, entry: bytes) -> Any:
            return real.CUresult.CUDA_SUCCESS, real.CUfunction(MAPPED)

        def cuFuncSetAttribute(self, *_: Any) -> Any:
            return (real.CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(launch, "driver", Driver)
    monkeypatch.setattr(launch, "gpu_of_device", lambda index: H200)
    return real


def test_a_loaded_kernel_tells_its_launch(table: Any, cuda: FakeCuda, loads: Any) -> None:
    """The numbers of geometry, grid and boxes, in the driver's own enumerations; launched as they are."""
    real = loads
    cubin = SimpleNamespace(image=b"", entry="gemm")
    a, b, c = operands(m=64, n=128, k=256)
    made = launch.LoadedKernel(cubin, CONFIG).prepared(TUNED, c)  # type: ignore[arg-type]
    shape = geometry(TUNED, CONFIG)
    assert made[:8] == (
        MAPPED, 77, grid(TUNED, CONFIG, H200.sms), shape.threads, shape.smem_bytes, 2, True, (64, 128, 256),
    )  # fmt: skip
    assert made.output == ((64, 128), (128, 1), torch.float16)
    swizzles, kinds = real.CUtensorMapSwizzle, real.CUtensorMapDataType
    assert [m[:4] for m in made.maps] == list(FAMILY.tensor_boxes(TUNED, CONFIG))
    assert [m[4] for m in made.maps] == [kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16] * 3
    assert made.maps[0][5:] == (
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B, real.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    )  # fmt: skip
    learn(table, a, b, c, made)
    assert table.matmul(a, b, c, False) is c
    seen = cuda[-1]
    assert tuple(seen.grid) == made.grid and seen.shared_bytes == shape.smem_bytes and seen.attribute_count == 2
    assert seen.maps[0][9] == kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 and seen.maps[0][11] == made.maps[0][5]


def test_a_kernel_for_odd_rows_tells_the_maps_of_its_combs(table: Any, cuda: FakeCuda, loads: Any) -> None:
    problem, config = Problem(65, 131, 333), Sm90OddrowsConfig(64, 64)
    a, b, c = operands(m=65, n=131, k=333)
    made = launch.LoadedKernel(SimpleNamespace(image=b"", entry="gemm"), config).prepared(problem, c)  # type: ignore[arg-type]
    made = made._replace(function=4001)  # the recording library's handle of such a kernel
    assert len(made.maps) == 16
    assert [m[:4] + m[7:] for m in made.maps[:2]] == [(9, 333, 8, 64, 2664, 0), (8, 338, 8, 64, 2664, 656)]
    assert [m[:4] + m[7:] for m in made.maps[8:10]] == [(17, 333, 8, 64, 2664, 0), (17, 338, 8, 64, 2664, 656)]
    learn(table, a, b, c, made)
    assert table.matmul(a, b, c, False) is c and cuda.encoded == 16
    assert table.matmul(a, b, c, False) is c and cuda.encoded < 24  # two maps may want one place
    # The recording library keeps the first map of each operand's eight: address, columns, rows, bytes between rows.
    for words, tensor, spec in zip(cuda[-1].maps[:2], (a, b), made.maps[::8], strict=True):
        assert [words[0], *words[2:5]] == [tensor.data_ptr(), spec[1], spec[0], 2 * spec[7]]
    assert [*cuda[-1].extents] == [65, 131, 333] and [*cuda[-1].addresses[1:]] == [b.data_ptr(), c.data_ptr()]
    moved = made._replace(maps=tuple(m[:8] + (16 * i,) for i, m in enumerate(made.maps)))
    table.forget()
    learn(table, a, b, c, moved)
    assert table.matmul(a, b, c, False) is c
    assert [words[0] - t.data_ptr() for words, t in zip(cuda[-1].maps[:2], (a, b), strict=True)] == [0, 128]


@pytest.mark.parametrize("asked", ["traced", "is_compiling"])
def test_traces_never_see_the_table(table: Any, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    question = native.tracing_check() if asked == "traced" else torch.compiler.is_compiling
    calls: list[Any] = []

    class Counted:
        @staticmethod
        def matmul(*call: Any) -> Any:
            calls.append(call)
            return table.matmul(*call)

    monkeypatch.setattr(native_table, "table_matmul", Counted.matmul)
    monkeypatch.setattr(native_table, "is_compiling", question)
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    learn(table, a, b, None)
    compiled = torch.compile(lambda x, y: dispatch.matmul(x, y), backend="eager", fullgraph=True)
    assert torch.equal(compiled(a, b), a @ b) and not calls
    assert torch.equal(dispatch.matmul(a, b), a @ b) and len(calls) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_are_torchs(
    table: Any, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    class Product(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, y: Any) -> Any:
            return dispatch.matmul(x, y)

    monkeypatch.setattr(native_table, "table_matmul", table.matmul)
    monkeypatch.setattr(native_table, "is_compiling", native.tracing_check())
    a, b, _ = operands()
    learn(table, a, b, None, prepared())
    program = torch.export.export(Product(), (a, b), strict=strict)
    assert "matmul" in str(program.graph) and torch.equal(program.module()(a, b), a @ b)
    assert len(cuda) == 0


def test_another_torchs_way_to_say_that_it_compiles_is_asked_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.tracing_check() is torch.compiler.is_dynamo_compiling
    assert native._hooks()["compiling"] is vars(torch.compiler)

    def is_compiling() -> bool:
        return bool(torch.compiler._is_compiling_flag or torch.jit.is_tracing())

    for another in (is_compiling, len):
        monkeypatch.setattr(torch.compiler, "is_compiling", another)
        assert native.tracing_check() is another and native._hooks()["compiling"] is None


# -- below autograd ------------------------------------------------------------------------------------------


def test_below_autograd_what_is_torchs_is_left_to_who_asks(table: Any, cuda: FakeCuda) -> None:
    a, b, out = operands()
    learn(table, a, b, None, prepared())
    learn(table, a.float(), b.float(), None)
    assert table.ours(a.float(), b.float(), None, 0) is NotImplemented
    assert table.ours(a[:8], b, None, 0) is None and len(cuda) == 0
    assert table.ours(a, b, None, 0).shape == out.shape and len(cuda) == 1
    with pytest.raises(TypeError, match="4 arguments"):
        table.ours(a, b)


def test_below_autograd_a_gradient_is_not_lost(table: Any, cuda: FakeCuda) -> None:
    """torch's kernels are called with operands that want one, while it is enabled."""
    a, b, _ = operands()
    learn(table, a, b, None, prepared())
    a.requires_grad_()
    assert table.matmul(a, b, None, 0) is None and len(cuda) == 0
    result = table.ours(a, b, None, 0)
    assert len(cuda) == 1 and not result.requires_grad
    with torch.autocast("cpu"):
        assert table.ours(a, b, None, 0) is None, "autocast is above: this is a call from elsewhere"


def test_products_of_torchs_kernels_are_answered_by_the_table(
    table: Any, cuda: FakeCuda, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learned from a call that wants a gradient, too."""
    monkeypatch.setattr(device_registry, "DEVICE_TYPE", "cpu")
    a, b, out = operands(m=64, n=128, k=256)
    a.requires_grad_()
    assert device.kernel_ready(TUNED, CONFIG)
    made = prepared(extents=(64, 128, 256), output=((64, 128), (128, 1), torch.float16))
    monkeypatch.setattr(device, "prepared", lambda decision, c: (made, None))
    monkeypatch.setattr(device, "run", lambda *call: out)
    monkeypatch.setattr(device, "decide", lambda *call: FOUND)
    assert product.run_below_autograd(a, b) is out and len(cuda) == 0 and table.counts()["remembered"] == 1
    assert product.run_below_autograd(a, b).shape == out.shape and len(cuda) == 1
    batch = a.detach().view(8, 8, 256)
    assert dispatch.run_matmul(batch, b, None, CallOption()).shape == (8, 8, 128) and len(cuda) == 2
    table.forget()
    monkeypatch.setattr(device, "decide", lambda *call: NOT_FOUND)
    assert product.run_below_autograd(a, b) is None and table.counts()["remembered"] == 1
    assert product.run_below_autograd(a, b) is None and dispatch.run_matmul(batch, b, None, CallOption()) is None
    assert len(cuda) == 2
