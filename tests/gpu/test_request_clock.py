"""The clock of server mode and second winners, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from outblas.core.config import config_name  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.core.rivals import CallFromC  # noqa: E402
from outblas.dispatch.device_registry import current_decisions  # noqa: E402
from outblas.judge.baselines import make_baselines  # noqa: E402
from outblas.judge.gpu_clock import GpuClock, choose_algorithm  # noqa: E402
from outblas.judge.request_clock import clock_us, serve_requests  # noqa: E402
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig  # noqa: E402
from outblas.records.library import Library  # noqa: E402
from outblas.records.library_row import LibraryChoice, LibraryRow, SecondWinner  # noqa: E402
from outblas.runtime import native  # noqa: E402
from outblas.runtime.device import gpu_of_device  # noqa: E402
from outblas_lab.pool.latency import RequestPlan  # noqa: E402
from outblas_lab.pool.served_rows import server_rows  # noqa: E402
from outblas_lab.pool.serving import PublicApi, time_public_api  # noqa: E402

pytestmark = pytest.mark.gpu
if native.why_not_built():
    pytest.skip("the C extension is not built", allow_module_level=True)
PROBLEM = Problem(256, 512, 1024)
PLAIN, OTHER = Sm80MmaConfig(64, 64), Sm80MmaConfig(128, 64)
LATE = [0] * 6


@pytest.fixture(name="bench")
def bench_fixture() -> Any:
    with GpuClock(PROBLEM, gpu=gpu_of_device(0)) as bench:
        yield bench


@pytest.mark.parametrize("name", ["cublas", "lt_heuristic", "lt_auto"])
def test_a_native_call_from_c_computes_what_the_call_from_python_does(bench: Any, name: str) -> None:
    entry = make_baselines(0, (name,))[name]
    choose_algorithm(entry, bench)
    a, b, c = bench.operands(0)
    bench.bind(entry)[0](bench.stream)
    bench.synchronize()
    expected = c.clone()
    c.zero_()
    torch.cuda.synchronize()
    call = entry.bind_native(PROBLEM, a, b, c, bench.stream)
    assert isinstance(call, CallFromC)
    times = serve_requests([call], bench.stream, LATE)
    assert torch.equal(c, expected) and (times.service_us > 0).all()


def test_a_request_ends_after_its_product(bench: Any) -> None:
    """A kernel that spins for a million cycles takes half a millisecond at least."""

    def spin(stream: int) -> None:
        torch.cuda._sleep(1_000_000)

    with bench.current():
        times = serve_requests([spin], bench.stream, [0, 0])
    assert (times.service_us > 400).all() and times.latency_us[1] > times.latency_us[0]


def test_an_empty_call_takes_less_than_any_product(bench: Any) -> None:
    entry = make_baselines(0, ("cublas",))["cublas"]
    calls = bench.bind(entry)
    bench.synchronize()
    product = serve_requests(calls, bench.stream, LATE).service_us
    assert clock_us(bench.stream, [i * 100_000 for i in range(50)]) < min(product)


def row(**seconds: SecondWinner) -> LibraryRow:
    choice = LibraryChoice(PLAIN, 1.0, 1.0, 1.0)
    return LibraryRow(PROBLEM, "torch", source="a test", plain=choice, pdl=choice, **seconds)


def test_each_entry_of_the_public_api_keeps_its_own_kernel_and_table() -> None:
    before = current_decisions(0)
    library = Library(gpu_of_device(0).name, (row(single=SecondWinner(OTHER, 1.1, 1.05, 1.2)),))
    entries = {"ours": PublicApi(0, library), "plain": PublicApi(0, library, "stream")}
    times = time_public_api(entries, PROBLEM, RequestPlan(requests=200, warmup_seconds=0.0), 0)
    assert {name: len(t.samples_us) for name, t in times.judging.items()} == {"ours": 100, "plain": 100}
    launched = {}
    for name, entry in entries.items():
        assert entry.failures == []
        launched[name] = entry._decisions.table.counts()["launches"]
        (config,) = {key[1] for key in entry._decisions.state._calls}
        assert config == (OTHER if name == "ours" else PLAIN)
    assert all(count >= 200 for count in launched.values()), "repeated calls are launched by the tables"
    assert current_decisions(0) == before


def test_a_server_row_has_the_plain_choice_beside_the_second_winner() -> None:
    gpu = gpu_of_device(0)
    library = Library(gpu.name, (row(single=SecondWinner(OTHER, 1.1, 1.05, 1.2)),))
    (found,) = server_rows(PROBLEM, library, 0, gpu, 2000.0)
    assert (found["config"], found["plain_config"]) == (config_name(OTHER), config_name(PLAIN))
    assert found["judged_on"] == found["chosen_on"] == 500 and found["clock_us"] < found["ours_us"]
    assert all(found[f"{name}_p99_us"] >= found[f"{name}_us"] for name in ("ours", "plain", "torch", "baseline"))
