"""Arguments of cuBLAS, and the mapping of nvMatmulHeuristics, without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from outblas.core import rivals
from outblas.core.errors import DeviceError, ToolchainMissing, UsageError
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.judge import baselines, matmul_heuristics
from outblas.judge.baselines import ALGORITHM_BYTES, AlgorithmCache
from outblas.kernels.families.family import TileChoice
from outblas.runtime import cublas
from support.gpus.known import H200


def column_major(memory, rows, cols, ld):
    """The matrix that BLAS sees in flat memory."""
    return np.array([[memory[i + j * ld] for j in range(cols)] for i in range(rows)])


@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("mnk", [(3, 4, 5), (1, 7, 2), (6, 1, 1)])
def test_cublas_is_told_the_row_major_product(layout, mnk):
    problem = Problem(*mnk, layout)
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 9, (problem.m, problem.k)), rng.integers(-9, 9, problem.b_shape)
    s = cublas.BlasShape.of(problem)
    transposed = s.op_first == 1
    rows, cols = (s.k, s.m) if transposed else (s.m, s.k)
    first = column_major(b.ravel(), rows, cols, s.ld_first)
    second = column_major(a.ravel(), s.k, s.n, s.ld_second)
    out = (first.T if transposed else first) @ second
    c = np.zeros(problem.m * problem.n, dtype=int)
    for i in range(s.m):
        for j in range(s.n):
            c[i + j * s.ld_out] = out[i, j]
    assert (c.reshape(problem.m, problem.n) == a @ (b.T if layout == "TN" else b)).all()


def test_scale_type_is_the_compute_type():
    single, half = cublas.BlasShape.of(Problem(8, 8, 8)), cublas.BlasShape.of(Problem(8, 8, 8, acc="fp16"))
    assert (single.compute, single.scale) == (68, 0) and (half.compute, half.scale) == (64, 2)
    assert [s.value for s in single.scalars()] == [1.0, 0.0]
    one, zero = half.scalars()
    assert ctypes.sizeof(one) == 2 and np.array([one.value, zero.value], np.uint16).view(np.float16).tolist() == [
        1.0,
        0.0,
    ]
    assert cublas.BlasShape.of(Problem(8, 8, 8, dtype="bf16")).dtype == 14


def test_c_structures_have_the_headers_sizes():
    result = cublas.HeuristicResult
    assert ctypes.sizeof(cublas.Algo) == 64 and ctypes.sizeof(result) == 96
    assert [getattr(result, f).offset for f in ("workspace", "state", "waves", "reserved")] == [64, 72, 76, 80]


def test_a_failed_status_names_call_and_reason():
    with pytest.raises(DeviceError, match="cublasLtMatmul failed with CUBLAS_STATUS_NOT_SUPPORTED"):
        cublas.check_status("cublasLtMatmul", 15)
    cublas.check_status("cublasLtMatmul", 0)


def test_a_missing_library_is_one_clear_line():
    with pytest.raises(ToolchainMissing, match="libnosuchblas cannot be loaded"):
        cublas._load("nosuchblas")


def test_every_baseline_has_its_name():
    made = baselines.make_baselines(0)
    assert tuple(made) == rivals.BASELINE_NAMES and [b.name for b in made.values()] == list(rivals.BASELINE_NAMES)
    assert set(rivals.RIVALS) < set(rivals.BASELINE_NAMES)


FAKE = """
import json, os, sys
gpu, problems = json.load(sys.stdin)
for m, n, k, layout, precision in problems:
    if m == 13:
        import signal; os.kill(os.getpid(), signal.SIGSEGV)
    print("null" if m == 14 else json.dumps([[64, 64, 64, 8, 1, 1, 2, 0]] * int(sys.argv[1])), flush=True)
