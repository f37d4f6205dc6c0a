"""The index arithmetic of sm80_direct_gemm without a GPU, lane by lane, on numpy.

The Python code follows the device code line by line (load_a, load_b, multiply_chunks, the sums of warps, the stores).
lanes.py emulates mma.sync and movmatrix. Data are small integers, so every sum is exact. A wrong k, a misplaced column
or a counted padding value changes the result.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from outblas.core.problem import Problem
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.geometry import geometry, grid
from outblas.kernels.geometry_terms import SM80_GROUP
from outblas.kernels.legality import why_illegal
from support.gpus.known import H200
from support.helpers import half_of_pairs
from support.lanes import mma, movmatrix_trans

CHUNK = 32
G, T = np.divmod(np.arange(32), 4)
CONFIGS = {
    "one_block": Sm80DirectConfig(16, 8, unroll=1),
    "wide_lane": Sm80DirectConfig(32, 32, unroll=2),
    "tall": Sm80DirectConfig(64, 16, unroll=1),
    "side_by_side": Sm80DirectConfig(32, 48, 2, 3, 1, 1),
    "warps_over_k": Sm80DirectConfig(16, 16, 1, 1, 5, 2),  # more of them than rows of a lane
    "uneven_summers": Sm80DirectConfig(32, 8, 1, 1, 3, 1),  # three warps add up four rows
    "everything": Sm80DirectConfig(64, 64, 2, 2, 2, 2),
}
#: Whole; M, N and K ragged, K within one chunk and past a round of all warps; more than a band of tile rows.
SHAPES = [(16, 8, 32), (1, 8, 8), (17, 40, 24), (33, 72, 136), (64, 64, 352), (70, 24, 712), (300, 16, 48)]


class Kernel:
    """A launch of ``config`` on a problem: CTAs and warps in turn, the lanes of a warp at once."""

    def __init__(self, p: Problem, c: Sm80DirectConfig, a: np.ndarray, b: np.ndarray) -> None:
        self.p, self.c, self.a, self.b = p, c, a.ravel(), b.ravel()
        self.mt, self.nt = c.bm // c.wm // 16, c.bn // c.wn // 8
        self.own, self.rows = 2 * self.nt, 2 * self.mt
        self.read: dict[str, set[int]] = {"a": set(), "b": set()}
        self.stored: Counter[tuple[int, int]] = Counter()
        self.out = np.zeros((p.m, p.n))

    def run(self) -> np.ndarray:
        x, y, z = grid(self.p, self.c, 132)
        for block in np.ndindex(x, y, z):
            i, o = block[2] * SM80_GROUP + block[0], block[1]  # grid_tile
            if i * self.c.bm < self.p.m:
                self.tile(i, o)
        return self.out

    def tile(self, tile_m: int, tile_n: int) -> None:
        c = self.c
        for position in range(c.wm * c.wn):
            row0 = tile_m * c.bm + position // c.wn * 16 * self.mt
            col0 = tile_n * c.bn + position % c.wn * 8 * self.nt
            self.finish([self.warp(warp_k, row0, col0) for warp_k in range(c.wk)], row0, col0)

    def warp(self, warp_k: int, row0: int, col0: int) -> np.ndarray:
        """Accumulators [MT, NT, 32 lanes, 4] of one warp."""
        acc = np.zeros((self.mt, self.nt, 32, 4))
        batch = self.c.unroll * CHUNK
        for k0 in range(warp_k * batch, self.p.k, self.c.wk * batch):
            for u in range(self.c.unroll):
                self.multiply(acc, self.load_a(row0, k0 + u * CHUNK), self.load_b(col0, k0 + u * CHUNK))
        return acc

    def load_vector(self, name: str, words: int, offset: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Load for every lane: [32, words, 2 halves]; zeros, and no read, where a lane is not valid."""
        flat = self.a if name == "a" else self.b
        at = offset[:, None] + np.arange(2 * words)
        assert (offset[valid] % (2 * words) == 0).all(), "aligned"
        assert (at[valid] >= 0).all() and (at[valid] < len(flat)).all(), f"inside {name}"
        self.read[name].update(at[valid].ravel().tolist())
        return np.where(valid[:, None], flat[at % len(flat)], 0).reshape(32, words, 2)

    def load_a(self, row0: int, k0: int) -> np.ndarray:
        """[MT, 2 halves of the block, 32 lanes, 4 registers, 2]."""
        col = k0 + 8 * T
        rows = [[np.minimum(row0 + 16 * i + 8 * h + G, self.p.m - 1) for h in range(2)] for i in range(self.mt)]
        return np.array([[self.load_vector("a", 4, r * self.p.k + col, col < self.p.k) for r in two] for two in rows])

    def load_b(self, col0: int, k0: int) -> np.ndarray:
        """[NT, 32 lanes, 4 registers, 2] as mma takes it, transposed already for NN."""
        p = self.p
        if p.layout == "TN":
            k = k0 + 8 * T
            cols = [np.minimum(col0 + self.own * (G // 2) + 2 * i + G % 2, p.n - 1) for i in range(self.nt)]
            return np.array([self.load_vector("b", 4, col * p.k + k, k < p.k) for col in cols])
        col = np.minimum(col0 + self.own * T, p.n - self.own)
        b = np.zeros((self.nt, 32, 4, 2))
        for j in range(4):
            row = k0 + 8 * (G // 2) + 2 * j + G % 2
            v = self.load_vector("b", self.nt, row * p.n + col, row < p.k)
            for i in range(self.nt):
                b[i, :, j] = movmatrix_trans(v[:, i])
        return b

    def multiply(self, acc: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        for step in range(2):
            for i in range(self.mt):
                upper, lower = a[i, 0], a[i, 1]
                fragment = np.stack(
                    [upper[:, 2 * step], lower[:, 2 * step], upper[:, 2 * step + 1], lower[:, 2 * step + 1]], axis=1
                )
                for j in range(self.nt):
                    acc[i, j] += mma(fragment, b[j][:, 2 * step : 2 * step + 2])

    def finish(self, warps: list[np.ndarray], row0: int, col0: int) -> None:
        """Each row of a lane is added up and stored by one warp of the position."""
        col = col0 + self.own * T
        summers = min(self.c.wk, self.rows)
        for warp_k in range(summers):
            for r in range(warp_k, self.rows, summers):
                v = sum(self.lane_row(acc, r) for acc in warps)
                self.store_row(v, row0 + 8 * r + G, col)

    def lane_row(self, acc: np.ndarray, r: int) -> np.ndarray:
        """[32 lanes, OWN]."""
        return np.concatenate([acc[r // 2, i][:, 2 * (r % 2) : 2 * (r % 2) + 2] for i in range(self.nt)], axis=1)

    def store_row(self, v: np.ndarray, row: np.ndarray, col: np.ndarray) -> None:
        for lane in range(32):
            if row[lane] >= self.p.m or col[lane] >= self.p.n:
                continue
            assert (row[lane] * self.p.n + col[lane]) % self.own == 0, "aligned"
            for e in range(self.own):
                at = int(row[lane]), int(col[lane]) + e
                assert at[1] < self.p.n
                self.stored[at] += 1
                self.out[at] = v[lane, e]


@pytest.mark.parametrize(("name", "layout"), half_of_pairs(CONFIGS, ("TN", "NN")))
def test_all_is_read_every_output_is_stored_once_and_the_product_is_right(name: str, layout: str) -> None:
    config = CONFIGS[name]
    for shape in SHAPES:
        problem = Problem(*shape, layout)  # type: ignore[arg-type]
        assert why_illegal(problem, config, H200) is None
        rng = np.random.default_rng(1)
        a = rng.integers(-4, 5, (problem.m, problem.k)).astype(float)
        b = rng.integers(-4, 5, problem.b_shape).astype(float)
        kernel = Kernel(problem, config, a, b)
        assert np.array_equal(kernel.run(), a @ (b.T if layout == "TN" else b)), shape
        assert (len(kernel.read["a"]), len(kernel.read["b"])) == (a.size, b.size), shape
        assert len(kernel.stored) == problem.m * problem.n and set(kernel.stored.values()) == {1}, shape


@pytest.mark.parametrize("name", CONFIGS)
def test_the_device_code_is_given_what_is_assumed_here(name: str) -> None:
    config = CONFIGS[name]
    constants = dict(geometry(Problem(64, 64, 64), config).constants)
    assert (int(constants["GROUP"]), config.bk, config.vec) == (SM80_GROUP, CHUNK, 8)
    assert [int(constants[k]) for k in ("WM", "WN", "WK", "UNROLL")] == [config.wm, config.wn, config.wk, config.unroll]


def test_movmatrix_transposes() -> None:
    tile = np.arange(64).reshape(8, 8)
    held = np.array([[tile[lane // 4, 2 * (lane % 4) + e] for e in range(2)] for lane in range(32)])
    moved = movmatrix_trans(held)
    assert all(moved[lane, e] == tile[2 * (lane % 4) + e, lane // 4] for lane in range(32) for e in range(2))
