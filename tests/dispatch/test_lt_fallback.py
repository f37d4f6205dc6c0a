"""Fall-backs to an algorithm of cuBLASLt, without a GPU: its name in a row, its look-up, and its use."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.config import Launch
from outblas.core.errors import DeviceError, OutblasError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.core.rivals import AUTO_REQUEST
from outblas.dispatch import device_registry, device_workspaces, native_table, product
from outblas.dispatch.call_option import CallOption
from outblas.dispatch.decide import Decision, Operand, decide
from outblas.dispatch.device_state import DeviceState
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.runtime import cublaslt
from outblas.runtime.cublas import WORKSPACE_BYTES
from outblas.runtime.cublaslt import LtAlgorithm, LtAlgorithms
from outblas.runtime.workspace import CaptureWorkspaces, StreamWorkspaces
from support.gpus.known import H200

PROBLEM = Problem(64, 128, 256)
FIRST, SECOND = "id=66 tile=20 splitk=1", "id=66 tile=15 splitk=4"
WON = LibraryChoice(Sm90WgmmaConfig(64, 64), 1.2, 1.1, 1.3)


# -- what a row names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baseline", "detail", "auto", "expected"),
    [
        ("lt_auto", f"index=3/8 {FIRST}", "", FIRST),
        ("lt_heuristic", FIRST, f"index=1/8 {SECOND}", FIRST),
        ("cublas", "cublasGemmEx default", f"index=1/8 {SECOND}", SECOND),
        ("torch", "torch 2.11.0", f"index=1/8 {SECOND}", SECOND),
        ("torch", "torch 2.11.0", "", ""),
        ("lt_auto", "", "", ""),
        ("", "", "", ""),
    ],
)
def test_a_row_names_what_runs_in_place_of_a_kernel(baseline: str, detail: str, auto: str, expected: str) -> None:
    assert LibraryRow(PROBLEM, baseline, detail, "cuda:0", lt_auto_detail=auto).fallback == expected


def rows(m: int, n: int, offset: int = 0) -> Operand:
    return Operand((m, n), (n, 1), "fp16", "cuda:0", offset)


def transposed(o: Operand) -> Operand:
    return o._replace(shape=o.shape[::-1], strides=o.strides[::-1])


def choose(
    row: LibraryRow, *operands: Operand | None, launch: Launch = "plain", more: tuple[LibraryRow, ...] = ()
) -> Decision:
    a, b, out = operands or (rows(64, 256), transposed(rows(128, 256)), None)
    assert a is not None and b is not None
    return decide(a, b, out, gpu=H200, library=Library("h200", (row, *more)), launch=launch)


def test_the_named_algorithm_is_decided_for_where_no_kernel_may_be_used() -> None:
    row = LibraryRow(PROBLEM, "lt_auto", f"index=3/8 {FIRST}", pdl=WON)
    found = choose(row)
    assert (found.config, found.problem, found.algorithm) == (None, PROBLEM, FIRST)
    assert "no kernel was proven faster than lt_auto" in found.reason
    assert choose(row, launch="pdl").config == WON.config and choose(row, launch="pdl").algorithm == ""
    by_torch = choose(LibraryRow(PROBLEM, "torch", "torch 2"))
    assert (by_torch.problem, by_torch.algorithm) == (None, "")


@pytest.mark.parametrize("which", range(3))
def test_operands_that_are_not_aligned_to_16_bytes_are_torchs(which: int) -> None:
    operands = [rows(64, 256), transposed(rows(128, 256)), rows(64, 128)]
    operands[which] = operands[which]._replace(offset=8)
    found = choose(LibraryRow(PROBLEM, "lt_auto", f"index=3/8 {FIRST}"), *operands)
    assert (found.problem, found.algorithm) == (None, "") and "not aligned to 16 bytes" in found.reason


def test_a_column_that_is_both_layouts_takes_a_kernel_of_either_before_an_algorithm() -> None:
    column = rows(64, 256), Operand((256, 1), (1, 1), "fp16", "cuda:0"), None
    tn, nn = Problem(64, 1, 256), Problem(64, 1, 256, "NN")
    falls = LibraryRow(tn, "lt_auto", f"index=0/2 {FIRST}")
    assert choose(falls, *column, more=(LibraryRow(nn, "lt_auto", f"index=0/2 {SECOND}"),)).algorithm == FIRST
    assert choose(falls, *column, more=(LibraryRow(nn, "torch"),)).problem == tn
    scalar = LibraryChoice(Sm80MmaConfig(64, 64, vec=1), 1.2, 1.1, 1.3)
    taken = choose(falls, *column, more=(LibraryRow(nn, "lt_auto", plain=scalar),))
    assert (taken.config, taken.problem, taken.algorithm) == (scalar.config, nn, "")


# -- finding it again --------------------------------------------------------------------------------------


class Plan:
    def __init__(self, owner: Lt, problem: Problem) -> None:
        self.owner, self.problem, self.closed = owner, problem, False

    def heuristic(self, count: int, alignment: int) -> list[Any]:
        self.owner.asked.append((self.problem, count, alignment))
        if self.owner.refuses:
            raise DeviceError("no algorithm for it", "one", "x")
        return [SimpleNamespace(algo=text, workspace=need) for text, need in self.owner.proposes]

    def matmul(self, algo: Any, a: int, b: int, c: int, stream: int, workspace: int | None = None) -> None:
        if self.owner.broken:
            raise DeviceError("cublasLtMatmul failed with CUBLAS_STATUS_NOT_SUPPORTED", "x", "x")
        self.owner.calls.append((algo, a, b, c, stream, workspace))

    def close(self) -> None:
        self.closed = True


class Lt:
    """A cuBLASLt without a GPU."""

    def __init__(self, *proposes: tuple[str, int]) -> None:
        self.proposes = proposes
        self.refuses = self.broken = False
        self.asked: list[Any] = []
        self.calls: list[Any] = []

    def plan(self, problem: Problem) -> Plan:
        return Plan(self, problem)


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> Lt:
    monkeypatch.setattr(cublaslt, "describe", lambda algo: algo)
    return Lt(("id=9", 0), (FIRST, 0), (SECOND, 4096))


class Tensor:
    def __init__(self, address: int) -> None:
        self.address, self.device = address, "cuda:0"

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return COUNTERS_BYTES + WORKSPACE_BYTES


def test_it_is_found_by_its_words_in_the_list_that_autotuning_timed(lt: Lt) -> None:
    calls = LtAlgorithms(lambda: lt, lambda: 77)
    assert calls.get(PROBLEM, FIRST) is None
    found = calls.find(PROBLEM, FIRST)
    assert found is not None and calls.find(PROBLEM, FIRST) is found is calls.get(PROBLEM, FIRST)
    assert lt.asked == [(PROBLEM, AUTO_REQUEST, 16)] and found.workspace_bytes == 0
    split = calls.find(PROBLEM, SECOND)
    assert split is not None and split.workspace_bytes == COUNTERS_BYTES + WORKSPACE_BYTES and calls.count == 2


def test_the_last_algorithms_and_failures_are_kept(lt: Lt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "MAX_FOUND", 2)
    calls = LtAlgorithms(lambda: lt, lambda: 77)
    problems = [Problem(m, 128, 256) for m in (1, 2, 3)]
    first = calls.find(problems[0], FIRST)
    assert first is not None and calls.find(problems[1], FIRST) is not None
    assert calls.get(problems[0], FIRST) is first, "it is now the last one used"
    assert calls.find(problems[2], FIRST) is not None and calls.count == 2
    assert calls.get(problems[1], FIRST) is None and calls.get(problems[0], FIRST) is first
    assert calls.find(problems[1], FIRST) is not None and len(lt.asked) == 4, "it is looked up again"
    for problem in problems:
        assert calls.find(problem, "id=67 tile=1") is None
    assert len(calls.failed) == 2


def test_an_algorithm_that_is_not_proposed_is_torchs_and_says_so(lt: Lt) -> None:
    calls = LtAlgorithms(lambda: lt, lambda: 77)
    assert calls.find(PROBLEM, "id=67 tile=1") is None and calls.find(PROBLEM, "id=67 tile=1") is None
    assert len(lt.asked) == 1
    why = calls.failed[PROBLEM, "id=67 tile=1"]
    assert "id=67 tile=1 cannot be used: it is not among the 3 that this cuBLASLt proposes" in why and "\n" not in why
    lt.refuses = True
    assert calls.find(Problem(1, 2, 3), FIRST) is None and "no algorithm" in calls.failed[Problem(1, 2, 3), FIRST]


@pytest.mark.parametrize("error", [ToolchainMissing("libcublasLt is not here", "x", "x"), DeviceError("x", "", "")])
def test_cublas_that_cannot_be_loaded_is_tried_once(error: OutblasError) -> None:
    tries = []

    def make() -> Any:
        tries.append(1)
        raise error

    calls = LtAlgorithms(make, lambda: 77)
    for problem in (PROBLEM, Problem(1, 2, 3)):
        assert calls.find(problem, FIRST) is None and error.wrong in calls.failed[problem, FIRST]
    assert len(tries) == 1


def test_a_workspace_is_used_behind_the_counters_of_our_kernels(lt: Lt) -> None:
    calls = LtAlgorithms(lambda: lt, lambda: 77)
    plain, split = calls.find(PROBLEM, FIRST), calls.find(PROBLEM, SECOND)
    assert plain is not None and split is not None
    plain(Tensor(1), Tensor(2), Tensor(3), 7)
    split(Tensor(1), Tensor(2), Tensor(3), 7, Tensor(1 << 20))
    assert lt.calls == [(FIRST, 1, 2, 3, 7, 0), (SECOND, 1, 2, 3, 7, (1 << 20) + COUNTERS_BYTES)]


# -- running it --------------------------------------------------------------------------------------------


@pytest.fixture
def device(lt: Lt, monkeypatch: pytest.MonkeyPatch) -> DeviceState:
    made = DeviceState(H200, Library("h200", ()), lambda *_: None, LtAlgorithms(lambda: lt, lambda: 77))  # type: ignore[arg-type, return-value]
    addresses = itertools.count(1 << 20, 1 << 20)
    monkeypatch.setattr(device_workspaces, "scratch", lambda nbytes, device: Tensor(next(addresses)))
    made.workspaces._lent = StreamWorkspaces(lambda nbytes, device: Tensor(1 << 19))
    return made


def call(device: DeviceState, algorithm: str, stream: int = 7) -> bool:
    need = device.workspace_bytes(Decision(None, PROBLEM, "", algorithm))
    space = device.workspaces.take(stream, need, "cuda:0", of_algorithm=True) if need else None
    return device.call_algorithm(PROBLEM, algorithm, Tensor(1), Tensor(2), Tensor(3), stream, space)


def test_nothing_is_looked_up_or_loaded_while_a_graph_is_captured(device: DeviceState, lt: Lt) -> None:
    assert not device.algorithm_ready(PROBLEM, FIRST, lambda: True) and not lt.asked
    assert device.algorithm_ready(PROBLEM, FIRST)
    assert not device.algorithm_ready(PROBLEM, FIRST, lambda: True), "it never ran: its code is not loaded"
    assert call(device, FIRST) and device.algorithm_ready(PROBLEM, FIRST, lambda: True)
    assert device.status()["algorithms_found"] == 1


def test_a_workspace_per_call(device: DeviceState, lt: Lt) -> None:
    """It launches several kernels; between them another thread may launch on the same stream."""
    pytest.importorskip("torch")
    assert device.algorithm_ready(PROBLEM, SECOND)
    assert call(device, SECOND) and call(device, SECOND) and call(device, SECOND, 9)
    lent = device.workspaces.to_lend(7, 1, "cuda:0")  # type: ignore[arg-type]
    assert lent[1] == 0 and lent == device.workspaces.to_lend(7, 1, "cuda:0")  # type: ignore[arg-type]
    used = [address for *_, address in lt.calls] + [lent[0].data_ptr() + COUNTERS_BYTES]  # type: ignore[union-attr]
    assert len(set(used)) == 4
    decision = Decision(None, PROBLEM, "", SECOND)
    assert device.workspace_bytes(decision) == COUNTERS_BYTES + WORKSPACE_BYTES
    assert device.workspace_bytes(Decision(None, PROBLEM, "", FIRST)) == 0


def test_a_first_call_that_is_refused_is_the_last_and_a_later_one_an_error(device: DeviceState, lt: Lt) -> None:
    pytest.importorskip("torch")
    assert device.algorithm_ready(PROBLEM, FIRST) and device.algorithm_ready(PROBLEM, SECOND) and call(device, SECOND)
    lt.broken = True
    assert not call(device, FIRST) and not call(device, FIRST)
    failed = Decision(None, PROBLEM, "", FIRST)
    assert device.is_left_to_torch(failed) and not device.algorithm_ready(PROBLEM, FIRST)
    assert any("NOT_SUPPORTED" in line for line in device.status()["failures"])
    with pytest.raises(DeviceError, match="NOT_SUPPORTED"):
        call(device, SECOND)
    assert not device.is_left_to_torch(Decision(None, PROBLEM, "", SECOND))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, device: DeviceState) -> Any:
    """A fake torch whose CPU device carries the state, with stream 7 as the current one."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(device, "_ensure_context", lambda: None)
    return torch


