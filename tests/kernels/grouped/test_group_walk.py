"""The walk of a grouped kernel, run on a CPU: every tile of every group once, whatever the ends are."""

from __future__ import annotations

import random
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

KERNELS = resources.files("outblas.kernels")


def built(folder: Path, bn: int, rows: int, cluster: int, group: int) -> Path:
    """Return a program that walks with these knobs."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    program = folder / "walk"
    names = {"BN": bn, "ROWS": rows, "CLUSTER": cluster, "GROUP": group}
    command = [compiler, "-std=c++20", "-O1", "-pthread", *(f"-DTEST_{name}={value}" for name, value in names.items())]
    command += [f"-I{KERNELS / folder_of}" for folder_of in ("grouped", "cuda")]
    subprocess.run([*command, str(Path(__file__).parent / "walk.cpp"), "-o", str(program)], check=True)
    return program


def ends_of(draw: random.Random, groups: int, rows: int) -> list[int]:
    """Return ends of groups: of any numbers, of one group that has all rows, of the last one, or ascending."""
    kind = draw.randrange(5)
    if kind == 0:
        return [draw.randrange(-5, rows + 50) for _ in range(groups)]
    if kind == 1:
        return [rows] * groups
    if kind == 2:
        return [0] * (groups - 1) + [rows]
    return sorted(draw.randrange(rows + 1) for _ in range(groups))


def expected(ends: list[int], rows: int, n: int, bn: int, tile: int, cluster: int) -> list[tuple[int, ...]]:
    """Return (group, begin, end, row of W) of each tile, in order. Ends are clamped to the one before and to rows."""
    found, last = [], 0
    for group, given in enumerate(ends):
        end = max(min(given, rows), last)
        for begin in range(last, end, bn):
            found += [(group, begin, end, tile * i) for i in range(-(-n // (tile * cluster)) * cluster)]
        last = end
    return sorted(found)


@pytest.mark.parametrize(("bn", "tile", "cluster", "group"), [(8, 64, 1, 8), (128, 128, 2, 4), (16, 128, 1, 1)])
def test_every_tile_of_every_group_comes_once(bn: int, tile: int, cluster: int, group: int, tmp_path: Path) -> None:
    program, draw = built(tmp_path, bn, tile, cluster, group), random.Random(bn)
    cases = []
    for _ in range(24):
        groups, rows = (
            draw.choice((1, 2, 31, 32, 33, 128, 256, 257, 300, 513, 1024)),
            draw.choice((0, 1, 7, 129, 512, 2000)),
        )
        cases.append(
            (rows, draw.choice((64, 200, 1536)), cluster * draw.choice((1, 3, 66)), ends_of(draw, groups, rows))
        )
    given = "".join(f"{len(ends)} {rows} {n} {ctas} {' '.join(map(str, ends))}\n" for rows, n, ctas, ends in cases)
    result = subprocess.run([str(program)], input=given, capture_output=True, text=True, check=False)
    assert result.returncode == 0, "has_next and next disagree"
    walked = result.stdout.split("done\n")[:-1]
    assert len(walked) == len(cases)
    for (rows, n, _, ends), text in zip(cases, walked, strict=True):
        tiles = sorted(tuple(map(int, line.split())) for line in text.splitlines())
        assert tiles == expected(ends, rows, n, bn, tile, cluster), (rows, n, ends)
