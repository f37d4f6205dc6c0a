"""References of proofs, kept from kernel to kernel: the same verdicts, in bounded memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from outblas.core.errors import UsageError  # noqa: E402
from outblas.core.evaluation import Status  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import gates, proof_inputs  # noqa: E402
from outblas.judge.gates import prove, prove_on_all  # noqa: E402
from outblas.judge.proof_inputs import normal_inputs  # noqa: E402
from outblas.judge.reference import Reference, b_as_k_by_n  # noqa: E402
from outblas.judge.trials import CachedTrials, ProofTrials, TrialCache  # noqa: E402

PROBLEM = Problem(24, 40, 96)


class Held:
    """A reference of a given size."""

    def __init__(self, nbytes):
        self.nbytes = nbytes


class Kernel:
    """fp32 accumulation; ``spoil`` is what else it does, to A, B and C of a call, by its number."""

    name = "kernel"

    def __init__(self, spoil=None):
        self.calls, self._spoil = 0, spoil

    def bind(self, problem, a, b, c):
        def call(stream):
            c.copy_(a.float() @ b_as_k_by_n(problem, b).float())
            self.calls += 1
            if self._spoil:
                self._spoil(a, b, c, self.calls)

        return call


def test_kept_trials_are_made_once_and_counted():
    trials, made = CachedTrials(), []

    def make():
        made.append(1)
        return torch.zeros(10), (torch.zeros(5, dtype=torch.float16), torch.zeros(1))

    assert trials.get("x", make) is trials.get("x", make) and made == [1]
    assert trials.bytes == 40 + 10 + 4
    a, b = normal_inputs(PROBLEM, 1)
    reference = trials.get("reference", lambda: Reference(PROBLEM, a, b))
    assert trials.bytes == 54 + reference.nbytes == 54 + 2 * 4 * 24 * 40


def test_memory_under_two_names_counts_once():
    trials = CachedTrials()
    a, b = trials.get("normal", lambda: normal_inputs(PROBLEM, 1))
    held = a.nbytes + b.nbytes
    trials.get("the same", lambda: (a, b))
    trials.get("a view", lambda: b.t()[:1])
    assert trials.bytes == held
    scaled, _ = trials.get("scaled", lambda: proof_inputs.scaled_inputs(PROBLEM, a, b))
    assert trials.bytes == held + scaled.nbytes
    reference = trials.get("reference", lambda: Reference(PROBLEM, a, b))
    trials.get("the same reference", lambda: (reference, b))
    assert trials.bytes == held + scaled.nbytes + reference.nbytes


def test_without_keeping_everything_is_made_anew():
    trials, made = ProofTrials(), []
    for _ in range(2):
        trials.get("x", lambda: made.append(1))
    assert made == [1, 1] and vars(trials) == {"seed": 0}


def test_a_shelf_forgets_what_was_not_asked_for_longest():
    trial_cache, problems = TrialCache(limit_bytes=100), [Problem(8, 8, k) for k in (8, 16, 24)]
    for p in problems[:2]:
        trial_cache.at(p).get("x", lambda: torch.zeros(12))
    first = trial_cache.at(problems[0])
    assert trial_cache.bytes == 96
    trial_cache.at(problems[2]).get("x", lambda: torch.zeros(12))
    assert trial_cache.at(problems[2]).bytes == 48 and trial_cache.bytes == 96
    assert trial_cache.at(problems[0]) is first, "the second made room"
    assert trial_cache.at(problems[1]).bytes == 0


def test_a_problem_that_is_larger_than_the_shelf_is_kept_while_it_is_in_hand():
    trial_cache = TrialCache(limit_bytes=10)
    large = trial_cache.at(PROBLEM)
    large.get("x", lambda: torch.zeros(1000))
    for _ in range(3):
        assert trial_cache.at(PROBLEM) is large and trial_cache.bytes == 4000
    trial_cache.at(Problem(8, 8, 8))
    assert trial_cache.bytes == 0


@pytest.mark.parametrize(("free", "limit"), [(140 * 2**30, 4 * 2**30), (2**30, 2**27)])
def test_a_shelf_takes_a_part_of_what_is_free(monkeypatch, free, limit):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 144 * 2**30))
    trial_cache, share = TrialCache.of_gpu(0), 3 * limit // 4
    trial_cache.at(Problem(8, 8, 8)).get("x", lambda: Held(share))
    trial_cache.at(Problem(8, 8, 16)).get("x", lambda: Held(limit // 4))
    assert trial_cache.at(Problem(8, 8, 8)).bytes == share and trial_cache.bytes == limit
    trial_cache.at(Problem(8, 8, 24)).get("x", lambda: Held(1))
    trial_cache.at(Problem(8, 8, 24))
    assert trial_cache.bytes == share + 1, "one byte too many: the one not asked for longest made room"


@pytest.mark.parametrize(
    ("layout", "dtype", "acc"), [("TN", "fp16", "fp32"), ("NN", "bf16", "fp32"), ("TN", "fp16", "fp16")]
)
def test_kept_trials_give_the_verdict_of_fresh_ones(layout, dtype, acc):
    problem, kept = Problem(24, 40, 96, layout, dtype, acc), CachedTrials()
    fresh = prove(Kernel(), problem, device="cpu")
    assert fresh.status is Status.PASSED
    for _ in range(2):
        assert prove(Kernel(), problem, device="cpu", trials=kept) == fresh


def test_nothing_is_drawn_again_for_the_next_kernel(monkeypatch):
    kept = CachedTrials()
    prove(Kernel(), PROBLEM, device="cpu", trials=kept)
    held = kept.bytes
    monkeypatch.setattr(proof_inputs, "_draw", None)
    for name in ("Reference", "fp64_product", "_their_product"):
        monkeypatch.setattr(gates, name, None)
    kernel = Kernel()
    assert prove(kernel, PROBLEM, device="cpu", trials=kept).status is Status.PASSED
    assert kept.bytes == held > 0 and kernel.calls > 15


WRONG = {
    "a wrong element": lambda a, b, c, n: c[3, 5].add_(1),
    "one call in seven": lambda a, b, c, n: c[0, 0].add_(1) if n % 7 == 0 else None,
    "it adds to A": lambda a, b, c, n: a[0, 0].add_(1),
    "it writes to B later": lambda a, b, c, n: b.zero_() if n > 9 else None,
    "it writes behind C": lambda a, b, c, n: c.as_strided((1,), (1,), c.storage_offset() + c.numel()).zero_(),
    "it keeps zeros for NaN": lambda a, b, c, n: c.nan_to_num_(0.0),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_kernel_is_caught_with_kept_trials_and_spoils_none(what):
    """It has operands of its own: whatever it does to them, the next kernel is judged as the first was."""
    fresh = prove(Kernel(WRONG[what]), PROBLEM, device="cpu")
    assert fresh.status is not Status.PASSED
    kept = CachedTrials()
    before = prove(Kernel(), PROBLEM, device="cpu", trials=kept)
    assert prove(Kernel(WRONG[what]), PROBLEM, device="cpu", trials=kept) == fresh
    assert prove(Kernel(), PROBLEM, device="cpu", trials=kept) == before


def test_a_reference_is_made_when_the_kernel_has_run(monkeypatch):
    """A stranger's kernel finds no answer in memory: its trials keep nothing."""
    said = []

    class Told(Reference):
        def __init__(self, *a):
            said.append("reference")
            super().__init__(*a)

    monkeypatch.setattr(gates, "Reference", Told)
    monkeypatch.setattr(
        gates, "fp64_product", lambda *a: said.append("reference") or b_as_k_by_n(a[0], a[2]).double().new_zeros(1)
    )
    prove(Kernel(lambda *_: said.append("run")), PROBLEM, device="cpu")
    assert said[:4] == ["run", "reference", "run", "reference"]


