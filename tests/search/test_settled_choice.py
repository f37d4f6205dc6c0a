"""Step ``settle`` of `outblas build-library`: kernels of an engine's weights, chosen at the power limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.core.suites import Table
from outblas.core.weight import Weight
from outblas.records.library import Library
from outblas.records.library_interval import LibraryInterval
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.search.build_library import finalist_trials, settled_choice
from outblas.search.build_library.build_steps import DEFAULT_STEPS, LIBRARY_STEPS, STEPS
from outblas.search.build_library.settled_choice import SIZES, SOURCE, settle, settled_candidates, settled_intervals
from support.build_library_fixture import script_fixture, work_fixture  # noqa: F401
from support.gpus.known import H200
from support.gpus.modelled_gpu import LARGE, SMALL

ENGINE = Table.parse("engine:TN:bf16:fp32")
WEIGHT = Weight(4096, 4096, "TN", "bf16")


def interval(first: int, last: int, config: KernelConfig | None, source: str = "cuda") -> LibraryInterval:
    choice = None if config is None else LibraryChoice(config, 1.1, 1.1, 1.1)
    row = LibraryRow(WEIGHT.problem(first), "torch", source=source, plain=choice, pdl=choice)
    return LibraryInterval(row, last, tuple(sorted({first, last, *(m for m in SIZES if first <= m <= last)})))


def row(m: int, config: KernelConfig | None, low: float = 1.1) -> LibraryRow:
    choice = None if config is None else LibraryChoice(config, 1.2, low, 1.3)
    return LibraryRow(WEIGHT.problem(m), "torch", source=SOURCE, plain=choice)


def line(problem: Problem, configs: Sequence[KernelConfig]) -> dict[str, Any]:
    """Blocks in which SMALL takes 80 us below 100 rows and 120 us above, LARGE 90 us, and torch 100 us."""

    def timing(us: float) -> dict[str, Any]:
        return {"us": [us * (1 + 0.001 * (i % 3)) for i in range(10)], "repeats": 1, "sets": 2, "mhz": 1300.0}

    own = {SMALL: 80.0 if problem.m < 100 else 120.0, LARGE: 90.0}
    kernels = {config_name(c): timing(own.get(c, 200.0)) for c in configs}
    rivals = {"torch": timing(100.0), "lt_auto": timing(101.0), "cublas": timing(102.0)}
    return {"problem": problem.key, "rivals": rivals, "details": {}, "left_out": {}, "kernels": kernels, "failed": {}}


@pytest.fixture(name="gpu")
def gpu_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """One weight of suite engine, whose kernels a fake GPU times; return the problems that it timed."""
    timed: list[Problem] = []

    def live_station(work: Any, chosen: Any, options: Any) -> Any:
        assert options.mode == "block"

        @contextmanager
        def station(index: int, todo: Any) -> Iterator[Any]:
            yield lambda problem: timed.append(problem) or line(problem, chosen[problem])

        return station

    made = {"gpu": "H200", "driver": "1", "toolchain": {}, "date": "2026-11-29", "commit": "c"}
    monkeypatch.setattr(Table, "problems", lambda table: [WEIGHT.problem(m) for m in (1, 64, 104, 256)])
    monkeypatch.setattr(settled_choice, "live_station", live_station)
    for module in (settled_choice, finalist_trials):
        monkeypatch.setattr(module, "gpu_of_device", lambda index: H200)
        monkeypatch.setattr(module, "collect_provenance", lambda *_: made)
    monkeypatch.setattr(settled_choice, "_passed", lambda work, pairs: set(pairs))
    return timed


def test_blocks_choose_at_the_sizes_and_other_rows_keep_their_kernels(
    work: Any, gpu: list[Problem], capsys: pytest.CaptureFixture[str]
) -> None:
    before = Library("h200", (), {"tables": {}}, (interval(1, 200, SMALL), interval(201, 512, LARGE)))
    before.save(work.library)
    settle(work, ENGINE)
    library = work.load()
    kernels = {m: library.lookup(WEIGHT.problem(m)).kernel("plain") for m in (1, 64, 72, 80, 104, 192, 256, 512)}
    assert kernels == {1: SMALL, 64: SMALL, 72: SMALL, 80: SMALL, 104: LARGE, 192: LARGE, 256: LARGE, 512: LARGE}
    assert library.lookup(WEIGHT.problem(104)).source == SOURCE
    assert library.lookup(WEIGHT.problem(1)).source == "cuda"
    assert library.provenance["intervals"][str(ENGINE)]["settled"]["intervals"] == 2
    assert [problem.m for problem in gpu] == [*SIZES]
    settle(work, ENGINE)
    assert len(gpu) == len(SIZES), "what was settled is not timed again"
    assert "done before" in capsys.readouterr().out


def test_an_interrupted_step_keeps_what_it_timed(
    work: Any, gpu: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    Library("h200", (), {"tables": {}}, (interval(1, 200, SMALL), interval(201, 512, LARGE))).save(work.library)
    keep = settled_choice.keep_trial

    def interrupted(work: Any, table: Table, start: str, chosen: Any, *rest: Any) -> None:
        keep(work, table, start, dict(list(chosen.items())[:2]), *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(settled_choice, "keep_trial", interrupted)
    with pytest.raises(KeyboardInterrupt):
        settle(work, ENGINE)
    assert [one.source for one in (work.load().lookup(WEIGHT.problem(m)) for m in (64, 104))] == [SOURCE, "cuda"]


def test_candidates_are_the_weights_own_kernels_of_rows_nearby_and_winners_of_weights_nearby() -> None:
    near = Weight(4608, 4096, "TN", "bf16")
    other = LibraryInterval(LibraryRow(near.problem(1), plain=LibraryChoice(LARGE, 1.2, 1.2, 1.2)), 512, (1, 512))
    library = Library("h200", (), {"tables": {}}, (interval(1, 256, SMALL), interval(257, 512, None), other))
    found = settled_candidates(library, ENGINE, H200)
    assert found[WEIGHT.problem(104)] == [SMALL, LARGE]
    with pytest.raises(UsageError, match="no intervals of engine"):
        settled_candidates(Library("h200", (), {"tables": {}}), ENGINE, H200)


def test_sizes_with_one_kernel_are_one_interval_if_it_passes_between_them() -> None:
    rows = [row(64, SMALL), row(80, LARGE, 1.05), row(104, LARGE, 1.02), row(128, None), row(192, None)]
    joined = settled_intervals(rows, set)
    assert [(one.first, one.last, one.measured) for one in joined] == [
        (64, 64, (64,)), (80, 104, (80, 104)), (128, 128, (128,)), (192, 192, (192,)),
    ]  # fmt: skip
    assert joined[1].row.plain is not None and joined[1].row.plain.low == 1.02, "the lowest figure counts"
    apart = settled_intervals(rows, lambda pairs: set())
    assert [(one.first, one.last) for one in apart] == [(m, m) for m in (64, 80, 104, 128, 192)]


def test_the_step_makes_a_part_of_the_library_and_runs_only_when_named() -> None:
    assert STEPS["settle"] is settle and "settle" in LIBRARY_STEPS and "settle" not in DEFAULT_STEPS