@pytest.mark.parametrize("algorithm", [FIRST, SECOND])
@pytest.mark.parametrize("with_out", [False, True])
def test_a_decision_is_run_on_the_current_stream(
    torch: Any, device: DeviceState, lt: Lt, algorithm: str, with_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = torch.zeros(64, 256).half(), torch.zeros(128, 256).half().t()
    out = torch.zeros(64, 128).half() if with_out else None
    decision = Decision(None, PROBLEM, "", algorithm)
    made = device.run(decision, a, b, out)
    assert made is not None and made.shape == (64, 128) and (made is out) == with_out
    assert made._version == int(with_out)
    assert lt.calls[-1][:5] == (algorithm, a.data_ptr(), b.data_ptr(), made.data_ptr(), 7)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    asked: list[tuple[int, Any]] = []
    device.workspaces._captured = CaptureWorkspaces(lambda *need: asked.append(need) or 3 << 20)  # type: ignore[func-returns-value]
    for capture, times in ((5, 2), (6, 1)):
        monkeypatch.setattr("outblas.dispatch.device_workspaces.capture_id", lambda stream, capture=capture: capture)
        for _ in range(times):
            assert device.run(decision, a, b, out) is not None
            assert lt.calls[-1][5] == ((3 << 20) + COUNTERS_BYTES if algorithm == SECOND else 0)
    assert len(asked) == (2 if algorithm == SECOND else 0), "one for each capture"
    device.workspaces._captured = CaptureWorkspaces(lambda *need: 0)
    before = len(lt.calls)
    for none in (7, None):  # a capture with no workspace to be had; one that has failed
        monkeypatch.setattr("outblas.dispatch.device_workspaces.capture_id", lambda stream, none=none: none)
        assert (device.run(decision, a, b, out) is None) == (algorithm == SECOND), "it is torch's"
    assert len(lt.calls) == before + (0 if algorithm == SECOND else 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert device.run(decision, a, b, out) is not None
    assert lt.calls[-1][5] == ((2 << 20) + COUNTERS_BYTES if algorithm == SECOND else 0), "of no graph again"


@pytest.mark.parametrize("place", ["call", "lent"])
def test_without_memory_for_a_workspace_the_program_goes_on(
    torch: Any, device: DeviceState, lt: Lt, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int, where: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no memory")

    a, b = torch.zeros(64, 256).half(), torch.zeros(128, 256).half().t()
    decision, table = Decision(None, PROBLEM, "", SECOND), SimpleNamespace(learn=lambda *_: True)
    monkeypatch.setattr(device_registry, "devices", {None: device})
    monkeypatch.setattr(native_table, "table", table)
    if place == "call":
        monkeypatch.setattr(device_workspaces, "scratch", full)
        assert device.run(decision, a, b, None) is None and not lt.calls
        assert not device.is_left_to_torch(decision), "there may be memory later"
    else:
        device.workspaces._lent = StreamWorkspaces(full)
        monkeypatch.setattr(LtAlgorithm, "prepared", lambda *_: None)
        product.remember(device, decision, (a, b, None, CallOption()), device.run(decision, a, b, None))
        assert len(lt.calls) == 1, "and C asks Python for its next calls, too"


def test_why_not_looks_it_up(torch: Any, device: DeviceState, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Decision(None, PROBLEM, "", "id=67")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device.why_not(unknown, None) == ""  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert "not among the 3" in device.why_not(unknown, None)  # type: ignore[arg-type]
    assert device.why_not(Decision(None, PROBLEM, "", FIRST), None) == ""  # type: ignore[arg-type]
    assert device.run(unknown, torch.zeros(64, 256), torch.zeros(256, 128), None) is None and device.is_left_to_torch(
        unknown
    )
