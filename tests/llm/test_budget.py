from __future__ import annotations

import asyncio

import pytest

from outblas.core.errors import UsageError
from outblas_lab.llm.budget import Budget, BudgetSpent, Cost, Price, SpendingAccount, at_least, at_most, parse_budget
from outblas_lab.llm.evolve import log_gap, next_problem
from outblas_lab.llm.models import Model, parse_models
from outblas_lab.llm.rate_limits import RateLimiter


@pytest.mark.parametrize(
    "text, budget",
    [
        ("50 requests", Budget(requests=50)),
        ("1 request", Budget(requests=1)),
        ("2M tokens", Budget(tokens=2_000_000)),
        ("1.5k Tokens", Budget(tokens=1500)),
        ("3 USD", Budget(usd=3.0)),
        ("600s", Budget(seconds=600.0)),
        ("0.25 usd, 50 requests,10 s", Budget(requests=50, usd=0.25, seconds=10.0)),
    ],
)
def test_a_budget_is_read(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize(
    "text", ["", "50", "0 requests", "-3 USD", "3 EUR", "1.5 requests", "5 s,6 s", "nan USD", "1 USD;2 s"]
)
def test_a_bad_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_budget(text)


def test_the_stop_is_before_a_request_that_could_pass_the_budget() -> None:
    account = SpendingAccount(Budget(tokens=1000))
    most = Cost(1, 300, 300)
    account.reserve(most)
    with pytest.raises(BudgetSpent):
        account.reserve(most)  # 600 are reserved: 1200 could be taken
    account.settle(most, Cost(1, 100, 50))
    account.reserve(most)
    assert account.spent == Cost(1, 100, 50) and account.reserved == most


@pytest.mark.parametrize(
    "budget, fits", [(Budget(requests=3), 3), (Budget(usd=0.6), 3), (Budget(tokens=50), 5), (Budget(), 9)]
)
def test_every_limit_holds(budget: Budget, fits: int) -> None:
    account, one = SpendingAccount(budget), Cost(1, 6, 4, 0.2)
    done = 0
    for _ in range(9):
        try:
            account.reserve(one)
        except BudgetSpent:
            break
        account.settle(one, one)
        done += 1
    assert done == fits


def test_seconds_are_a_limit_of_the_session() -> None:
    account = SpendingAccount(Budget(seconds=10.0))
    account.reserve(Cost(1), 9.9)
    with pytest.raises(BudgetSpent, match="10 s"):
        account.reserve(Cost(1), 10.0)


def test_a_prompt_is_never_underestimated() -> None:
    """Not even where every byte is a token: three bytes a character here."""
    most = at_most([{"role": "user", "content": "乗" * 10}], 7, Price(1e6, 2e6))
    assert most.prompt_tokens >= 30 and most.answer_tokens == 7
    assert most.usd == most.prompt_tokens * 1.0 + 7 * 2.0


def test_half_a_surrogate_pair_in_a_prompt_has_a_size() -> None:
    assert at_most([{"role": "user", "content": "\ud800"}], 7, Price()).prompt_tokens >= 1


@pytest.mark.parametrize(("answer_bytes", "answer"), [(0, 0), (15, 0), (160, 10), (10**9, 1000)])
def test_the_least_is_a_token_for_many_bytes_and_never_more_than_the_most(answer_bytes: int, answer: int) -> None:
    assert at_least(Cost(1, 320, 1000, 9.0), answer_bytes) == Cost(1, 20, answer)


def test_models_with_weights_and_prices() -> None:
    assert parse_models("a, b:7b=2", ["1,2", "b:7b=0.5,1.5"]) == [
        Model("a", 1.0, Price(1, 2)),
        Model("b:7b", 2.0, Price(0.5, 1.5)),
    ]
    for text, prices in (("a,,b", []), ("a,a", []), ("a=0", []), ("a", ["x=1,2"]), ("a", ["1"]), ("a", ["1,-2"])):
        with pytest.raises(UsageError):
            parse_models(text, prices)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a, ", "comma-separated names"),
        (" ,a", "comma-separated names"),
        (" =2", "comma-separated names"),
        ("a=-1", "'a=-1' has an invalid weight; expected a weight above 0"),
        ("a=+0", "has an invalid weight"),
        ("a=nan", "has an invalid weight"),
        ("a=inf", "has an invalid weight"),
    ],
)
def test_a_model_has_a_name_and_a_weight_above_0(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_models(text, [])


def test_text_that_is_no_weight_belongs_to_the_name() -> None:
    assert parse_models("a=b", []) == [Model("a=b")]
    assert parse_models("a=b=2 ,c = 0.5", []) == [Model("a=b", 2.0), Model("c", 0.5)]


def test_the_rate_is_kept_in_every_minute() -> None:
    now, sent = [0.0], []

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    async def run() -> None:
        limiter = RateLimiter(requests=3, tokens=100, clock=lambda: now[0], sleep=sleep)
        for tokens in (10, 10, 10, 10, 90, 500, 10):
            await limiter.acquire(tokens)
            sent.append((now[0], tokens))

    asyncio.run(run())
    for start, _ in sent:
        window = [tokens for at, tokens in sent if start <= at < start + 60]
        assert len(window) <= 3
        assert sum(window) <= 100 or len(window) == 1  # one of 500 goes alone
    assert [at for at, _ in sent][:4] == [0, 0, 0, pytest.approx(60, abs=0.1)]


def test_an_estimate_is_corrected_by_what_was_taken() -> None:
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    async def run() -> None:
        limiter = RateLimiter(tokens=100, clock=lambda: now[0], sleep=sleep)
        place = await limiter.acquire(90)
        place.tokens = 20
        await limiter.acquire(70)

    asyncio.run(run())
    assert now[0] == 0


def test_tries_are_dealt_out_by_the_gap_to_the_floor() -> None:
    gaps = {"far": log_gap(8.0, 2.0), "near": log_gap(2.2, 2.0), "done": log_gap(2.01, 2.0)}
    tries = dict.fromkeys(gaps, 0)
    for _ in range(100):
        tries[next_problem(gaps, tries) or ""] += 1
    assert tries["done"] == 0
    assert tries["far"] / tries["near"] == pytest.approx(gaps["far"] / gaps["near"], rel=0.2)


def test_nothing_is_asked_where_every_gap_is_closed() -> None:
    assert next_problem({"a": log_gap(1.0, 1.0)}, {}) is None
    assert next_problem({"a": log_gap(None, 1.0)}, {"a": 7}) == "a"
