"""Block mode with false stamps: who runs when, and what becomes of cycles and nanoseconds."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from outblas.core.evaluation import Timing
from outblas.core.suites import BLOCK_FLOP, block_problems, suite
from outblas.judge import block_clock, rounds
from outblas.judge.block_clock import PART_SECONDS, PARTS, SETTLE_SECONDS, BlockClock, entries_to_time

#: Entry -> (microseconds per call, MHz) of the false GPU.
SPEEDS = {"ours": (100.0, 1200.0), "torch": (110.0, 1250.0), "lt_auto": (105.0, 1300.0)}
REPEATS = 3


class Board:
    """A GPU that takes time for each launch, and whose stamps tell it."""

    def __init__(self) -> None:
        self.ns, self.cycles = 0.0, 0.0
        self.log: list[str] = []

    def launch(self, name: str) -> tuple[int]:
        us, mhz = SPEEDS[name]
        self.log.append(name)
        self.ns += 1000 * us * REPEATS
        self.cycles += us * mhz * REPEATS
        return (0,)


class Stamps:
    def __init__(self, board: Board) -> None:
        self.board, self.made = board, {}  # type: ignore[var-annotated]

    def stamp(self, slot: int, stream: int) -> None:
        self.board.log.append(f"stamp {slot}")
        self.made[slot] = (self.board.cycles, self.board.ns)

    def between(self, first: int, second: int) -> tuple[float, float]:
        (cycles, ns), (cycles2, ns2) = self.made[first], self.made[second]
        return cycles2 - cycles, ns2 - ns


class Clock:
    stream, sets, gpu_index = 5, 2, 0

    def __init__(self, us: dict[str, float]) -> None:
        self.us, self.timed = us, []  # type: ignore[var-annotated]

    def round(self, graphs: list[Any], order: list[int]) -> list[float]:
        return [SPEEDS[graph.executable][0] for graph in graphs]

    def measure(self, graphs: dict[str, Any], number: int) -> dict[str, Timing]:
        self.timed.append((sorted(graphs), number))
        return {name: Timing("offline", (self.us[name],), self.us[name], 0.0) for name in graphs}

    def synchronize(self) -> None:
        pass


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    made = Board()
    monkeypatch.setattr(block_clock, "SmClock", lambda *_: Stamps(made))
    launch = SimpleNamespace(cuGraphLaunch=lambda graph, stream: made.launch(graph))
    monkeypatch.setattr(block_clock, "driver", lambda: launch)
    return made


def graph(name: str) -> Any:
    return SimpleNamespace(executable=name, repeats=REPEATS)


def measured(board: Board) -> dict[str, Timing]:
    return BlockClock(Clock({}), "sm_90a").measure({name: graph(name) for name in SPEEDS})  # type: ignore[arg-type]


def test_each_sample_is_the_time_of_a_call_and_each_frequency_of_its_own(board: Board) -> None:
    found = measured(board)
    for name, (us, mhz) in SPEEDS.items():
        assert found[name].samples_us == pytest.approx((us,) * (2 * PARTS)) and found[name].mode == "block"
        assert found[name].median_us == pytest.approx(us) and found[name].sm_mhz == pytest.approx(mhz)
        assert (found[name].repeats, found[name].operand_sets) == (REPEATS, 2)


def test_entries_run_one_after_the_other_and_back(board: Board) -> None:
    measured(board)
    launched = [line for line in board.log if not line.startswith("stamp")]
    turns = [name for i, name in enumerate(launched) if i == 0 or launched[i - 1] != name]
    assert turns == ["ours", "torch", "lt_auto", "torch", "ours"]  # the last is visited twice in a row


def test_an_entry_settles_before_its_first_stamp_and_every_part_lasts(board: Board) -> None:
    measured(board)
    graph_s = 1e-6 * SPEEDS["ours"][0] * REPEATS
    settle, part = math.ceil(SETTLE_SECONDS / graph_s), math.ceil(PART_SECONDS / graph_s)
    first = board.log[: settle + 1 + PARTS * (part + 1)]
    want = ["ours"] * settle
    for slot in range(PARTS):
        want += [f"stamp {slot}", *["ours"] * part]
    assert first == [*want, f"stamp {PARTS}"]
    assert settle * graph_s >= 0.25 and part * graph_s >= PART_SECONDS


def test_the_entry_at_the_turn_has_settled(board: Board) -> None:
    measured(board)
    graph_s = 1e-6 * SPEEDS["lt_auto"][0] * REPEATS
    settle, part = math.ceil(SETTLE_SECONDS / graph_s), math.ceil(PART_SECONDS / graph_s)
    assert board.log.count("lt_auto") == settle + 2 * PARTS * part


def test_what_is_far_behind_gets_no_second_visit(board: Board) -> None:
    graphs = {name: graph(name) for name in SPEEDS}
    found = BlockClock(Clock({}), "sm_90a").measure(graphs, drop_beyond=1.07)  # type: ignore[arg-type]
    assert {name: len(timing.samples_us) for name, timing in found.items()} == {
        "ours": 2 * PARTS,
        "torch": PARTS,
        "lt_auto": 2 * PARTS,
    }
    assert found["torch"].sm_mhz == pytest.approx(SPEEDS["torch"][1])
    assert rounds.speedup(found, "ours", ["torch"]).ratio == pytest.approx(1.1)


def test_the_speed_up_has_a_rival_and_an_interval(board: Board) -> None:
    found = rounds.speedup(measured(board), "ours", ["torch", "lt_auto"])
    assert found.baseline == "lt_auto" and found.ratio == pytest.approx(1.05)
    assert found.low <= found.ratio <= found.high


def test_torch_and_the_two_fastest_rivals_are_timed_and_every_entry_that_is_no_baseline() -> None:
    us = {"torch": 3.0, "cublas": 1.0, "lt_heuristic": 4.0, "lt_auto": 2.0}
    graphs = {name: graph(name) for name in ("7", "nvmmh", *us, "fallback")}
    clock = Clock(us)
    names = entries_to_time(clock, graphs, ["nvmmh"])  # type: ignore[arg-type]
    assert names == ["7", "torch", "cublas", "lt_auto", "fallback"]
    assert clock.timed == [(sorted(us), 3)]


def test_the_grid_has_187_problems_for_it() -> None:
    large = block_problems(suite("grid1000"))
    assert len(large) == 187 and min(p.flops for p in large) >= BLOCK_FLOP
    assert len([p for p in suite("grid1000") if p.flops >= 1e11]) == 187
