"""Matrix instructions on the registers of 32 lanes, emulated on numpy from the PTX ISA."""

from __future__ import annotations

import numpy as np


def mma(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """m16n8k16 on registers of 32 lanes: a [32, 4, 2], b [32, 2, 2] -> d [32, 4]. (PTX ISA: Matrix Fragments
    for mma.m16n8k16 with floating point type.)"""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        g, t = divmod(lane, 4)
        for register in range(4):
            for e in range(2):
                left[g + 8 * (register % 2), 2 * t + e + 8 * (register // 2)] = a[lane, register, e]
        for register in range(2):
            for e in range(2):
                right[2 * t + e + 8 * register, g] = b[lane, register, e]
    product = left @ right
    d = np.zeros((32, 4))
    for lane in range(32):
        g, t = divmod(lane, 4)
        d[lane] = product[g, 2 * t], product[g, 2 * t + 1], product[g + 8, 2 * t], product[g + 8, 2 * t + 1]
    return d


def movmatrix_trans(pairs: np.ndarray) -> np.ndarray:
    """movmatrix.m8n8.trans.b16 on a register of 32 lanes, [32, 2] -> [32, 2]: lane l holds columns 2 (l % 4) and
    the next of row l / 4. (PTX ISA: movmatrix.)"""
    return pairs.reshape(8, 8).T.reshape(32, 2)
