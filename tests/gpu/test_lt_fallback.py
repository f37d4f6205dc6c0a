"""Rows where no kernel wins, on a GPU: the named algorithm of cuBLASLt, by the Python path and by the native table."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402

import outblas  # noqa: E402
from outblas.core.config import KernelConfig  # noqa: E402
from outblas.core.problem import ROW_ALIGN_BYTES, Problem  # noqa: E402
from outblas.core.rivals import AUTO_REQUEST  # noqa: E402
from outblas.dispatch import device_registry, native_table  # noqa: E402
from outblas.dispatch.device_state import DeviceState  # noqa: E402
from outblas.judge.reference import Reference  # noqa: E402
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig  # noqa: E402
from outblas.kernels.geometry import workspace_bytes  # noqa: E402
from outblas.kernels.legality import why_illegal  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow  # noqa: E402
from outblas.runtime import native  # noqa: E402
from outblas.runtime.cublas import CublasLt, describe  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas.runtime.kernel_loader import load_kernel  # noqa: E402
from support.gpus.gpu_operands import operands  # noqa: E402
from support.gpus.known import H200  # noqa: E402

pytestmark = pytest.mark.gpu

PLAIN = [
    Problem(1024, 1024, 512),
    Problem(1024, 1024, 512, "NN", "bf16"),
    Problem(127, 1001, 333),
    Problem(1, 512, 512),
]
DEEP = Problem(64, 128, 16384)  # few tiles: cuBLASLt proposes to split K over a workspace
UNKNOWN = Problem(512, 512, 512)
BY_TORCH = Problem(256, 256, 512)
NEARLY = Problem(256, 384, 512)
KERNEL_ROW = Problem(256, 512, 12288)
KERNEL = Sm90WgmmaConfig(64, 64, 64, 8, split_k=4, store="direct", split_kind="workspace")
PDL_ONLY = Problem(512, 1024, 512)


def proposed(problem: Problem, workspace: bool) -> str:
    """Return the name of cuBLASLt's first proposal with, or without, a workspace; "" if none exists."""
    lt, needs = CublasLt(), dict[str, int]()
    plan = lt.plan(problem)
    for result in plan.heuristic(AUTO_REQUEST, ROW_ALIGN_BYTES):
        needs.setdefault(describe(result.algo), result.workspace)  # of two with one name the first is taken
    plan.close(), lt.close()
    return next((name for name, need in needs.items() if (need > 0) == workspace), "")


def choice(config: KernelConfig) -> LibraryChoice:
    return LibraryChoice(config, 1.2, 1.1, 1.3)


@pytest.fixture(scope="module")
def rows() -> dict[Problem, LibraryRow]:
    if gpu_of_device(0).arch != 90:
        pytest.skip("the library's rows are for Hopper")
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.mm(torch.zeros(8, 8, device="cuda"), torch.zeros(8, 8, device="cuda"))  # torch has loaded its cuBLAS
    assert workspace_bytes(KERNEL_ROW, KERNEL) and why_illegal(KERNEL_ROW, KERNEL, H200) is None
    found = {p: LibraryRow(p, "lt_auto", f"index=3/8 {proposed(p, False)}", "test") for p in PLAIN}
    found[DEEP] = LibraryRow(DEEP, "lt_auto", f"index=0/8 {proposed(DEEP, True)}", "test")
    found[UNKNOWN] = LibraryRow(UNKNOWN, "lt_auto", "index=0/8 id=9999 tile=9999", "test")
    found[BY_TORCH] = LibraryRow(BY_TORCH, "torch", "torch", "test")
    found[NEARLY] = LibraryRow(NEARLY, "torch", "torch", "test", lt_auto_detail=f"index=0/8 {proposed(NEARLY, False)}")
    found[KERNEL_ROW] = LibraryRow(KERNEL_ROW, "lt_auto", "", "test", choice(KERNEL), choice(KERNEL))
    dependent = choice(Sm90WgmmaConfig(128, 128, stages=4, consumers=2, pdl=True))
    found[PDL_ONLY] = LibraryRow(PDL_ONLY, "lt_heuristic", proposed(PDL_ONLY, False), "test", pdl=dependent)
    return found


@pytest.fixture(autouse=True)
def device(rows: dict[Problem, LibraryRow], monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceState]:
    """The rows above, and a table of this test's own (where it is built)."""
    gpu = gpu_of_device(0)
    state = DeviceState(gpu, Library(gpu.name, tuple(rows.values())), load_kernel)
    monkeypatch.delenv("OUTBLAS_PDL", raising=False)
    monkeypatch.setattr(device_registry, "devices", {0: state})
    for name, value in (("table", None), ("why_no_table", ""), ("table_matmul", None)):
        monkeypatch.setattr(native_table, name, value)
    yield state
    torch.cuda.synchronize()


@pytest.fixture
def table() -> Any:
    if native.why_not():
        pytest.skip(native.why_not())
    outblas.matmul(torch.zeros(8, 8, device="cuda"), torch.zeros(8, 8, device="cuda"))  # opens it
    assert native_table.table is not None, native_table.why_no_table
    return native_table.table