"""


def test_a_problem_that_kills_the_package_costs_only_itself():
    found = matmul_heuristics.heuristic_choices([Problem(m, 8, 8) for m in (1, 13, 2, 14, 13, 3)], H200, script=FAKE)
    assert [c is not None for c in found] == [True, False, True, False, False, True]
    assert found[0] == TileChoice(64, 64, 64, 8, 1, 1, 2, 0)


SIGHT = """
import json, os, sys
print(json.dumps([[64, 64, 64, 8, 1, 1, len(os.environ.get("CUDA_VISIBLE_DEVICES", "any")), 0]]), flush=True)
"""


def test_the_package_sees_no_gpu_on_which_another_may_be_timing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert matmul_heuristics.heuristic_choices([Problem(1, 8, 8)], H200, script=SIGHT)[0].cluster_n == 0


def test_no_problem_no_process():
    assert matmul_heuristics.heuristic_choices([], H200, script=FAKE) == []


def test_the_mapping_is_legal_and_near():
    pytest.importorskip("outblas.kernels.legality")
    from outblas.kernels.legality import why_illegal
    from support.gpus.known import H200

    problem = Problem(4096, 4096, 4096)
    config = matmul_heuristics.nearest_config(problem, TileChoice(128, 256, 64, 4, 1, 2, 1, 1), H200)
    assert why_illegal(problem, config, H200) is None
    assert (config.bm, config.bn, config.bk) == (128, 256, 64)
    odd = matmul_heuristics.nearest_config(problem, TileChoice(64, 60, 100, 99, 12, 1, 1, 0), H200)
    assert odd is not None and why_illegal(problem, odd, H200) is None
    assert (
        matmul_heuristics.nearest_config(Problem(127, 1001, 333), TileChoice(64, 64, 64, 4, 1, 1, 1, 0), H200) is None
    )


@pytest.mark.skipif(
    importlib.util.find_spec("nvMatmulHeuristics") is None, reason="nvMatmulHeuristics is not installed"
)
def test_the_real_package_answers_every_kind():
    problems = [
        Problem(4096, 4096, 4096, layout, dtype, acc)
        for layout in ("TN", "NN")
        for dtype, acc in (("fp16", "fp32"), ("bf16", "fp32"), ("fp16", "fp16"))
    ]
    assert all(c is not None for c in matmul_heuristics.heuristic_choices(problems, H200))


def test_an_algorithm_is_handed_from_process_to_process_as_bytes():
    problem, words = Problem(64, 128, 256), (7, 2**64 - 1, 0, 3, 4, 5, 6, 1)
    first, second = baselines.LtAuto(), baselines.LtAuto()
    first._chosen[problem] = (cublas.Algo(words), "index=1/2 id=66")
    algo, detail = first.choice(problem)
    assert len(algo) == 64
    second.set_algorithm(problem, algo, detail)
    assert tuple(second._chosen[problem][0].data) == words
    assert second.detail(problem) == "index=1/2 id=66" and second.choice(problem) == (algo, detail)


ABOUT = {"cublaslt": "13.1.0", "gpu": "NVIDIA H200", "driver": "580"}


def test_choices_are_kept_for_the_processes_after(tmp_path):
    path, problem = tmp_path / "algorithms.jsonl", Problem(64, 128, 256, acc="fp16")
    words = (7, 2**64 - 1, 0, 3, 4, 5, 6, 1)
    kept = AlgorithmCache(path, ABOUT)
    kept.add(problem, bytes(cublas.Algo(words)), "index=1/2 id=66")
    later = baselines.LtAuto()
    later.use_cache(AlgorithmCache(path, ABOUT))
    assert tuple(later._chosen[problem][0].data) == words and later.detail(problem) == "index=1/2 id=66"


@pytest.mark.parametrize("changed", ABOUT)
def test_choices_of_another_cublaslt_gpu_or_driver_are_forgotten(tmp_path, changed):
    path = tmp_path / "algorithms.jsonl"
    AlgorithmCache(path, ABOUT).add(Problem(64, 128, 256), bytes(64), "index=0/1")
    assert list(AlgorithmCache(path, {**ABOUT, changed: "other"})) == []
    assert list(AlgorithmCache(path, ABOUT)) == [], "begun anew"


@pytest.mark.parametrize("size", [0, 63, 65])
def test_a_choice_of_another_length_is_refused_and_empties_nothing(tmp_path, size):
    path = tmp_path / "algorithms.jsonl"
    kept = AlgorithmCache(path, ABOUT)
    kept.add(Problem(64, 128, 256), bytes(64), "index=0/1")
    with pytest.raises(UsageError, match=f"the algorithm has {size} bytes; expected 64 bytes"):
        kept.add(Problem(128, 128, 256), bytes(size), "index=0/1")
    assert [problem.m for problem, _, _ in AlgorithmCache(path, ABOUT)] == [64]


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "algorithms.jsonl"
    kept = AlgorithmCache(path, ABOUT)
    for m in (64, 128):
        kept.add(Problem(m, 128, 256), bytes(64), "index=0/1")
    path.write_bytes(path.read_bytes()[:-9])
    assert [problem.m for problem, _, _ in AlgorithmCache(path, ABOUT)] == [64]


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON",
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b'{"problem": "64_128_256_TN_fp16_fp32", "algorithm": "00ff", "detail": "too short"}',
        b'{"problem": "64_128_TN", "algorithm": "%s", "detail": ""}' % (b"00" * 64),
        b'{"problem": "64_128_256_TN_fp16_fp32", "algorithm": null, "detail": ""}',
    ],
)
def test_a_damaged_file_of_choices_is_begun_anew(tmp_path, line):
    path = tmp_path / "algorithms.jsonl"
    AlgorithmCache(path, ABOUT).add(Problem(64, 128, 256), bytes(64), "index=0/1")
    path.write_bytes(path.read_bytes() + line + b"\n")
    kept = AlgorithmCache(path, ABOUT)
    assert list(kept) == []
    kept.add(Problem(128, 128, 256), bytes(64), "index=0/1")
    assert [problem.m for problem, _, _ in AlgorithmCache(path, ABOUT)] == [128]


def test_algorithms_have_the_size_that_is_kept():
    assert len(bytes(cublas.Algo())) == ALGORITHM_BYTES


@pytest.fixture
def one_algorithm(monkeypatch):
    """A bench of a problem with one algorithm, which needs no clock; makes an LtAuto."""
    problem, algo = Problem(64, 128, 256), cublas.Algo((1, 2, 3, 4, 5, 6, 7, 8))
    monkeypatch.setattr(cublas, "describe", lambda algo: "id=66")
    asked = []
    plan = SimpleNamespace(heuristic=lambda count, alignment: asked.append(count) or [SimpleNamespace(algo=algo)])
    bench = SimpleNamespace(problem=problem, operands=lambda index: (None, None, None))
    monkeypatch.setattr(baselines, "_alignment", lambda *t: 256)

    def make():
        auto = baselines.LtAuto()
        auto._lt = SimpleNamespace(plan=lambda p: plan)
        return auto

    return SimpleNamespace(bench=bench, make=make, asked=asked)


def test_what_is_chosen_is_chosen_once_for_all_processes(tmp_path, one_algorithm):
    for _ in range(2):
        auto = one_algorithm.make()
        auto.use_cache(AlgorithmCache(tmp_path / "a.jsonl", ABOUT))
        auto.prepare(one_algorithm.bench)
        assert auto.detail(one_algorithm.bench.problem) == "index=0/1 id=66"
    assert len(one_algorithm.asked) == 1


def test_a_choice_stands_where_the_disk_does_not_keep_it(tmp_path, monkeypatch, one_algorithm):
    def full(self, entry):
        raise OSError(28, "No space left on device")

    auto = one_algorithm.make()
    auto.use_cache(AlgorithmCache(tmp_path / "a.jsonl", ABOUT))
    monkeypatch.setattr(Journal, "_write", full)
    auto.prepare(one_algorithm.bench)
    assert auto.detail(one_algorithm.bench.problem) == "index=0/1 id=66"
