"""Kernel Tuner: its files round-trip and are what its own code reads and writes; its strategies are agents."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig, launch_of
from outblas.core.errors import ConfigError, OutblasError, RecordError, ToolchainMissing, UsageError
from outblas.core.evaluation import FAILURES, Evaluation, Status
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas.records.evaluation_json import evaluation_from_json, evaluation_to_json
from outblas.tune.agents.agent_registry import make_agent
from outblas_lab.agents import kernel_tuner as kernel_tuner_strategy
from outblas_lab.kernel_tuner.knob_space import ABSENT, PARAMETERS, config_at, point, restriction, tunable, varying
from outblas_lab.kernel_tuner.t4_files import T4Task, read_task, task_of, to_cache, to_t4
from outblas_lab.recordings.recording import STATUSES, Recording
from outblas_lab.recordings.recording_files import STATUS_CODES
from support.gpus.known import H200
from support.helpers import (
    failed_evaluation,
    passed_evaluation,
    synthetic_catalogue,
    synthetic_problems,
    synthetic_recording,
)

STRATEGIES = ("kt-genetic", "kt-annealing", "kt-diffevo", "kt-bayes")
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


@pytest.fixture
def task() -> T4Task:
    """Passed cells and one of every failure."""
    recording = synthetic_recording(candidates=80)
    row = recording.row(recording.problems[3])
    plain = [i for i, c in enumerate(recording.catalogue) if not c.pdl]
    for column, status in zip(plain[1:], FAILURES, strict=False):
        if status is not Status.ILLEGAL:
            recording.status[row, column] = STATUS_CODES[status]
            recording.median_us[row, column] = recording.spread[row, column] = np.nan
            recording.rounds[row, column] = 0
    return task_of(recording, recording.problems[3], "plain")


def written(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "file.json"
    path.write_text(text)
    return path


def t4_of(task: T4Task, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    data = to_t4(task)
    return data, written(json.dumps(data), tmp_path)


# Points


def test_every_config_is_a_point_and_back() -> None:
    for config in (
        *synthetic_catalogue(),
        Sm80DirectConfig(16, 8),
        Sm90WgmmaConfig(64, 8, a_rows=16, pdl=True, early=True),
    ):
        assert config_at(dict(zip(PARAMETERS, point(config), strict=True))) == config


def test_a_knob_that_a_family_lacks_is_absent() -> None:
    values = dict(zip(PARAMETERS, point(Sm80DirectConfig(16, 8)), strict=True))
    assert values["stages"] == values["split_k"] == ABSENT and values["bn"] == 8 and values["even"] is False
    assert len(PARAMETERS) == len(set(PARAMETERS)) and PARAMETERS[0] == "family"


def test_values_are_listed_in_order() -> None:
    configs = [Sm90WgmmaConfig(128, 64, stages=4), Sm80DirectConfig(16, 8), Sm90WgmmaConfig(64, 64, stages=3, pdl=True)]
    space = tunable(configs)
    assert space["bm"] == [16, 64, 128] and space["stages"] == [ABSENT, 3, 4] and space["pdl"] == [False, True]
    assert varying(configs[:1]) == () and varying(configs[::2]) == ("bm", "stages", "pdl")


def test_points_of_another_kernel_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size_x"):
        config_at({"block_size_x": 32})
    with pytest.raises(ConfigError, match="bm"):
        config_at({**dict(zip(PARAMETERS, point(Sm80DirectConfig(16, 8)), strict=True)), "bm": "none"})


# Files


def test_a_task_is_what_was_recorded() -> None:
    recording = synthetic_recording()
    problem = recording.problems[0]
    task = task_of(recording, problem, "pdl")
    assert task.launch == "pdl" and task.baselines_us == recording.baselines_of(problem)
    for config, cell in task.cells.items():
        column = recording.catalogue_index(config)
        assert STATUSES[recording.status[0, column]] is cell.status and launch_of(config) == "pdl"
        if cell.median_us is not None:
            assert np.float32(cell.median_us) == recording.median_us[0, column]
    with pytest.raises(UsageError, match="weights"):
        task_of(recording, problem, "weights")


def test_t4_and_cache_round_trip(task: T4Task, tmp_path: Path) -> None:
    assert {cell.status for cell in task.cells.values()} == {Status.PASSED, *FAILURES} - {Status.ILLEGAL}
    assert read_task(t4_of(task, tmp_path)[1]) == task
    assert read_task(written(to_cache(task), tmp_path)) == task


def test_every_task_of_the_packaged_recording_round_trips(tmp_path: Path) -> None:
    recording = Recording.load("h200")
    for problem in recording.problems[::250]:
        for launch in ("plain", "pdl"):
            task = task_of(recording, problem, launch)
            assert read_task(t4_of(task, tmp_path)[1]) == read_task(written(to_cache(task), tmp_path)) == task


def test_times_are_milliseconds(task: T4Task, tmp_path: Path) -> None:
    data, _ = t4_of(task, tmp_path)
    config, us = task.best()  # type: ignore[misc]
    result = data["results"][list(task.cells).index(config)]
    (time,) = [m for m in result["measurements"] if m["name"] == "time"]
    assert time == {"name": "time", "value": us / 1000, "unit": "ms"}
    assert data["metadata"]["timeunit"] == "milliseconds"


def test_failures_have_kernel_tuners_notation(task: T4Task, tmp_path: Path) -> None:
    data, _ = t4_of(task, tmp_path)
    entries = json.loads(to_cache(task))["cache"].values()
    said = {c.status: (r["invalidity"], e.get("__error__")) for c, r, e in
            zip(task.cells.values(), data["results"], entries, strict=True)}  # fmt: skip
    assert said[Status.PASSED] == ("correct", None)
    assert said[Status.COMPILE_ERROR] == ("compile", "CompilationFailedConfig")
    assert said[Status.HANG] == ("timeout", "RuntimeFailedConfig")
    assert said[Status.WRONG] == ("correctness", "RuntimeFailedConfig")
    assert all(("time" in e) == ("__error__" not in e) for e in entries)


def test_a_cache_cut_off_after_an_entry_is_read(task: T4Task, tmp_path: Path) -> None:
    """Kernel Tuner leaves such a file when it is killed."""
    lines = to_cache(task).splitlines()
    cut = read_task(written("\n".join(lines[:-3]), tmp_path))
    assert list(cut.cells.items()) == list(task.cells.items())[: len(cut.cells)] and 0 < len(cut.cells) < len(
        task.cells
    )


def test_evaluations_carry_what_was_measured(task: T4Task) -> None:
    for (config, cell), e in zip(task.cells.items(), task.evaluations(), strict=True):
        assert (e.config, e.status) == (config, cell.status) and evaluation_from_json(evaluation_to_json(e)) == e
        assert (e.timing.median_us if e.timing else None) == cell.median_us


def test_the_problem_must_be_known_and_agree(task: T4Task, tmp_path: Path) -> None:
    data, path = t4_of(task, tmp_path)
    with pytest.raises(UsageError, match="is for"):
        read_task(path, Problem(8, 8, 8))
    del data["metadata"]["outblas"]
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match="does not name its problem"):
        read_task(path)
    assert read_task(path, task.problem).cells == task.cells


@pytest.mark.parametrize(
    ("where", "what", "words"),
    [
        ("time", -1.0, "a time is -1"),
        ("time", float("nan"), "a time is nan"),
        ("time", True, "a time is True"),
        ("time", None, "a time is None"),
        ("time", "InvalidConfig", "a time is"),
        ("rounds", -1, "rounds"),
        ("spread", -0.5, "spread"),
        ("status", "wrong", "a consistent pair"),
        ("status", "splendid", "splendid"),
    ],
)
def test_figures_that_cannot_be_are_refused(task: T4Task, tmp_path: Path, where: str, what: Any, words: str) -> None:
    data, path = t4_of(task, tmp_path)
    passed = next(r for r in data["results"] if r["invalidity"] == "correct")
    next(m for m in passed["measurements"] if m["name"] == where)["value"] = what
    path.write_text(json.dumps(data))
    with pytest.raises(RecordError, match=words):
        read_task(path)


def test_a_config_with_two_times_is_refused_and_with_one_is_kept(task: T4Task, tmp_path: Path) -> None:
    data, path = t4_of(task, tmp_path)
    again = json.loads(json.dumps(data["results"][0]))
    path.write_text(json.dumps({**data, "results": [*data["results"], again]}))
    assert read_task(path) == task
    next(m for m in again["measurements"] if m["name"] == "time")["value"] *= 2
    path.write_text(json.dumps({**data, "results": [*data["results"], again]}))
    with pytest.raises(RecordError, match="twice"):
        read_task(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"results": 1, "schema_version": "1.0.0"}', '{"cache": {}}', '{"cache": [1]}',
             '{"results": [{}], "schema_version": "1.0.0"}', '{"results": [], "schema_version": "1.0.0"}',
             '{"results": [], "schema_version": "2.0.0"}',
             '{"results": [], "schema_version": "1.0.0", "metadata": {"timeunit": "seconds"}}']
)  # fmt: skip
def test_files_of_nothing_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(OutblasError):
        read_task(written(text, tmp_path), Problem(8, 8, 8))
    with pytest.raises(RecordError):
        read_task(tmp_path / "absent.json")


# Kernel Tuner's own code


def test_t4_is_valid_by_the_schema_of_kernel_tuner(task: T4Task) -> None:
    file_utils = pytest.importorskip("kernel_tuner.file_utils")
    schema = file_utils.output_file_schema("results")[1]
    validate = pytest.importorskip("jsonschema").validate
    validate(json.loads(json.dumps(to_t4(task))), schema)
    broken = to_t4(task)
    broken["results"][0]["invalidity"] = "splendid"
    with pytest.raises(Exception, match="splendid"):
        validate(broken, schema)


@pytest.mark.filterwarnings("ignore:None of the tunable parameters")
def test_kernel_tuner_simulates_our_cache_and_we_read_its_t4(task: T4Task, tmp_path: Path) -> None:
    kernel_tuner = pytest.importorskip("kernel_tuner")
    from kernel_tuner.file_utils import store_output_file

    task = replace(task, cells={c: cell for c, cell in task.cells.items() if cell.status is Status.PASSED})
    path = written(to_cache(task), tmp_path)
    only = [restriction(list(task.cells))]
    results, env = kernel_tuner.tune_cache(str(path), restrictions=only, strategy="brute_force", quiet=True)
    config, us = task.best()  # type: ignore[misc]
    assert len(results) == len(task.cells) and env["best_config"]["time"] == us / 1000
    assert config_at({name: env["best_config"][name] for name in PARAMETERS}) == config
    store_output_file(str(tmp_path / "own.json"), results, tunable(list(task.cells)))
    assert read_task(tmp_path / "own.json", task.problem).cells == task.cells
    assert read_task(path) == task, "Kernel Tuner left the cache as it was"


def test_kernel_tuner_reads_our_failures(task: T4Task, tmp_path: Path) -> None:
    util = pytest.importorskip("kernel_tuner.util")
    entries = util.read_cache(str(written(to_cache(task), tmp_path)), open_cache=False)["cache"].values()
    for cell, entry in zip(task.cells.values(), entries, strict=True):
        assert isinstance(entry.get("__error__"), util.ErrorConfig) == (cell.median_us is None)


def test_failures_of_kernel_tuner_become_ours(task: T4Task, tmp_path: Path) -> None:
    """In its own files there is no status, and an older cache has the error in place of the time."""
    data = json.loads(to_cache(task))
    first, second, third = list(data["cache"].values())[:3]
    for entry in data["cache"].values():
        del entry["status"]
    first["time"] = "InvalidConfig"
    second.update(__error__="CompilationFailedConfig")
    third.update(__error__="RuntimeFailedConfig")
    data["kernel_name"], data["outblas"] = "vector_add", {}
    cells = list(read_task(written(json.dumps(data), tmp_path), task.problem).cells.values())
    assert [cell.status for cell in cells[:3]] == [Status.ILLEGAL, Status.COMPILE_ERROR, Status.LAUNCH_ERROR]
    assert all(cell.median_us is None for cell in cells[:3])


# Strategies


GRID: list[KernelConfig] = [
    Sm90WgmmaConfig(bm, bn, stages=stages, split_k=split, group=group)
    for bm, bn, stages, split, group in product((64, 128), (32, 64, 128, 256), (3, 4, 5, 6), (1, 2, 4), (1, 2, 4, 8))
]


def smooth(config: KernelConfig) -> Evaluation:
    """Every knob for itself; one family fails."""
    problem = synthetic_problems()[0]
    if isinstance(config, Sm80MmaConfig):
        return failed_evaluation(problem, config)
    assert isinstance(config, Sm90WgmmaConfig)
    speed = (1 + config.bm / 128) * (1 - abs(config.bn - 64) / 512) * (1 + config.stages / 10) / config.split_k
    speed *= 1 + config.group / 20
    return passed_evaluation(problem, config, speed * 0.99, speed)


def searched(name: str, candidates: list[KernelConfig], budget: int, seed: int = 0, n: int = 1) -> list[Evaluation]:
    agent, history = make_agent(name, seed, H200), list[Evaluation]()
    while len(history) < budget:
        history += [smooth(c) for c in agent.propose(synthetic_problems()[0], candidates, history, n)]
    return history


@every_strategy
def test_strategies_leave_the_global_generators_as_they_were(name: str) -> None:
    pytest.importorskip("kernel_tuner")
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    first = searched(name, list(synthetic_catalogue(40)), 8)
    assert (random.random(), np.random.random()) == expected
    assert searched(name, list(synthetic_catalogue(40)), 8) == first, "whatever the generators' state"
    assert searched(name, list(synthetic_catalogue(40)), 8, seed=1) != first


@every_strategy
def test_one_at_a_time_a_strategy_measures_what_kernel_tuner_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proposals are, in order, what the strategy asks for in a single run in which every answer is known."""
    pytest.importorskip("kernel_tuner")
    order: list[KernelConfig] = []

    class Watched(kernel_tuner_strategy._Runner):
        def _answer(self, at: Any, options: Any) -> dict[str, Any]:
            if at in self.points and self.points[at] not in order:
                order.append(self.points[at])
            return super()._answer(at, options)

    proposed = [e.config for e in searched(name, GRID, 24)]
    monkeypatch.setattr(kernel_tuner_strategy, "_Runner", Watched)
    agent: Any = make_agent(name, 0, H200)
    seed = agent.rng(synthetic_problems()[0], ()).getrandbits(32)
    assert agent._asked(GRID, [smooth(c) for c in GRID], 1, seed) == []
    assert len(order) >= 16
    assert order[:24] == proposed[: len(order)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "kt-genetic" else pytest.mark.slow) for name in STRATEGIES],
)
def test_strategies_learn(name: str) -> None:
    """On a grid whose knobs matter one by one, 32 of 384 measurements find more than chance."""
    pytest.importorskip("kernel_tuner")

    def found(agent: str) -> float:
        runs = (searched(agent, GRID, 32, seed, 2) for seed in range(10))
        return sum(max(e.speedup.ratio for e in run if e.speedup) for run in runs) / 10

    assert found(name) > found("random") + 0.02


