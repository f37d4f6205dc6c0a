"""The environment that builds a kernel knob by knob, on an evaluator without a GPU."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env

from outblas.core.config import Launch
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.gpu_records import packaged_gpu
from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.kernels.kernel_space import KernelSpace, kernel_space
from outblas.kernels.knobs import all_knobs
from outblas.kernels.legality import why_illegal
from outblas.kernels.pool import pool
from outblas_lab.recordings.replay import ReplayEvaluator
from outblas_lab.train.cost_simulator import CostSimulator
from outblas_lab.train.knob_env import FORBIDDEN, MAX_DEVIATIONS, KnobEnv
from outblas_lab.train.recorded_members import RecordedMembers
from outblas_lab.train.reward import reward
from support.fake_gpu import FakeGpu
from support.gpus.known import H200
from support.helpers import ROOT, synthetic_recording
from support.llm_kernels import kernel

PROBLEMS = (Problem(64, 4096, 64), Problem(8, 512, 1024, "NN"), Problem(512, 512, 512, "TN", "bf16"))
SMALL = KernelSpace(pool()[::4], all_knobs())
H100 = packaged_gpu("h100")


def make(budget: int = 3, state: FakeGpu | None = None, **options: Any) -> KnobEnv:
    return KnobEnv((state or FakeGpu()).evaluator(), PROBLEMS, budget, **{"space": SMALL, **options})


def random_kernel(env: KnobEnv, rng: np.random.Generator) -> tuple[float, bool, dict[str, Any]]:
    """Choose by the masks until a kernel is measured; return what the last step returned."""
    while True:
        _, paid, over, _, info = env.step(np.int64(rng.choice(np.flatnonzero(env.action_masks()))))
        assert not info["invalid_action"]
        if info["evaluation"] is not None:
            return paid, over, info
        assert paid == 0 and not over


def of_kernel(env: KnobEnv, config: Any) -> tuple[float, bool, dict[str, Any]]:
    """Choose the values of one kernel until it is measured."""
    vector = env.space.knobs.encode(config)
    while True:
        knob = int(np.flatnonzero(np.logical_or.reduceat(env.action_masks(), env.view.starts))[0])
        _, paid, over, _, info = env.step(env.view.starts[knob] + vector[knob])
        if info["evaluation"] is not None:
            return paid, over, info


def test_gymnasium_finds_no_fault() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*not initialized.*|.*spec.*|.*infinity.*", category=UserWarning)
        check_env(make(), skip_render_check=True)


class OneTime(FakeGpu):
    """Every kernel takes the same time; the GPU is chosen."""

    def on(self, gpu: Gpu) -> Any:
        evaluator = self.evaluator()
        evaluator.gpu = gpu
        return evaluator


@pytest.mark.parametrize(
    ("problem", "gpu", "launch"),
    [
        pytest.param(Problem(1024, 1024, 1024), H200, "plain", marks=pytest.mark.slow),
        pytest.param(Problem(16, 4096, 4096, "NN"), H100, "plain", marks=pytest.mark.slow),
        pytest.param(Problem(48, 1000, 8192, "TN", "fp16", "fp16"), H100, "plain", marks=pytest.mark.slow),
        (Problem(8, 24, 1000, "TN", "bf16"), H200, "pdl"),
    ],
    ids=lambda value: getattr(value, "key", getattr(value, "name", value)),
)
def test_the_mask_equals_brute_force_on_random_prefixes(problem: Problem, gpu: Gpu, launch: Launch) -> None:
    """Compare 250 prefixes each with the predicate asked of every member of the whole space."""
    space = kernel_space()
    env = KnobEnv(OneTime().on(gpu), [problem], 10_000, space=space)
    env.reset(seed=1, options={"launch": launch})
    configs = [space.config(i, launch) for i in range(len(space.members))]
    usable = np.array([why_illegal(problem, config, gpu) is None for config in configs])
    names = [knob.name for knob in space.knobs.knobs]
    values = {name: np.array([getattr(config, name, None) for config in configs], object) for name in names}
    rng, seen, tried = np.random.default_rng(3), 0, set[int]()
    while seen < 250:
        match, at = usable.copy(), 0
        match[list(tried)] = False
        info: dict[str, Any] = {"evaluation": None}
        while info["evaluation"] is None:
            mask = env.action_masks()
            knob = int(np.flatnonzero(np.logical_or.reduceat(mask, env.view.starts))[0])
            for skipped in range(at, knob):  # knobs with one value were not asked
                (only,) = {*values[names[skipped]][match]}
                match &= values[names[skipped]] == only
            expected = {*values[names[knob]][match]}
            start, listed = int(env.view.starts[knob]), space.knobs.knobs[knob].values
            allowed = {listed[i] for i in range(len(listed)) if mask[start + i]}
            assert allowed == expected and mask.sum() == len(allowed), (env.chosen(), names[knob])
            seen += 1
            action = int(rng.choice(np.flatnonzero(mask)))
            match &= values[names[knob]] == listed[action - start]
            at = knob + 1
            *_, info = env.step(np.int64(action))
        assert info["evaluation"].config in {configs[i] for i in np.flatnonzero(match)}
        tried.add(int(np.flatnonzero(match)[0]))
        assert match.sum() == 1, "the choices name one kernel"


def test_every_kernel_is_legal_and_tried_once_until_none_is_left() -> None:
    state, rng = FakeGpu(), np.random.default_rng(5)
    few = KernelSpace([c for c in SMALL.members if why_illegal(PROBLEMS[0], c, H200) is None][:7], all_knobs())
    env = make(50, state, space=few, launches=("pdl",))
    env.reset(seed=0, options={"problem": PROBLEMS[0]})
    found, over = [], False
    while not over:
        _, over, info = random_kernel(env, rng)
        found.append(info["evaluation"].config)
    assert len(found) == len(set(found)) == 7
    assert all(c.pdl and why_illegal(PROBLEMS[0], c, H200) is None for c in found)
    assert env.action_masks().any()
    with pytest.raises(UsageError, match="after the end"):
        env.step(np.int64(0))


def test_rewards_are_relative_to_the_problem_and_later_ones_pay_improvements() -> None:
    env = make(8, scale=lambda problem, launch: (-0.5, 0.25))
    env.reset(seed=2, options={"problem": PROBLEMS[0], "launch": "plain"})
    rng, best = np.random.default_rng(1), None
    for _ in range(8):
        paid, _, info = random_kernel(env, rng)
        worth = min(MAX_DEVIATIONS, max(-MAX_DEVIATIONS, (reward(info["evaluation"]) + 0.5) / 0.25))
        assert paid == pytest.approx(worth if best is None else max(0.0, worth - best))
        best = worth if best is None else max(best, worth)
        assert reward(info["best"]) >= reward(info["evaluation"])


def test_a_forbidden_choice_costs_a_measurement_and_begins_the_kernel_anew() -> None:
    state = FakeGpu()
    env = make(2, state)
    env.reset(seed=0, options={"problem": PROBLEMS[0]})
    env.step(np.int64(np.flatnonzero(env.action_masks())[0]))
    assert env.chosen()
    _, paid, over, _, info = env.step(np.int64(np.flatnonzero(~env.action_masks())[0]))
    assert info["invalid_action"] and paid == FORBIDDEN and not over and not env.chosen()
    assert state.asked == [] and info["evaluation"] is None
    _, paid, over, _, info = env.step(np.int64(np.flatnonzero(~env.action_masks())[0]))
    assert over and info["invalid_action"]


def test_a_failed_kernel_pays_the_least_and_is_not_the_best() -> None:
    state = FakeGpu()
    env = make(3, state)
    env.reset(seed=0, options={"problem": PROBLEMS[0], "launch": "plain"})
    legal = [c for c in SMALL.members if why_illegal(PROBLEMS[0], c, H200) is None]
    state.statuses[PROBLEMS[0], legal[3]] = Status.WRONG
    good, _, _ = of_kernel(env, legal[0])
    paid, _, info = of_kernel(env, legal[3])
    assert paid == 0 < good + MAX_DEVIATIONS
    assert info["evaluation"].status is Status.WRONG and info["best"].config == legal[0]


def test_on_a_recording_only_recorded_members_are_offered() -> None:
    recording = synthetic_recording(candidates=40)
    space = KernelSpace([c.with_knobs(pdl=False) for c in recording.catalogue[::2]], _knobs_of(recording))
    members = RecordedMembers(recording, space)
    env = KnobEnv(ReplayEvaluator(recording), recording.problems, 4, members.offered, members.reward_scale, space=space)
    rng, found = np.random.default_rng(0), 0
    for episode in range(6):
        env.reset(seed=episode)
        assert env.problem is not None
        over = False
        while not over:
            _, over, info = random_kernel(env, rng)  # a replay raises for what it lacks
            found += 1
            assert info["evaluation"].config in recording.catalogue
    assert found == 24
    mean, deviation = members.reward_scale(recording.problems[0], "plain")
    assert deviation > 0 and -2 <= mean <= 1


def _knobs_of(recording: Any) -> Any:
    from outblas.kernels.knobs import knobs_of

    return knobs_of([c.with_knobs(pdl=False) for c in recording.catalogue])


def test_the_simulator_answers_by_the_model_and_scales_by_its_own_kernels() -> None:
    simulator = CostSimulator(H200, SMALL)
    env = KnobEnv(simulator, PROBLEMS, 2, scale=simulator.reward_scale, space=SMALL)
    rng, first = np.random.default_rng(0), []
    for episode in range(60):
        env.reset(seed=episode, options={"problem": PROBLEMS[2]})
        paid, _, info = random_kernel(env, rng)
        first.append(paid)
        assert info["evaluation"].status is Status.PASSED
    assert abs(np.mean(first)) < 0.8 and np.std(first) > 0.3
    assert simulator.source == "model:h200" and set(simulator.baselines(PROBLEMS[0])) == {"drawn"}
    assert all(why_illegal(PROBLEMS[0], c, H200) is None for c in simulator.candidates(PROBLEMS[0]))
    with pytest.raises(UsageError, match="a free kernel"):
        simulator.evaluate([(PROBLEMS[0], kernel(0))])


def test_the_same_seed_is_the_same_run() -> None:
    def run() -> list[Any]:
        env, rng = make(3), np.random.default_rng(9)
        found: list[Any] = []
        for episode in range(4):
            observation, info = env.reset(seed=11 if episode == 0 else None)
            found += [info["problem"], info["launch"], observation.tolist()]
            over = False
            while not over:
                paid, over, info = random_kernel(env, rng)
                found += [info["config"], paid]
        return found

    first = run()
    assert first == run()
    assert {"plain", "pdl"} <= {x for x in first if isinstance(x, str)}


def test_bad_arguments_are_one_clear_line() -> None:
    with pytest.raises(UsageError, match="budget is 0"):
        make(0)
    with pytest.raises(UsageError, match="before the first episode"):
        make().action_masks()
    with pytest.raises(UsageError, match="call reset first"):
        make().step(np.int64(0))
    with pytest.raises(UsageError, match="nothing that is offered"):
        make(offered=lambda *_: np.array([], np.intp)).reset()


def test_without_gymnasium_it_says_how_to_get_it() -> None:
    code = """
import sys
sys.modules["gymnasium"] = None  # as if not installed
from outblas.core.errors import ToolchainMissing
try:
    import outblas_lab.train.knob_env
except ToolchainMissing as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src")
    assert done.stdout == f"gymnasium is not installed; expected gymnasium; {install_hint('rl')}\n", done.stderr
