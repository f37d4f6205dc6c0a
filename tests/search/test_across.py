"""Comparison of what agents learn from the judged GPU, from another one, and from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.cost.cost_model import scaled
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.tune.agents.agent_registry import make_agent
from outblas.tune.agents.base import Agent
from outblas_lab.agents.fitted_heuristic import FittedHeuristic
from outblas_lab.compare import held_out
from outblas_lab.compare.compare_result import read_comparison
from outblas_lab.compare.held_out import CompareUnit, Plan, run_unit
from outblas_lab.compare.splits import SOURCES, arm_parts, arms_of, make_split, parts_of
from outblas_lab.recordings.recording import Recording, TrainingPart
from outblas_lab.recordings.recording_files import STATUS_CODES
from outblas_lab.train import fit_cost_model
from support.cli_fixture import assert_refused, outblas
from support.gpus.known import H200
from support.gpus.made_recordings import derived_record, made_recording, packaged_record

#: The other GPU has some shapes that the judged one lacks, and lacks some.
SHAPES = [(m, n, 512) for m in (64, 128, 256) for n in (128, 256, 512, 1024, 2048)]
JUDGED = tuple(Problem(*shape, layout) for shape in SHAPES for layout in ("TN", "NN"))  # type: ignore[arg-type]
OTHER = tuple(Problem(*shape) for shape in (*SHAPES[3:], (512, 128, 512), (512, 4096, 512)))
CATALOGUE: tuple[KernelConfig, ...] = tuple(
    Sm80MmaConfig(bm, bn, pdl=pdl) for bm in (32, 64) for bn in (32, 64, 128) for pdl in (False, True)
)


@pytest.fixture(scope="module", name="judged")
def judged_fixture() -> Recording:
    return made_recording(packaged_record("h200"), JUDGED, CATALOGUE)


@pytest.fixture(scope="module", name="other")
def other_fixture() -> Recording:
    return made_recording(derived_record("A100"), OTHER, CATALOGUE, seed=1)


def mnk(problems: Sequence[Problem]) -> set[tuple[int, int, int]]:
    return {(p.m, p.n, p.k) for p in problems}


def test_each_agent_that_learns_has_an_arm_for_each_source() -> None:
    assert arms_of(["regressor", "random"], ["other", "both"], H200) == ["regressor@other", "regressor@both", "random"]
    assert arms_of(["heuristic"], list(SOURCES), H200) == ["heuristic@other", "heuristic@other-all", "heuristic@own"]
    assert arms_of(["nearest", "surrogate", "ppo"], ["both"], H200) == ["nearest@both", "surrogate@both", "ppo@both"]
    assert (arm_parts("ppo@both"), arm_parts("random")) == (("ppo", "both"), ("random", ""))


def test_an_agent_without_an_arm_is_refused() -> None:
    with pytest.raises(UsageError, match="agent heuristic does not support source 'both'"):
        arms_of(["regressor", "heuristic"], ["both"], H200)


@pytest.mark.parametrize("sources", [[], ["own", "own"], ["all"]])
def test_sources_that_do_not_exist_are_refused(sources: list[str]) -> None:
    with pytest.raises(UsageError, match="--learn-from"):
        arms_of(["regressor"], sources, H200)


@pytest.mark.parametrize("name", ["shapes", "families"])
def test_no_learner_sees_a_judged_shape_on_any_gpu(name: str, judged: Recording, other: Recording) -> None:
    split = make_split(name, JUDGED, 0.4, 1)
    parts = {source: parts_of(source, split, judged, other) for source in SOURCES}
    own, [elsewhere] = parts["own"], parts["other"]
    assert [part.problems for part in own] == [split.training]
    assert [part.problems for part in parts["both"]] == [split.training, elsewhere.problems]
    assert [part.problems for part in parts["other-all"]] == [OTHER]
    assert parts_of("", split, judged, other) == parts_of("own", split, judged, None) or len(own) == 1
    held = mnk(split.held_out)
    assert held & mnk(OTHER) and 0 < len(elsewhere.problems) < len(OTHER)
    for source in ("own", "other", "both"):
        assert not any(mnk(part.problems) & held for part in parts[source])
    if name == "families":
        assert not {(n, k) for _, n, k in held} & {(p.n, p.k) for p in elsewhere.problems}
    for part in (part for found in parts.values() for part in found):
        assert part.recording.problems == part.problems, "the recording holds nothing else"
    assert elsewhere.recording.gpu == other.gpu and own[0].recording.gpu == judged.gpu


def test_splits_by_layout_and_splits_that_leave_nothing_are_refused(judged: Recording, other: Recording) -> None:
    with pytest.raises(UsageError, match="split 'layout' does not support --across"):
        parts_of("other", make_split("layout", JUDGED), judged, other)
    split = make_split("shapes", JUDGED, 0.4, 1)
    seen = tuple(p for p in OTHER if (p.m, p.n, p.k) in mnk(split.held_out))
    with pytest.raises(UsageError, match="all problems of the other GPU"):
        parts_of("other", split, judged, other.restricted_to(seen))


class Spy(Agent):
    """Keeps what it learns from, and searches in the order of the candidates."""

    across = True

    def __init__(self, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self.parts: Sequence[TrainingPart] = ()

    def prepare_across(self, parts: Sequence[TrainingPart]) -> None:
        self.parts = parts

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        return list(candidates[len(history) : len(history) + n])


@pytest.mark.parametrize("source", SOURCES)
def test_an_arm_learns_from_its_source_and_is_judged_on_held_out_problems_of_the_judged_gpu(
    source: str, judged: Recording, other: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(0, judged.gpu)
    monkeypatch.setattr(held_out, "make_agent", lambda name, seed, gpu: spy if gpu == judged.gpu else None)
    plan = Plan("judged", (0, 1, 2), 0.4, 1, across="other")
    entries = list(run_unit(CompareUnit("shapes", f"regressor@{source}", 0), plan, judged, other))
    split = make_split("shapes", JUDGED, 0.4, 1)
    assert [p.problems for p in spy.parts] == [p.problems for p in parts_of(source, split, judged, other)]
    assert {task[0] for entry in entries for task in entry["tasks"]} == {p.key for p in split.held_out}


def test_the_cost_model_of_another_gpu_is_fitted_there_and_scaled(
    other: Recording, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    fitted: list[Gpu] = []
    fit = fit_cost_model.fit
    monkeypatch.setattr(fit_cost_model, "fit", lambda rows, gpu: fitted.append(gpu) or fit(rows, gpu, 2))
    problems = OTHER[:4]
    there, here = FittedHeuristic(0, other.gpu), FittedHeuristic(0, H200)
    for agent in (there, here):
        agent.prepare_across([TrainingPart(other, problems)])
    assert fitted == [other.gpu], "the fit of the other GPU is kept"
    assert there._fitted is not None and here._fitted is not None
    for family, own in there._fitted[0].items():
        assert here._fitted[0][family] == pytest.approx(scaled(family, own, H200, other.gpu))
    assert here._fitted[0] != there._fitted[0]
    with pytest.raises(UsageError, match="2 recordings"):
        here.prepare_across([TrainingPart(other, problems)] * 2)


def ordered(recording: Recording, order: Sequence[int], problem: Problem) -> Recording:
    """Return the recording with the candidates of a problem fastest in this order of columns, then the others."""
    us = recording.median_us.copy()
    columns = [*order, *(i for i in range(len(recording.catalogue)) if i not in order)]
    us[recording.row(problem), columns] = np.arange(1, len(columns) + 1)
    passed = np.full_like(recording.status, STATUS_CODES[Status.PASSED])
    us, spread = np.nan_to_num(us, nan=99.0), np.full_like(us, 0.01)
    return replace(recording, status=passed, median_us=us, spread=spread, rounds=np.full_like(recording.rounds, 5))


def plain(indices: Sequence[int]) -> list[KernelConfig]:
    return [CATALOGUE[i] for i in indices]


def test_the_nearest_shapes_kernels_come_first_and_those_of_the_gpu_itself_before(
    judged: Recording, other: Recording
) -> None:
    near, far = Problem(128, 256, 512), Problem(256, 2048, 512)
    here = ordered(ordered(judged, (4, 6), near), (8, 10), far)
    there = ordered(other, (2, 0), Problem(128, 1024, 512))
    offered = plain(range(0, 12, 2))
    agent = make_agent("nearest", 0, judged.gpu)
    agent.prepare(here, (far, near))
    wanted = Problem(128, 200, 512)
    assert agent.propose(wanted, offered, (), 4) == plain([4, 8, 6, 10])
    agent.prepare_across([TrainingPart(there, (Problem(128, 1024, 512),)), TrainingPart(here, (near, far))])
    assert agent.propose(wanted, offered, (), 3) == plain([4, 2, 8])
    tie = TrainingPart(ordered(made_recording(derived_record("A100"), (near,), CATALOGUE), (10,), near), (near,))
    agent.prepare_across([tie, TrainingPart(here, (near,))])
    assert agent.propose(wanted, offered, (), 2) == plain([4, 10])
    assert set(agent.propose(wanted, offered, (), 99)) == set(offered)


def test_a_kernel_that_is_not_offered_is_replaced_by_the_nearest_one(judged: Recording) -> None:
    near = Problem(128, 256, 512)
    agent = make_agent("nearest", 0, judged.gpu)
    agent.prepare(ordered(judged, (4,), near), (near,))
    assert CATALOGUE[4] == Sm80MmaConfig(32, 128)
    offered = [Sm80MmaConfig(64, 32), Sm80MmaConfig(32, 32), Sm80MmaConfig(32, 64)]
    assert agent.propose(Problem(128, 200, 512), offered, (), 1) == [Sm80MmaConfig(32, 64)]


@pytest.fixture(name="folders")
def folders_fixture(judged: Recording, other: Recording, tmp_path: Path) -> dict[str, str]:
    judged.write(tmp_path / "judged")
    other.write(tmp_path / "other")
    return {name: str(tmp_path / name) for name in ("judged", "other")}


def compare(judged: str, across: str, out: Path, *more: str) -> Any:
    command = ["compare", "--device", f"replay:{judged}", "--across", across, "--splits", "shapes", "--held-out", "0.4"]
    return outblas(
        *command, "--agents", "nearest,random", "--seeds", "1", "--budgets", "0,1,2", "--out", str(out), *more
    )


def test_the_command_compares_both_ways(folders: dict[str, str], tmp_path: Path, other: Recording) -> None:
    for judged, across, record in (
        ("judged", "other", derived_record("A100")),
        ("other", "judged", packaged_record("h200")),
    ):
        out = tmp_path / f"{judged}.parquet"
        said = compare(folders[judged], folders[across], out)
        assert said.exit_code == 0, said.output
        found = read_comparison(out)
        assert found.agents == ("nearest@other", "nearest@other-all", "nearest@both", "nearest@own", "random")
        about = found.meta["across"]
        assert (about["gpu"], about["provenance"]["gpu"]) == (record.gpu.name, record.title)
        learned, size = about["learned"]["shapes"], found.meta["splits"]["shapes"]
        assert learned["own"] == size["training"] and learned["both"] == learned["own"] + learned["other"]
        assert learned["other-all"] == len({"judged": JUDGED, "other": OTHER}[across]) > learned["other"]
        assert f"@other: the other GPU's, without the held-out shapes; {learned['other']} problems" in said.output
        assert {(p.m, p.n, p.k) for p in found.problems} <= mnk({"judged": JUDGED, "other": OTHER}[judged])


def test_a_regressor_of_each_source_searches_the_judged_gpu(
    judged: Recording, other: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="needs torch")
    from outblas_lab.train import regression

    monkeypatch.setenv("OUTBLAS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(regression, "RegressSettings", partial(regression.RegressSettings, nets=1, width=8, epochs=2))
    plan = Plan("judged", (0, 1, 12), 0.4, 1, sample=3, across="other")
    for source in ("other", "both"):
        (entry,) = run_unit(CompareUnit("shapes", f"regressor@{source}", 0), plan, judged, other)
        assert len(entry["tasks"]) == 6 and all(task[2][-1] == 1.0 for task in entry["tasks"])
    assert len(list(tmp_path.glob("regressors/*"))) == 2, "each source has a training of its own"


def test_a_result_of_another_second_gpu_is_not_replaced(
    folders: dict[str, str], tmp_path: Path, judged: Recording
) -> None:
    out = tmp_path / "out.parquet"
    assert compare(folders["judged"], folders["other"], out).exit_code == 0
    made_recording(packaged_record("h100"), OTHER, CATALOGUE).write(tmp_path / "third")
    assert_refused(compare(folders["judged"], str(tmp_path / "third"), out), "other settings", "across")
    assert_refused(compare(folders["judged"], folders["judged"], tmp_path / "x.parquet"), "--across", "another GPU")
    wrong = compare(folders["judged"], folders["other"], tmp_path / "x.parquet", "--splits", "layout")
    assert_refused(wrong, "split 'layout' does not support --across")
    assert not (tmp_path / "x.parquet.jsonl").exists()