@every_strategy
def test_strategies_choose_by_what_was_measured(name: str) -> None:
    """Histories of the same configs with other outcomes lead elsewhere: it is not a fixed order."""
    pytest.importorskip("kernel_tuner")
    agent, problem = make_agent(name, 3, H200), synthetic_problems()[0]
    tried = [e.config for e in searched(name, GRID, 20, 3)]
    asked = set()
    for shift in range(5):
        speeds = np.roll(np.linspace(1, 2, len(tried)), 4 * shift).tolist()
        history = [passed_evaluation(problem, c, s, s) for c, s in zip(tried, speeds, strict=True)]
        asked.add(tuple(agent.propose(problem, GRID, history, 4)))
    assert len(asked) > 1


def test_a_strategy_that_asks_for_nothing_new_is_ended() -> None:
    """All but six candidates are known; the strategy, or chance, still proposes the rest."""
    pytest.importorskip("kernel_tuner")
    left = set(GRID[::64])
    history = [smooth(c) for c in GRID if c not in left]
    for name in STRATEGIES:
        proposed = make_agent(name, 0, H200).propose(synthetic_problems()[0], GRID, history, 5)
        assert len(set(proposed)) == 5 and set(proposed) <= left


def test_without_kernel_tuner_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernel_tuner", None)
    with pytest.raises(ToolchainMissing, match=r"'outblas-lab\[kernel-tuner\]'"):
        make_agent("kt-genetic", 0, H200)
    with pytest.raises(ToolchainMissing, match=r"'outblas-lab\[kernel-tuner\]'"):
        restriction([Sm80DirectConfig(16, 8)])
