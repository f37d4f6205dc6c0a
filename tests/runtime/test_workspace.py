"""Split-K over a workspace: who writes where, who adds up, in what order; the machine code; who owns the memory."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates, special_candidates
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_kernels import workspace_kernels
from outblas.kernels.geometry import geometry, grid, workspace_bytes
from outblas.kernels.geometry_terms import COUNTERS_BYTES
from outblas.kernels.legality import why_illegal
from outblas.kernels.source import make_source
from outblas.runtime.launch import LoadedKernel
from outblas.runtime.workspace import StreamWorkspaces, run_on_own_thread
from support.gpus.known import H200

pytestmark = pytest.mark.long
PAIRS = Sm90WgmmaConfig(64, 64, 64, 8, cluster_m=2, split_k=5, store="direct", split_kind="workspace")
CASES = [
    (Problem(256, 512, 12288), PAIRS),
    (Problem(250, 520, 4104), replace(PAIRS, cluster_m=1, cluster_n=2, raster="n", group=3)),
    (Problem(1000, 72, 2056), replace(PAIRS, bm=128, consumers=2, split_k=32, stages=3)),
    (Problem(200, 4000, 8192, "NN"), replace(PAIRS, cluster_m=1, group=2, split_k=3)),
]


def ctas(problem: Problem, c: Sm90WgmmaConfig) -> list[tuple[int, int]]:
    """(tile, part of K) of every CTA of the grid, written from raster.cuh and sm90_wgmma_gemm.cuh."""
    cluster, (nx, ny, nz) = c.cluster_m * c.cluster_n, grid(problem, c, 132)
    tiles_m = -(-problem.m // (c.bm * c.cluster_m))
    tiles_n = -(-problem.n // (c.bn * c.cluster_n))
    found = []
    for z in range(nz):
        band, part = divmod(z, c.split_k)
        for y in range(ny):
            for x in range(nx):
                inner, rank = band * c.group + x // cluster, x % cluster
                if inner >= (tiles_m if c.raster == "m" else tiles_n):
                    continue
                m, n = (inner, y) if c.raster == "m" else (y, inner)
                rank_m, rank_n = rank % c.cluster_m, rank // c.cluster_m
                found.append(((m * c.cluster_m + rank_m) * (tiles_n * c.cluster_n) + n * c.cluster_n + rank_n, part))
    return found


@pytest.mark.parametrize(("problem", "config"), CASES)
def test_every_part_of_every_tile_has_a_slot_of_its_own(problem: Problem, config: Sm90WgmmaConfig) -> None:
    assert why_illegal(problem, config, H200) is None
    found = ctas(problem, config)
    slots = sorted(tile * config.split_k + part for tile, part in found)
    part_bytes = config.bm * config.bn * 4
    assert slots == list(range(len(found))), "no two CTAs share a slot, and none is left out"
    assert COUNTERS_BYTES + len(slots) * part_bytes == workspace_bytes(problem, config)
    counters = len(slots) // config.split_k * config.consumers
    assert 4 * counters <= COUNTERS_BYTES


def test_ctas_that_run_at_once_work_on_the_same_part() -> None:
    """The launch order walks all tiles of a band before the next part of K."""
    parts = [part for _, part in ctas(Problem(256, 512, 12288), PAIRS)]
    assert parts == sorted(parts) and len(set(parts)) == 5


def test_fragments_of_a_part_do_not_overlap() -> None:
    """Byte of (warpgroup, fragment, thread) in a part, as workspace_reduce.cuh has it: each 16 bytes once, and the
    threads of a warp side by side."""
    for config in (PAIRS, CASES[2][1]):
        units = config.bm // 64 // config.consumers * (config.bn // 8)
        w, u, t = np.meshgrid(np.arange(config.consumers), np.arange(units), np.arange(128), indexing="ij")
        at = ((w * units + u) * 512 + t * 4) * 4
        assert sorted(at.ravel()) == list(range(0, config.bm * config.bn * 4, 16))
        assert (np.diff(at, axis=2) == 16).all()


def last_adds_up(parts: np.ndarray, order: list[int], counter: list[int]) -> np.ndarray:
    """Write and count the parts of one tile in `order`; return the sum of the part that counted last."""
    split, memory, sums = len(parts), np.full_like(parts, np.nan), []
    for part in order:
        memory[part] = parts[part]
        before, counter[0] = counter[0], 0 if counter[0] >= split - 1 else counter[0] + 1  # atom.inc
        if before == split - 1:
            total = parts[part] if part == 0 else memory[0]
            for p in range(1, split):
                total = total + (parts[part] if p == part else memory[p])
            sums.append(total)
    assert len(sums) == 1, "one CTA, and no other, adds up"
    return sums[0]


@pytest.mark.parametrize("split", [2, 3, 12, 32])
def test_whoever_is_last_the_bits_are_the_same_and_the_counter_is_zero_again(split: int) -> None:
    rng = random.Random(split)
    parts = np.random.default_rng(split).normal(size=(split, 512)).astype(np.float32)
    counter, results = [0], []
    for _ in range(20):
        results.append(last_adds_up(parts, rng.sample(range(split), split), counter))
        assert counter == [0], "ready for the next kernel without a memset"
    assert all((r.view(np.int32) == results[0].view(np.int32)).all() for r in results)


def test_a_workspace_is_needed_by_its_kind_alone() -> None:
    assert workspace_bytes(Problem(256, 512, 12288), replace(PAIRS, split_kind="cluster")) == 0
    assert workspace_bytes(Problem(256, 512, 12288), Sm80MmaConfig(64, 64, split_k=4)) == 0
    assert geometry(Problem(256, 512, 12288), PAIRS).cluster == 2
    assert geometry(Problem(256, 512, 12288), replace(PAIRS, split_kind="cluster")).cluster == 10


@pytest.mark.parametrize(
    ("mnk", "wanted"), [((256, 512, 12288), True), ((4096, 4096, 12288), False), ((256, 512, 1024), False)]
)
def test_few_tiles_with_a_long_k_are_offered_workspaces(mnk: tuple[int, int, int], wanted: bool) -> None:
    """Beside the catalogue, which has some of its own."""
    problem = Problem(*mnk)
    offered, beside = candidates(problem, H200), special_candidates(problem, H200)
    assert len(offered) == len(set(offered))
    assert any(getattr(c, "split_kind", "") == "workspace" for c in beside) == wanted
    assert {c for c in beside if why_illegal(problem, c, H200) is None} <= set(offered)


# --- machine code ------------------------------------------------------------------------------------

KINDS = [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("NN", "fp16", "fp16")]
BUILT = [c for c in workspace_kernels() if c.split_k in (5, 16) and c.bk == 64 and c.cluster_n == 1]  # type: ignore[union-attr]


def listing_of(problem: Problem, config: KernelConfig) -> list[str]:
    """Opcodes; the kernel is held to the static gate on the way."""
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.nvrtc import compile_source
    from outblas.runtime.sass import check_static
    from support.disassembly import opcodes_of

    source = make_source(problem, config)
    cubin = compile_source(source, cache=None)
    assert check_static(cubin.facts, source, cubin) is None, config
    return opcodes_of(cubin.image)


@pytest.mark.parametrize("kind", KINDS, ids="_".join)
def test_kernels_of_the_pool_compile_without_spills(kind: tuple[str, str, str]) -> None:
    pytest.importorskip("cuda.bindings")
    from outblas.runtime.cubin import Cubin
    from outblas.runtime.nvrtc import compile_many
    from outblas.runtime.sass import check_static

    stored = [replace(c, store="tma") for c in BUILT if c.split_k == 5]  # type: ignore[arg-type]
    third = (*BUILT, *stored)[KINDS.index(kind) :: len(KINDS)]  # each kernel in one kind
    sources = [make_source(Problem(512, 512, 8192, *kind), c) for c in third]  # type: ignore[arg-type]
    for index, cubin in compile_many(sources, cache=None):
        assert isinstance(cubin, Cubin), cubin
        assert check_static(cubin.facts, sources[index], cubin) is None, sources[index].text
        assert (cubin.spill_bytes, cubin.stack_bytes) == (0, 0), sources[index].text


def test_parts_go_out_are_counted_with_release_and_acquire_and_come_back_in_flight() -> None:
    config = replace(PAIRS, cluster_m=1, split_k=4)
    problem = Problem(256, 512, 12288)
    code = listing_of(problem, config)
    count = next(i for i, text in enumerate(code) if text.startswith("ATOMG"))
    assert sum(text.startswith("ATOMG") for text in code) == 1 and ".INC.STRONG.GPU" in code[count]
    out = [i for i, text in enumerate(code) if text == "STG.E.128"]
    back = [i for i, text in enumerate(code) if re.fullmatch(r"LDG\.E.*\.128\.STRONG\.GPU", text)]
    fragments = config.bn // 8
    assert len(out) == fragments and max(out) < count
    assert any("MEMBAR" in text and text.endswith("GPU") for text in code[max(out) : count]), "released"
    assert "CCTL.IVALL" in code[count:], "acquired"
    assert len(back) == fragments * config.split_k and min(back) > count
    flight = int(dict(geometry(problem, config).constants)["LOADS"])
    first_sum = next(i for i in range(min(back), len(code)) if code[i].startswith("FADD"))
    assert sum(i < first_sum for i in back) == flight == 32


def test_kernels_without_a_workspace_have_nothing_of_it() -> None:
    code = listing_of(Problem(256, 512, 12288), replace(PAIRS, split_k=4, split_kind="cluster"))
    assert not any(text.startswith(("ATOMG", "STG.E.128", "LDG")) for text in code)


# --- who owns it -------------------------------------------------------------------------------------


class Buffer:
    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes, self.device = nbytes, device

    def numel(self) -> int:
        return self.nbytes


def test_a_stream_has_one_workspace_that_grows() -> None:
    kept = StreamWorkspaces(Buffer)
    small = kept.take(7, 1000, "cuda:0")
    assert kept.take(7, 600, "cuda:0") is small
    assert kept.take(9, 600, "cuda:0") is not small, "streams run at the same time"
    large = kept.take(7, 5000, "cuda:0")
    assert large is not small and large.nbytes == 5000 and kept.take(7, 1000, "cuda:0") is large


def test_memory_is_asked_for_on_a_thread_of_its_own() -> None:
    assert run_on_own_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(RuntimeError, match="out of memory"):
        run_on_own_thread(_refuse)


def _refuse() -> None:
    raise RuntimeError("out of memory")


def test_memory_is_had_while_the_interpreter_ends() -> None:
    """A handler of atexit may multiply, when no thread is started any more."""
    late = """if True:
        import atexit
        from outblas.runtime.workspace import run_on_own_thread
        atexit.register(lambda: print(run_on_own_thread(int, '7')))
    """
    done = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("7\n", "")


class Unloaded(LoadedKernel):
    """A kernel without a GPU that records its operands."""

    def __init__(self, config: KernelConfig) -> None:
        self.config, self.name = config, "fake"
        self.given: list[Any] = []

    def bind(self, problem: Problem, a: Any, b: Any, c: Any, workspace: Any = None) -> Any:
        self.given.append(workspace)
        return len(self.given)


def test_calls_of_one_stream_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(256, 512, 12288)
    monkeypatch.setattr("outblas.runtime.launch.allocate", Buffer)
    kernel = Unloaded(PAIRS)
    operands = [(Buffer(1, "cuda:0"),) * 3] * 4
    assert kernel.bind_many(problem, operands) == [1, 2, 3, 4]  # type: ignore[arg-type, comparison-overlap]
    assert len({id(w) for w in kernel.given}) == 1 and kernel.given[0].nbytes == workspace_bytes(problem, PAIRS)
    plain = Unloaded(replace(PAIRS, split_kind="cluster", split_k=2))
    plain.bind_many(problem, operands)  # type: ignore[arg-type]
    assert plain.given == [None] * 4