def launches(table: Any) -> int:
    return int(table.counts()["launches"])


def error(problem: Problem, a: Any, stored: Any, c: Any) -> float:
    return float(Reference(problem, a, stored).worst_error_ratio(c))


def needs_workspaces(rows: dict[Problem, LibraryRow]) -> None:
    if not rows[DEEP].fallback:
        pytest.skip("this cuBLASLt proposes nothing with a workspace")


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("problem", [*PLAIN, DEEP], ids=lambda p: p.key)
def test_the_named_algorithm_is_right(problem: Problem, with_out: bool, device: DeviceState, rows: Any) -> None:
    if problem == DEEP:
        needs_workspaces(rows)
    name = rows[problem].fallback
    assert name
    for seed in (0, 0, 1):
        a, b, stored = operands(problem, seed)
        out = torch.full((problem.m, problem.n), torch.nan, dtype=a.dtype, device="cuda") if with_out else None
        version = None if out is None else out._version
        for _ in range(3):
            c = outblas.matmul(a, b, out=out)
            assert c.shape == (problem.m, problem.n) and (c is out) == with_out
        assert error(problem, a, stored, c) <= 1.0
        assert out is None or out._version == version + 3
    assert device.status()["algorithms_found"] == 1 and not device.status()["failures"]
    assert outblas.explain(a, b).startswith(f"cuBLASLt {name} for {problem.key}: ")


def test_repeated_calls_go_by_the_table(table: Any, rows: Any) -> None:
    for problem in (*PLAIN, *([DEEP] if rows[DEEP].fallback else [])):
        a, b, stored = operands(problem)
        expected, before = outblas.matmul(a, b), launches(table)
        for _ in range(20):
            assert torch.equal(outblas.matmul(a, b), expected)
        assert launches(table) == before + 20 and error(problem, a, stored, expected) <= 1.0
    assert outblas.status()["cuda:0"]["host_path"].endswith(f"{launches(table)} launched")


def test_a_row_with_a_kernel_for_pdl_only(device: DeviceState, rows: Any) -> None:
    a, b, stored = operands(PDL_ONLY)
    assert outblas.explain(a, b, pdl=True).startswith("sm90_wgmma_gemm")
    assert outblas.explain(a, b, pdl=False).startswith(f"cuBLASLt {rows[PDL_ONLY].fallback}")
    for pdl in (False, True, False):
        assert error(PDL_ONLY, a, stored, outblas.matmul(a, b, pdl=pdl)) <= 1.0
    assert device.status()["algorithms_found"] == 1 and device.status()["kernels_loaded"] == 1


def test_an_unknown_algorithm_is_torchs_with_a_reason(device: DeviceState) -> None:
    a, b, _ = operands(UNKNOWN)
    assert "id=9999 tile=9999 cannot be used: it is not among the" in outblas.explain(a, b)
    for _ in range(3):
        assert torch.equal(outblas.matmul(a, b), torch.matmul(a, b))
    assert outblas.explain(a, b).startswith("torch.matmul: ") and len(device.status()["failures"]) == 1


def test_where_torch_was_the_fastest_it_is_torch(device: DeviceState) -> None:
    a, b, _ = operands(BY_TORCH)
    assert torch.equal(outblas.matmul(a, b), torch.matmul(a, b))
    assert device.status()["algorithms_found"] == 0 and outblas.explain(a, b).startswith("torch.matmul: ")


def test_where_torch_was_hardly_faster_it_is_what_autotuning_chose(device: DeviceState, rows: Any) -> None:
    a, b, stored = operands(NEARLY)
    assert error(NEARLY, a, stored, outblas.matmul(a, b)) <= 1.0
    assert device.status()["algorithms_found"] == 1 and rows[NEARLY].fallback in outblas.explain(a, b)


def test_misaligned_operands_are_torchs(device: DeviceState) -> None:
    problem = PLAIN[0]
    a, b, _ = operands(problem)
    shifted = torch.empty(a.numel() + 1, dtype=a.dtype, device="cuda")[1:].view_as(a).copy_(a)
    assert "not aligned to 16 bytes" in outblas.explain(shifted, b)
    assert torch.allclose(outblas.matmul(shifted, b).double(), a.double() @ b.double(), rtol=1e-2, atol=0.25)
    assert device.status()["algorithms_found"] == 0


def both(rows: dict[Problem, LibraryRow]) -> list[Problem]:
    """An algorithm without a workspace, a kernel with one and, where there is any, an algorithm with one."""
    return [PLAIN[0], KERNEL_ROW, *([DEEP] if rows[DEEP].fallback else [])]


