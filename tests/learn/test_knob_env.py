"""The environment over the knobs, on an evaluator without a GPU."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env

from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Status
from outblas.core.install_hint import install_hint
from outblas.core.problem import Problem
from outblas.kernels.families.sm90_wgmma_gemm import Sm90WgmmaConfig
from outblas.kernels.knobs import all_legal_configs
from outblas.kernels.legality import why_illegal
from outblas.learn.knob_env import COUNTER_NAMES, MAX_LOG_SPEEDUP, KnobEnv
from outblas.learn.reward import reward
from support.fake_gpu import FakeGpu, time_us
from support.gpus.known import H200
from support.helpers import ROOT

PROBLEMS = (Problem(64, 4096, 64), Problem(8, 512, 1024, "NN"), Problem(512, 512, 512, "TN", "bf16"))
ILLEGAL = Sm90WgmmaConfig(64, 64, cluster_m=4, cluster_n=2, consumers=3)  # 3 consumers do not divide one block


def make(budget: int = 8, state: FakeGpu | None = None, **options: Any) -> KnobEnv:
    return KnobEnv((state or FakeGpu()).evaluator(), PROBLEMS, budget, **options)


def sampled(env: KnobEnv, rng: np.random.Generator) -> Any:
    """A random action by the masks, as a policy draws one."""
    parts = np.split(env.action_masks(), np.cumsum(env.knobs.nvec)[:-1])
    return np.array([rng.choice(np.flatnonzero(part)) for part in parts])


def test_gymnasium_finds_no_fault() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*not initialized.*|.*spec.*", category=UserWarning)
        check_env(make(), skip_render_check=True)


def test_the_first_measurement_is_paid_by_itself_and_then_improvements() -> None:
    state, problem = FakeGpu(), PROBLEMS[0]
    env = make(50, state)
    env.reset(seed=1, options={"problem": problem})
    slow_to_fast = sorted(env.pool, key=lambda c: -time_us(problem, c))
    slow, middle, fast, broken = slow_to_fast[0], slow_to_fast[len(env.pool) // 2], slow_to_fast[-1], slow_to_fast[1]
    state.statuses[problem, broken] = Status.WRONG
    worth: dict[KernelConfig, float] = {}
    paid = []
    for config in (middle, slow, broken, fast, middle):
        _, amount, over, truncated, info = env.step(env.encode(config))
        worth[config] = reward(info["evaluation"])
        paid.append(amount)
        assert not over and not truncated and not info["invalid_action"]
    assert paid == [worth[middle], 0.0, 0.0, worth[fast] - worth[middle], 0.0]
    assert worth[broken] < worth[slow] < worth[middle] < worth[fast]
    assert info["repeated"] and info["best"].config == fast
    assert sum(len(configs) for *_, configs in state.asked) == 4, "what was tried is not measured again"


def test_an_illegal_action_is_flagged_paid_as_illegal_and_costs_a_measurement() -> None:
    state = FakeGpu()
    env = make(3, state)
    env.reset(seed=0, options={"problem": PROBLEMS[0]})
    assert why_illegal(PROBLEMS[0], ILLEGAL, H200) is not None
    for left in (2 / 3, 1 / 3):
        observation, paid, over, _, info = env.step(env.encode(ILLEGAL))
        assert info["invalid_action"] and info["evaluation"].status is Status.ILLEGAL and info["best"] is None
        assert paid == reward(info["evaluation"]) < -1 and not over
        assert observation["budget"][0] == pytest.approx(left)
        assert observation["last_status"].tolist() == [float(status is Status.ILLEGAL) for status in Status]
        assert (observation["best"] == -1).all() and (observation["last"] != -1).any()
    assert state.asked == []
    _, paid, over, _, info = env.step(env.encode(env.pool[0]))
    assert over and paid == reward(info["evaluation"]), "the first that is measured is paid by itself all the same"
    with pytest.raises(UsageError, match="after the end"):
        env.step(env.encode(env.pool[1]))


@pytest.mark.parametrize("offered", [None, all_legal_configs], ids=["offered", "wide"])
def test_random_masked_actions_are_legal_or_flagged_and_masks_follow_what_is_left(offered: Any) -> None:
    env, rng = make(12, offered=offered), np.random.default_rng(5)
    flags = set()
    for episode in range(6):
        env.reset(seed=episode)
        assert env.problem is not None
        left, over = set(env.pool), False
        while not over:
            vectors = np.stack([env.encode(config) for config in left])
            for knob, allowed in enumerate(np.split(env.action_masks(), np.cumsum(env.knobs.nvec)[:-1])):
                assert set(np.flatnonzero(allowed)) == set(vectors[:, knob])
            # Every other action is one of those offered, so that both kinds come.
            action = sampled(env, rng) if rng.random() < 0.5 else env.encode(sorted(left, key=str)[0])
            observation, paid, over, _, info = env.step(action)
            config = env.decode(action)
            assert info["invalid_action"] == (why_illegal(env.problem, config, H200) is not None)
            assert info["invalid_action"] == (info["evaluation"].status is Status.ILLEGAL)
            assert observation in env.observation_space and np.isfinite(paid)
            flags.add(info["invalid_action"])
            left.discard(config)
    assert flags == {True, False}


def test_an_episode_ends_when_all_is_tried_and_still_has_a_mask() -> None:
    few = 3
    env = make(50, offered=lambda problem, gpu: [ILLEGAL, *all_legal_configs(problem, gpu)[:few]])
    env.reset(seed=3)
    assert len(env.pool) == few and ILLEGAL not in env.pool
    over = [env.step(env.encode(config))[2] for config in list(env.pool)]
    assert over == [False, False, True]
    assert all(part.any() for part in np.split(env.action_masks(), np.cumsum(env.knobs.nvec)[:-1]))


def test_a_legal_config_beside_the_offered_ones_is_measured_too() -> None:
    state = FakeGpu()
    env = make(5, state, offered=lambda problem, gpu: all_legal_configs(problem, gpu)[:2])
    env.reset(seed=0, options={"problem": PROBLEMS[0]})
    other = all_legal_configs(PROBLEMS[0], H200)[7]
    *_, info = env.step(env.encode(other))
    assert info["evaluation"].status is Status.PASSED and state.asked[0][2] == (other,)


def test_observations_say_what_was_found() -> None:
    class Counting:
        """The fake, whose evaluations have counters."""

        def __init__(self) -> None:
            self.inner = FakeGpu().evaluator()
            self.gpu = H200

        def candidates(self, problem: Problem) -> Any:
            return self.inner.candidates(problem)

        def evaluate(self, pairs: Any) -> Any:
            counters = {"registers": 51.0, "l2_hit_rate": 0.25, "stall_wait": 3.0, "sm_clock_mhz": 1700.0}
            return [replace(e, counters=counters) for e in self.inner.evaluate(pairs)]

    env = KnobEnv(Counting(), lambda rng: PROBLEMS[1], 4)  # type: ignore[arg-type]
    observation, info = env.reset(seed=0)
    assert info == {"problem": PROBLEMS[1].key}
    assert observation["problem"].tolist()[:9] == pytest.approx([3 / 32, 9 / 32, 10 / 32, 0, 1, 1, 0, 1, 0])
    assert (observation["best"] == -1).all() and not observation["counters"].any() and not observation["speedups"].any()
    slow, fast = (sorted(env.pool, key=lambda c: time_us(PROBLEMS[1], c))[i] for i in (-1, 0))
    env.step(env.encode(fast))
    observation, *_, info = env.step(env.encode(slow))
    assert info["evaluation"].speedup is not None and info["best"].speedup is not None
    ratios = [info["best"].speedup.ratio, info["evaluation"].speedup.ratio]
    assert (
        np.exp(observation["speedups"]) == pytest.approx(ratios)
        and abs(observation["speedups"]).max() < MAX_LOG_SPEEDUP
    )
    for name, config in (("best", fast), ("last", slow)):
        has = env.knobs.applies(config)
        assert (observation[name][~has] == -1).all()
        positions = env.encode(config)[has] / np.maximum(1, env.knobs.nvec[has] - 1)
        assert observation[name][has] == pytest.approx(positions)
    values, known = np.split(observation["counters"], 2)
    told = {name: value for name, value, has in zip(COUNTER_NAMES, values, known, strict=True) if has}
    assert told == pytest.approx({"registers": 0.2, "l2_hit_rate": 0.25, "stall_wait": 0.75})
    assert observation["budget"].tolist() == [0.5]


def test_the_same_seed_is_the_same_run() -> None:
    def run() -> list[Any]:
        env, rng = make(6), np.random.default_rng(9)
        found: list[Any] = []
        for episode in range(4):
            env.reset(seed=11 if episode == 0 else None)
            found.append(env.problem)
            over = False
            while not over:
                observation, paid, over, _, info = env.step(sampled(env, rng))
                found += [info["config"], paid, *(value.tolist() for value in observation.values())]
        return found

    first = run()
    assert first == run()
    assert len({p for p in first if isinstance(p, Problem)}) > 1


def test_bad_arguments_are_one_clear_line() -> None:
    with pytest.raises(UsageError, match="budget is 0"):
        make(0)
    with pytest.raises(UsageError, match="before the first episode"):
        make().action_masks()
    with pytest.raises(UsageError, match="call reset first"):
        make().step(np.zeros(31, int))
    with pytest.raises(UsageError, match="nothing that is offered"):
        make(offered=lambda *_: [ILLEGAL]).reset()
    with pytest.raises(UsageError, match="unknown reward"):
        env = make(preset="none such")
        env.reset()
        env.step(env.encode(env.pool[0]))


def test_without_gymnasium_it_says_how_to_get_it() -> None:
    code = """
import sys
sys.modules["gymnasium"] = None  # as if not installed
from outblas.core.errors import ToolchainMissing
try:
    import outblas.learn.knob_env
except ToolchainMissing as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src")
    assert done.stdout == f"gymnasium is not installed; expected gymnasium; {install_hint('rl')}\n", done.stderr


def test_a_masked_policy_can_be_trained_on_it() -> None:
    sb3 = pytest.importorskip("sb3_contrib")
    model = sb3.MaskablePPO("MultiInputPolicy", make(4), n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
    model.learn(32)
    env = make(4)
    observation, _ = env.reset(seed=2)
    action, _ = model.predict(observation, action_masks=env.action_masks(), deterministic=True)
    assert env.action_masks()[np.concatenate(([0], np.cumsum(env.knobs.nvec)[:-1])) + action].all()
