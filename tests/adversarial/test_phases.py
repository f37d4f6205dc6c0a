"""Cheats that tell a launch whose result counts from others: none gains, and the honest version of each text passes.

``benchmarks/judged_clock.py cheats`` shows what each would gain without the defence at which it aims.
"""

from __future__ import annotations

import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from outblas.core.evaluation import Status
from outblas.core.problem import Problem
from outblas.runtime.nvrtc import usable_cores
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail.build import BuiltKernel
from outblas_lab.jail.judged_clock import Defences
from outblas_lab.jail.static_gate import examine
from support.exploit_tools import gpu_is_ours
from support.free_fixture import missing
from support.gpus.known import H200

P = Problem(512, 512, 512)
TEXTS = {path.stem: path.read_text() for path in sorted(Path(__file__).with_name("phases").glob("*.cu"))}
SIGNALS = (
    "a", "addresses", "b", "c", "call_count", "clock", "constant", "globaltimer", "gridid", "l2_latency", "local",
    "neighbours", "workspace",
)  # fmt: skip
TABLE = "tells_phases"
#: Whether the proof or the clock refuses a cheat depends on how it counts.
REFUSED = {Status.WRONG, Status.NOT_REPEATABLE, Status.RULE_BROKEN}


def header(name: str, key: str) -> str:
    return next(line.split(": ", 1)[1] for line in TEXTS[name].splitlines() if line.startswith(f"// {key}: "))


def honest(name: str) -> FreeKernel:
    assert "#define CHEAT 1\n" in TEXTS[name]
    return FreeKernel.parse(TEXTS[name].replace("#define CHEAT 1\n", "#define CHEAT 0\n"))


def test_every_signal_has_a_cheat_and_each_names_its_target() -> None:
    found = Counter(header(name, "signal") for name in TEXTS if name != TABLE)
    assert tuple(sorted(found)) == SIGNALS and found.total() >= 26
    known = {field.name for field in fields(Defences)}
    assert all(set(header(name, "defence").split("+")) <= known for name in TEXTS)
    assert {header(name, "expect") for name in TEXTS} == {"refused."}


@pytest.mark.long
def test_only_a_run_can_stop_them() -> None:
    """No look at a text or its machine code tells a cheat from its honest version."""
    if reason := missing():
        pytest.skip(reason)
    kernels = [FreeKernel.parse(text) for text in TEXTS.values()]
    with ThreadPoolExecutor(usable_cores()) as pool:
        found = dict(zip(TEXTS, pool.map(lambda kernel: examine(P, kernel, H200), kernels), strict=True))
    for name, one in found.items():
        assert isinstance(one, BuiltKernel), (name, one)


@functools.cache
def evaluations():
    """Name -> evaluation of the cheat and of its honest version, by real workers."""
    from outblas.judge.bench_cell import Options
    from outblas.runtime.device import gpu_of_device
    from outblas.tune.live_evaluator import LiveEvaluator
    from outblas_lab.jail.jailed_evaluator import FreeOptions

    options = Options(0, gpu_of_device(0), rounds=15, baselines=("cublas", "lt_heuristic"))
    free = FreeOptions(batch=6)
    with gpu_is_ours(alone=True), LiveEvaluator(0, options, step_timeout_s=60.0, free=free) as live:
        cheats = list(live.evaluate([(P, FreeKernel.parse(text)) for text in TEXTS.values()]))
        others = list(live.evaluate([(P, honest(name)) for name in TEXTS]))
    by_kernel = {e.config: e for e in (*cheats, *others)}
    return {name: (by_kernel[FreeKernel.parse(TEXTS[name])], by_kernel[honest(name)]) for name in TEXTS}


@pytest.mark.gpu
@pytest.mark.xdist_group("phases")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TEXTS)
def test_a_cheat_is_refused_and_its_honest_version_passes(name) -> None:
    cheat, fair = evaluations()[name]
    assert fair.status is Status.PASSED, f"{fair.status}: {fair.detail}"
    times = [None if each.timing is None else each.timing.median_us for each in (cheat, fair)]
    assert cheat.status in REFUSED and times[0] is None, f"{cheat.status}: {cheat.detail}, {times} us"


@pytest.mark.gpu
@pytest.mark.xdist_group("phases")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mnk", ["512_512_512", "1024_1024_1024", "2048_1024_1024"])
def test_a_table_of_operand_sets_is_no_help_however_long_it_spins(mnk) -> None:
    from outblas.tune.live_evaluator import LiveEvaluator
    from outblas_lab.jail.jailed_evaluator import FreeOptions

    problem = Problem(*map(int, mnk.split("_")))
    texts = [TEXTS[TABLE].replace("#define SPIN 2000", f"#define SPIN {spin}") for spin in (0, 2000, 4000, 6000, 8000)]
    with gpu_is_ours(alone=True), LiveEvaluator(0, free=FreeOptions()) as live:
        for found in live.evaluate([(problem, FreeKernel.parse(text)) for text in texts]):
            assert found.status in (Status.WRONG, Status.RULE_BROKEN), f"{found.status}: {found.detail}"
