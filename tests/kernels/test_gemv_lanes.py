"""The index arithmetic of sm80_gemv_mma without a GPU, lane by lane, on numpy.

The Python code follows the device code line by line (Source, multiply, the K loop, WarpSums, the store). lanes.py
emulates mma.sync. Data are small integers, so every sum is exact. A weight that is loaded twice, not at all or for the
wrong token changes the product.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from outblas.core.problem import Problem
from outblas.kernels.families.sm80_gemv_mma import Sm80GemvConfig
from outblas.kernels.geometry import geometry, grid, k_tiles
from outblas.kernels.legality import why_illegal
from support.gpus.known import H200
from support.helpers import half_of_pairs
from support.lanes import mma

CONFIGS = {
    "narrow": Sm80GemvConfig(8, 16, 1, 4, 2),
    "two_tiles": Sm80GemvConfig(16, 32, 1, 2, 2),
    "side_by_side": Sm80GemvConfig(8, 64, 2, 2, 1),
    "wide": Sm80GemvConfig(16, 128, 2, 3, 2),
    "split": Sm80GemvConfig(8, 64, 1, 2, 1, split_k=3),
    "split_16": Sm80GemvConfig(16, 64, 1, 3, 2, split_k=2),
    "wide_warp": Sm80GemvConfig(8, 128, 1, 2, 1, "shared"),
    "walk": Sm80GemvConfig(8, 16, 1, 4, 4, persistent=True),
    "walk_kept": Sm80GemvConfig(16, 64, 1, 8, 2, persistent=True, kept_k=1152),
    "walk_shared": Sm80GemvConfig(8, 64, 1, 8, 2, "shared", persistent=True, kept_k=1152),
}
SHAPES = [(1, 64, 8), (8, 128, 64), (3, 72, 200), (16, 136, 328), (5, 200, 512), (11, 24, 1032), (7, 77, 136)]


class Kernel:
    """A launch of ``config`` on a problem: CTAs, warps and lanes in turn."""

    def __init__(self, p: Problem, c: Sm80GemvConfig, a: np.ndarray, b: np.ndarray) -> None:
        self.p, self.c, self.a, self.b = p, c, a.ravel(), b.ravel()
        self.constants = dict(geometry(p, c).constants)
        self.k_major = p.layout == "TN"
        self.rows, self.nt = c.bn // c.wn, c.bm // 8
        self.mt, self.step = self.rows // 16, 64 if self.k_major else 32
        self.halves = self.step // 32
        self.loads, self.token_loads = self.rows * self.step // 256, self.nt * self.halves
        self.read: Counter[int] = Counter()  # elements of B by CTA row block that owns them: loaded how often
        self.tokens_read: set[int] = set()
        self.stored: Counter[tuple[int, int]] = Counter()
        self.out = np.zeros((p.m, p.n))

    def pair_row(self, tile: int, lane: int) -> int:
        return 16 * tile + 2 * (lane // 4) if self.k_major else 64 * (tile // 4) + 8 * (lane // 4) + 2 * (tile % 4)

    def run(self) -> np.ndarray:
        x, y, z = grid(self.p, self.c, 1 if self.c.persistent else 132)
        assert (y, z) == (1, 1)
        tiles = -(-self.p.n // self.c.bn)
        walked = [tile for block in range(x) for tile in range(block, tiles, x)] if self.c.persistent else range(tiles)
        for tile in walked:
            for warp_n in range(self.c.wn):
                row0 = tile * self.c.bn + warp_n * self.rows
                acc = [[self.warp(rank, warp_k, row0) for warp_k in range(self.c.wk)] for rank in range(self.c.split_k)]
                self.finish(acc, row0)
        return self.out

    def warp(self, rank: int, warp_k: int, row0: int) -> np.ndarray:
        """Accumulators [MT, NT, 32 lanes, 4] of one warp."""
        p, c = self.p, self.c
        everything = -(-p.k // self.step)
        share, extra = divmod(everything, c.split_k)
        first = rank * share + min(rank, extra)
        last = first + share + (rank < extra)
        steps = int((last - first - warp_k + c.wk - 1) / c.wk)
        k_end = min(last * self.step, p.k)
        if c.persistent:  # all warps take as many as the first one
            steps = -(-everything // c.wk)
            assert not c.kept_k or -(-steps // c.unroll) * c.unroll <= int(self.constants["KEPT_STEPS"])
        acc = np.zeros((self.mt, self.nt, 32, 4))
        done = 0
        while done < steps or done % c.unroll:  # whole rounds of the unrolled loop
            k0 = (first + warp_k + done * c.wk) * self.step
            weights = [[self.weight_load(lane, i, k0, k_end, row0) for i in range(self.loads)] for lane in range(32)]
            tokens = [[self.token_load(lane, i, k0, k_end) for i in range(self.token_loads)] for lane in range(32)]
            self.multiply(acc, np.array(weights), np.array(tokens))
            done += 1
        return acc

    def weight_load(self, lane: int, i: int, k0: int, k_end: int, row0: int) -> np.ndarray:
        """The eight halves of one 16-byte load."""
        at = k0 + 8 * (lane % 4) + (32 * (i % 2) if self.k_major else i % 8)
        stream = i // 2 if self.k_major else i // 8
        if self.k_major:
            row = row0 + self.pair_row(stream // 2, lane) + stream % 2
        else:
            row = row0 + 64 * stream + 8 * (lane // 4)
        inside = row < self.p.n
        start = row * (self.p.k if self.k_major else 1) if inside else 0
        if not at < k_end:
            return np.zeros(8)
        offset = start + at if self.k_major else start + at * self.p.n
        assert offset % 8 == 0 and offset + 8 <= len(self.b)  # aligned, and inside B
        if inside:
            self.read.update(range(offset, offset + 8))
        return self.b[offset : offset + 8]

    def token_load(self, lane: int, i: int, k0: int, k_end: int) -> np.ndarray:
        at = k0 + 8 * (lane % 4) + 32 * (i % self.halves)
        token = 8 * (i // self.halves) + lane // 4
        if not (token < self.p.m and at < k_end):
            return np.zeros(8)
        offset = token * self.p.k + at
        assert offset % 8 == 0 and offset + 8 <= len(self.a)
        self.tokens_read.update(range(offset, offset + 8))
        return self.a[offset : offset + 8]

    def multiply(self, acc: np.ndarray, w: np.ndarray, x: np.ndarray) -> None:
        """w: [lane, load, 8 halves]; registers are pairs of halves."""
        registers = w.reshape(32, self.loads, 4, 2)
        tokens = x.reshape(32, self.token_loads, 4, 2)
        for i in range(self.mt):
            for half in range(self.halves):
                for j in range(2):
                    a = np.zeros((32, 4, 2))
                    for lane in range(32):
                        r = registers[lane]
                        if self.k_major:
                            upper, lower = r[2 * i * self.halves + half], r[(2 * i + 1) * self.halves + half]
                            a[lane] = upper[2 * j], lower[2 * j], upper[2 * j + 1], lower[2 * j + 1]
                        else:
                            row, pair = i // 4 * 8 + 4 * j, i % 4
                            for e in (0, 2):  # prmt: low halves, high halves of two k rows
                                two = r[row + e][pair], r[row + e + 1][pair]
                                a[lane][e] = two[0][0], two[1][0]
                                a[lane][e + 1] = two[0][1], two[1][1]
                    for t in range(self.nt):
                        b = tokens[:, t * self.halves + half, 2 * j : 2 * j + 2]
                        acc[i, t] += mma(a, b)

    def finish(self, acc: list[list[np.ndarray]], row0: int) -> None:
        """WarpSums deals units to warps and CTAs; each is stored once, by its owner."""
        c, constants = self.c, self.constants
        warp_owners, owners = int(constants["WARP_OWNERS"]), int(constants["OWNERS"])
        units = self.mt * self.nt
        warp_owned = units // warp_owners
        cta_owned = warp_owned // owners
        total = np.sum([warp for rank in acc for warp in rank], axis=0).reshape(units, 32, 4)
        for rank in range(owners if c.split_k > 1 else 1):
            for warp_k in range(warp_owners):
                unit0 = warp_k * warp_owned + (rank * cta_owned if c.split_k > 1 else 0)
                for unit in range(unit0, unit0 + cta_owned):
                    for lane in range(32):
                        v = total[unit, lane]
                        token = unit % self.nt * 8 + 2 * (lane % 4)
                        row = row0 + self.pair_row(unit // self.nt, lane)
                        self.store_two(token, row, v[0], v[2])
                        self.store_two(token + 1, row, v[1], v[3])

    def store_two(self, row: int, col: int, lo: float, hi: float) -> None:
        for at, value in ((col, lo), (col + 1, hi)):
            if row < self.p.m and at < self.p.n:
                self.stored[row, at] += 1
                self.out[row, at] = value


@pytest.mark.parametrize(("name", "layout"), half_of_pairs(CONFIGS, ("TN", "NN")))
def test_every_weight_is_read_once_and_the_product_is_right(name: str, layout: str) -> None:
    config, ran = CONFIGS[name], 0
    for shape in SHAPES:
        problem = Problem(*shape, layout)  # type: ignore[arg-type]
        if why_illegal(problem, config, H200) is not None:
            continue
        ran += 1
        rng = np.random.default_rng(1)
        a = rng.integers(-4, 5, (problem.m, problem.k)).astype(float)
        b = rng.integers(-4, 5, problem.b_shape).astype(float)
        kernel = Kernel(problem, config, a, b)
        assert np.array_equal(kernel.run(), a @ (b.T if layout == "TN" else b)), shape
        assert set(kernel.read) == set(range(b.size)) and set(kernel.read.values()) == {1}, shape
        assert kernel.tokens_read == set(range(a.size)), shape
        assert len(kernel.stored) == problem.m * problem.n and set(kernel.stored.values()) == {1}, shape
    rows_fit = layout == "TN" or config.bn // config.wn >= 64
    assert bool(ran) == rows_fit


def test_the_device_code_takes_the_depth_of_a_step_that_is_assumed_here() -> None:
    for layout, step in (("TN", 64), ("NN", 32)):
        problem = Problem(1, 64, 4096, layout)  # type: ignore[arg-type]
        assert k_tiles(problem, CONFIGS["wide_warp"]) == 4096 // step
