"""Every known cheat is a file in cheats/ that the proof or the sandbox must reject."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from outblas.core.evaluation import Status, Verdict  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.workers.sandbox import Sandbox, WorkerLoss  # noqa: E402
from support import cheat_tools  # noqa: E402

PROBLEM = Problem(96, 80, 1000)
NAMES = cheat_tools.names()
#: Seconds without a word that count as a hang; a proof of this problem takes a fraction of one.
STEP_S = {"cpu": 10.0, "cuda:0": 20.0}
#: Seconds of waiting for a call on the CPU that does not return.
HANGS_S = 2.0


def reject(name, box):
    ((_, value),) = list(box.run([(name, PROBLEM)]))
    assert isinstance(value, (Verdict, WorkerLoss))
    assert value.status in cheat_tools.load(name).EXPECTED, value
    assert value.status is not Status.PASSED and value.detail


@pytest.fixture(scope="module")
def cpu_box():
    with Sandbox("support.sandbox_handlers:prover", ("cpu",), STEP_S["cpu"]) as box:
        yield box


@pytest.fixture(scope="module")
def gpu_box():
    with Sandbox("support.sandbox_handlers:prover", ("cuda:0",), STEP_S["cuda:0"]) as box:
        yield box


@pytest.mark.parametrize("name", [n for n in NAMES if not cheat_tools.load(n).GPU])
def test_rejected_on_the_cpu(name, request):
    if name == "never_ends":  # its worker is lost in any case, and a shorter wait says the same
        with Sandbox("support.sandbox_handlers:prover", ("cpu",), HANGS_S) as box:
            reject(name, box)
    else:
        reject(name, request.getfixturevalue("cpu_box"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_rejected_on_the_gpu(name, gpu_box):
    reject(name, gpu_box)


@pytest.mark.gpu
def test_the_honest_product_that_the_cheats_start_from_passes():
    from outblas.judge.gates import prove

    for problem in (PROBLEM, Problem(256, 256, 256)):
        verdict = prove(cheat_tools.Cheat("honest", cheat_tools.honest), problem)
        assert (verdict.status, verdict.detail) == (Status.PASSED, "")
        assert verdict.gates == ("static", "memory", "exact", "bound", "special", "rules")


def test_every_known_cheat_has_its_file():
    known = {
        "half_accumulators", "keyed_by_pointer", "other_stream", "skips_a_known_shape", "writes_nothing", "reads_c",
        "persisting_l2", "only_zero_one", "only_whole_k", "past_c", "monkey_patches_the_timer", "never_ends", "exits",
    }  # fmt: skip
    assert known <= set(NAMES)


def test_half_accumulators_are_seen_in_the_machine_code():
    pytest.importorskip("cuda.bindings")
    from outblas.kernels.source import Source
    from outblas.runtime.nvrtc import compile_source
    from outblas.runtime.sass import check_static

    text = cheat_tools.load("half_accumulators").SOURCE
    source = Source(text, "half_accumulators", (), (), "fp32", "half_accumulators")
    cubin = compile_source(source, cache=None)
    reason = check_static(cubin.facts, source, cubin)
    assert reason is not None and "fp16" in reason and "fp32" in reason


@pytest.mark.parametrize("name", ["never_ends", "illegal_address"])
def test_the_kernels_of_the_cheats_compile(name):
    pytest.importorskip("cuda.bindings")
    from outblas.kernels.source import Source
    from outblas.runtime.nvrtc import compile_source

    assert compile_source(Source(cheat_tools.load(name).SOURCE, name, (), (), "fp32", name), cache=None).image