@pytest.mark.parametrize("by_table", [False, True])
def test_two_streams_at_once(by_table: bool, rows: Any, request: pytest.FixtureRequest, monkeypatch: Any) -> None:
    """Kernels and algorithms take turns on each stream and share its workspace; the streams run at the same time."""
    if by_table:
        request.getfixturevalue("table")
    else:
        monkeypatch.setattr(native_table, "why_no_table", "left out by this test")
    problems = both(rows)
    sets = {p: operands(p) for p in problems}
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    expected = {p: outblas.matmul(*sets[p][:2]) for p in problems}
    results: list[tuple[Problem, Any]] = []
    for stream in streams:  # what the streams need is made, so that the rest is not held up
        with torch.cuda.stream(stream):
            results += [(p, outblas.matmul(*sets[p][:2])) for p in problems]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(5_000_000)
    before = launches(native_table.table) if by_table else 0
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results += [(p, outblas.matmul(*sets[p][:2])) for p in problems]
    torch.cuda.synchronize()
    assert all(torch.equal(c, expected[p]) for p, c in results)
    for p in problems:
        assert error(p, sets[p][0], sets[p][2], expected[p]) <= 1.0
    if by_table:
        assert launches(native_table.table) == before + 40 * len(problems)


def test_threads_with_streams_of_their_own(table: Any, rows: Any) -> None:
    problems = both(rows)
    sets = {(p, i): operands(p, i) for p in problems for i in range(6)}
    torch.cuda.synchronize()
    results: dict[tuple[Problem, int], list[Any]] = {key: [] for key in sets}
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(20):
                    for p in problems:
                        a, b, _ = sets[p, index]
                        results[p, index].append(outblas.matmul(a, b))
            stream.synchronize()
        except BaseException as raised:
            failures.append(raised)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for (p, i), made in results.items():
        assert error(p, sets[p, i][0], sets[p, i][2], made[-1]) <= 1.0
        assert all(torch.equal(c, made[-1]) for c in made)
    assert launches(table) > 0


def captured(a: Any, b: Any, stream: Any = None) -> tuple[Any, Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        c = outblas.matmul(a, b)
    return graph, c


def test_an_algorithm_without_a_workspace_is_captured(table: Any) -> None:
    problem = PLAIN[0]
    a, b, stored = operands(problem)
    outblas.matmul(a, b)
    before = launches(table)
    graph, c = captured(a, b)
    assert launches(table) == before + 1
    for seed in (1, 2):
        x, _, w = operands(problem, seed)
        a.copy_(x), stored.copy_(w)
        graph.replay()
        torch.cuda.synchronize()
        assert error(problem, x, w, c) <= 1.0


def test_what_needs_a_workspace_is_captured_with_one_of_the_graphs(table: Any, rows: Any) -> None:
    for problem in both(rows)[1:]:
        a, b, stored = operands(problem)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            outblas.matmul(a, b), outblas.matmul(a, b)
        torch.cuda.synchronize()
        before = launches(table)
        with torch.cuda.graph(graph, stream=stream):
            made = [outblas.matmul(a, b) for _ in range(3)]
        assert launches(table) == before + 2, "all but the first, for which the dispatch makes the workspace"
        for seed in (1, 2):
            x, _, w = operands(problem, seed)
            a.copy_(x), stored.copy_(w)
            graph.replay()
            stream.wait_stream(torch.cuda.current_stream())  # which fills the operands
            with torch.cuda.stream(stream):
                again = outblas.matmul(a, b)
            torch.cuda.synchronize()
            assert all(error(problem, x, w, c) <= 1.0 for c in (*made, again))
        assert launches(table) == before + 4, "outside of the capture the stream's own serves again"


def test_an_algorithm_that_never_ran_is_left_out_of_a_capture(device: DeviceState) -> None:
    problem = PLAIN[0]
    a, b, stored = operands(problem)
    torch.matmul(a, b)
    graph, c = captured(a, b)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(c.double(), a.double() @ b.double(), rtol=1e-2, atol=0.25)
    assert device.status()["algorithms_found"] == 0
    assert error(problem, a, stored, outblas.matmul(a, b)) <= 1.0 and device.status()["algorithms_found"] == 1


def test_it_follows_the_callers_stream(table: Any, rows: Any) -> None:
    """The input is made on a side stream behind a long wait; nothing but stream order protects the product."""
    for problem in both(rows):
        a, b, _ = operands(problem)
        expected = outblas.matmul(a, b)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outblas.matmul(a, b)  # makes its workspace, which waits
        late = torch.zeros_like(a)
        torch.cuda.synchronize()
        before = launches(table)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late.copy_(a)
            c = outblas.matmul(late, b)
        stream.synchronize()
        assert torch.equal(c, expected) and launches(table) == before + 1


def test_another_library_is_obeyed_at_once(table: Any, rows: Any) -> None:
    problem = both(rows)[-1]
    a, b, _ = operands(problem)
    outblas.matmul(a, b), outblas.matmul(a, b)
    before = launches(table)
    outblas.use_library(
        Library(gpu_of_device(0).name, (replace(rows[problem], baseline="torch", plain=None, pdl=None),))
    )
    for _ in range(2):
        assert torch.equal(outblas.matmul(a, b), torch.matmul(a, b))
    assert launches(table) == before