PROBLEMS = [PROBLEM, Problem(8, 16, 32), Problem(24, 40, 96, "NN")]


def test_a_kernel_is_proved_on_each_problem_with_the_largest_error_of_all():
    trial_cache = TrialCache()
    alone = [prove(Kernel(), p, device="cpu") for p in PROBLEMS]
    for _ in range(2):
        found = prove_on_all(Kernel(), PROBLEMS, 0, trial_cache, "cpu")
        assert found.gates == alone[-1].gates and found.max_err_ratio == max(v.max_err_ratio for v in alone)


def test_the_first_failure_ends_it_and_names_its_problem():
    def only_small_is_wrong(a, b, c, n):
        if c.shape == (8, 16):
            c[0, 0].add_(1)

    asked = []
    failed = prove_on_all(Kernel(only_small_is_wrong), (asked.append(p) or p for p in PROBLEMS), 0, TrialCache(), "cpu")
    assert failed.status is Status.WRONG and failed.detail.startswith("on 8_16_32: ") and asked == PROBLEMS[:2]


def test_a_judge_that_was_replaced_on_any_of_the_problems_is_seen(monkeypatch):
    def replaces(a, b, c, n):
        if c.shape == (8, 16):
            monkeypatch.setattr("outblas.judge.rules.check_rules", lambda proof_context: None)

    failed = prove_on_all(Kernel(replaces), PROBLEMS, 0, TrialCache(), "cpu")
    assert failed.status is Status.RULE_BROKEN and "outblas.judge.rules.check_rules" in failed.detail
    assert "rules" not in failed.gates


def test_what_a_wrong_kernel_may_have_overwritten_is_made_anew():
    trial_cache = TrialCache()
    assert prove_on_all(Kernel(), PROBLEMS, 0, trial_cache, "cpu").status is Status.PASSED

    def writes_far_away(a, b, c, n):
        c.as_strided((1,), (1,), c.storage_offset() + c.numel()).zero_()
        for p in PROBLEMS:
            trial_cache.at(p).get(("reference", "signed"), lambda: None).reference.zero_()

    assert prove_on_all(Kernel(writes_far_away), PROBLEMS, 0, trial_cache, "cpu").status is Status.MEMORY_VIOLATION
    assert trial_cache.bytes == 0
    assert prove_on_all(Kernel(), PROBLEMS, 0, trial_cache, "cpu").status is Status.PASSED


def test_no_problem_is_no_proof():
    with pytest.raises(UsageError, match="no problem"):
        prove_on_all(Kernel(), [], 0, TrialCache(), "cpu")
