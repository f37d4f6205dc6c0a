"""The example free kernels without a GPU: their machine code, and their numbers by emulation on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("cuda.bindings")

import torch  # noqa: E402
from rivals.carried_builds import CarriedBuilds  # noqa: E402

from outblas.core.errors import ToolchainMissing, UsageError  # noqa: E402
from outblas.core.evaluation import Evaluation, Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas_lab.custom.examples.example_kernels import all_examples, example, example_names  # noqa: E402
from outblas_lab.custom.free_kernel import FreeKernel  # noqa: E402
from outblas_lab.jail.static_gate import examine  # noqa: E402
from support.emulation import emulate  # noqa: E402
from support.gpus.known import H200  # noqa: E402

pytestmark = pytest.mark.long
BAD = Path(__file__).parents[1] / "support" / "free_kernels"
#: Texts that the compiler reads in a second, and the emulation at all.
PLAIN = [name for name, kernel in all_examples().items() if not kernel.launch.uses]
#: Multiply instructions in the machine code.
WGMMA = {name for name in PLAIN if name.startswith("wgmma")}
HMMA = {"mma_direct", "ldmatrix_two_buffers", "cp_async_stages", "split_k"}
BOTH_LAYOUTS = {"naive", "shared_tiles", "mma_direct", "cp_async_stages"}

emulated = pytest.mark.skipif(emulate.COMPILER is None, reason="g++ is not installed")


def bad(name: str) -> FreeKernel:
    return FreeKernel.parse((BAD / f"{name}.cu").read_text())


def computed(kernel: FreeKernel, problem: Problem, folder: Path, late: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (C, expected C) in fp32. Inputs are small integers, an Inf and a NaN, so sums are exact in any order."""
    dtype = torch.float16 if problem.dtype == "fp16" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-3, 4, (problem.m, problem.k), generator=generator).to(dtype)
    b = torch.randint(-3, 4, problem.b_shape, generator=generator).to(dtype)
    a[0, 0], a[problem.m - 1, problem.k - 1] = float("inf"), float("nan")
    right = b.float() if problem.layout == "NN" else b.float().T
    bits = [t.view(torch.int16).numpy().view(np.uint16) for t in (a, b)]
    program = emulate.build(kernel, problem.layout, problem.dtype, folder)
    c = emulate.run(program, kernel, problem, *bits, late)
    got = torch.from_numpy(c.view(np.int16).copy()).view(dtype)
    return got.float().numpy(), (a.float() @ right).to(dtype).float().numpy()


def test_there_are_at_least_fourteen_and_none_is_another() -> None:
    kernels = all_examples()
    assert len(kernels) >= 14 and len({k.name for k in kernels.values()}) == len(kernels)
    assert {k.launch.form for k in kernels.values()} == {"device", "host"}
    with pytest.raises(UsageError, match="naive"):
        example("nothing")
    assert "wgmma_ring" in example_names()


@pytest.mark.parametrize("name", PLAIN)
def test_it_compiles_and_multiplies_as_it_says(name: str) -> None:
    kernel = example(name)
    try:
        built = examine(Problem(48, 512, 512), kernel, H200)
    except ToolchainMissing as error:
        pytest.skip(str(error))
    assert not isinstance(built, Evaluation), built.log
    facts = built.cubin.facts
    assert (facts.hgmma > 0) == (name in WGMMA) and (facts.hmma > 0) == (name in HMMA)
    assert facts.accumulators in ((), ("fp32",)) and facts.ldl == facts.stl == built.cubin.spill_bytes == 0


@emulated
@pytest.mark.parametrize("name", PLAIN)
def test_it_is_right_on_ragged_extents(name: str, tmp_path: Path) -> None:
    layout = "NN" if name in BOTH_LAYOUTS else "TN"
    problem = Problem(130, 136, 392 if name in WGMMA else 200, layout) if name != "few_rows" else Problem(6, 40, 264)
    kernel = example(name)
    assert kernel.launch.why_not(problem, H200) is None
    for late in (False, True):  # asynchronous work as early, and as late, as it may be done; more steps than stages
        got, want = computed(kernel, problem, tmp_path, late)
        np.testing.assert_array_equal(got, want)


@emulated
def test_a_split_k_call_leaves_its_counters_as_it_found_them(tmp_path: Path) -> None:
    """Two calls share a workspace in the emulation: what the first left would be the second's."""
    problem = Problem(65, 66, 520)
    assert example("split_k").launch.grid_of(problem, H200)[2] > 1
    got, want = computed(example("split_k"), problem, tmp_path, False)
    np.testing.assert_array_equal(got, want)


@emulated
@pytest.mark.parametrize(
    "name, right, wrong",
    [
        # The stage that is being read is given back: the next load overwrites it.
        ("wgmma_ring", "8 * ((step - 1) % STAGES)", "8 * (step % STAGES)"),
        # Nobody waits for the copies of this step.
        ("cp_async_stages", "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES>();"),
        # The swizzle of the stores is not the descriptor's.
        ("wgmma_persistent", "(j + lane / 16) % 8 ^ local % 8", "(j + lane / 16) % 8 ^ local % 4"),
    ],
)
def test_the_emulation_sees_what_is_wrong(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    text = example(name).text
    assert text.count(right) == 1
    problem, kernel = Problem(130, 136, 712), FreeKernel.parse(text.replace(right, wrong))
    try:
        different = [
            not np.array_equal(*computed(kernel, problem, tmp_path, late), equal_nan=True) for late in (False, True)
        ]
    except AssertionError as error:  # a deadlock, or a barrier that is used wrongly
        assert "emulation" in str(error)
    else:
        assert any(different)


@emulated
def test_the_deliberately_wrong_one_is_wrong_and_the_slow_one_is_right(tmp_path: Path) -> None:
    got, want = computed(bad("wrong_index"), Problem(32, 16, 64), tmp_path, False)
    assert not np.array_equal(got[2:30], want[2:30])
    got, want = computed(bad("slow"), Problem(5, 7, 9), tmp_path, False)
    np.testing.assert_array_equal(got, want)


def test_what_does_not_compile_is_a_status() -> None:
    try:
        found = examine(Problem(32, 16, 64), bad("does_not_compile"), H200)
    except ToolchainMissing as error:
        pytest.skip(str(error))
    assert isinstance(found, Evaluation) and found.status is Status.COMPILE_ERROR
    assert "rounded_to_half" in found.log


def test_a_carried_kernel_is_of_the_headers_that_it_includes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problem, folder = Problem(48, 64, 64), CarriedBuilds(tmp_path, H200)
    try:
        for name in ("naive", "mma_direct"):
            folder.build(example(name), problem)
    except ToolchainMissing as error:
        pytest.skip(str(error))
    monkeypatch.setattr("rivals.carried_builds.kernels_sha", lambda: "other kernel files")
    assert folder.get(example("naive"), problem) is not None
    assert folder.get(example("mma_direct"), problem) is None
