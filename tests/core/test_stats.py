from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outblas.core import stats
from outblas.core.errors import UsageError
from outblas.core.stats import bootstrap_median, flop_weighted, geomean, losses, paired_speedup, unpaired_speedup

ratios = st.lists(st.floats(0.01, 100), min_size=1, max_size=50)


def test_geomean_of_a_gain_and_its_inverse_is_one():
    assert geomean([2.0, 0.5]) == 1.0
    assert geomean([4.0, 1.0, 2.0]) == pytest.approx(2.0)


@given(ratios, st.randoms())
def test_geomean_does_not_depend_on_order(values, random):
    shuffled = list(values)
    random.shuffle(shuffled)
    assert geomean(shuffled) == geomean(values)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0], [math.nan], [math.inf]])
def test_a_mean_of_what_has_no_logarithm_is_refused(values):
    with pytest.raises(UsageError):
        geomean(values)
    with pytest.raises(UsageError):
        flop_weighted(values, [1.0] * len(values))


@given(ratios)
def test_equal_weights_give_the_geometric_mean(values):
    assert flop_weighted(values, [7.0] * len(values)) == pytest.approx(geomean(values))


def test_weights_are_flops():
    # exp((9 ln 2 + 1 ln 1) / 10)
    assert flop_weighted([2.0, 1.0], [9.0, 1.0]) == pytest.approx(2**0.9)
    with pytest.raises(UsageError):
        flop_weighted([2.0, 1.0], [9.0])


def test_losses_are_below_099():
    assert losses([0.98, 0.9899999, 0.99, 1.0, 1.2]) == 2


def test_the_bootstrap_is_seeded_and_brackets_the_median():
    samples = [0.1, 0.12, 0.09, 0.11, 0.3, 0.1, 0.08]
    first, again, other = (bootstrap_median(samples, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first[0] == other[0] == 0.1
    assert min(samples) <= first[1] <= first[0] <= first[2] <= max(samples)


def test_the_interval_of_a_constant_is_that_constant_and_noise_widens_it():
    assert bootstrap_median([0.5] * 9) == (0.5, 0.5, 0.5)
    narrow = bootstrap_median([-0.01, 0.0, 0.01] * 5)
    wide = bootstrap_median([-0.1, 0.0, 0.1] * 5)
    assert wide[2] - wide[1] > narrow[2] - narrow[1] > 0


@pytest.mark.parametrize("size", [3, 8, 11])
def test_an_interval_is_that_of_medians_of_resamples_in_any_order(size: int) -> None:
    """Against the definition, resample by resample; of an even number the median is the mean of two."""
    samples = np.random.default_rng(size).normal(0.0, 1.0, size)
    drawn = np.random.default_rng(5).integers(0, size, (300, size))
    medians = [np.median(np.sort(samples)[row]) for row in drawn]
    expected = (np.median(samples), *np.percentile(medians, (2.5, 97.5)))
    for ordered in (samples, samples[::-1]):
        assert bootstrap_median(ordered.tolist(), resamples=300, seed=5) == pytest.approx(expected, abs=1e-12)


def test_a_95_percent_interval_covers_the_true_median_about_that_often():
    import numpy as np

    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        _, low, high = bootstrap_median(rng.normal(0.0, 1.0, 25), resamples=400)
        hits += low <= 0.0 <= high
    assert 175 <= hits <= 199


@pytest.mark.parametrize("samples", [[], [1.0], [1.0, 2.0], [1.0, 2.0, math.nan], [[1.0, 2.0], [3.0, 4.0]]])
def test_an_interval_needs_three_finite_rounds(samples):
    with pytest.raises(UsageError):
        bootstrap_median(samples)


def test_pairing_cancels_what_drifts_between_rounds():
    drift = [1.0, 1.5, 2.0, 0.8, 1.1]
    ratio, low, high = paired_speedup([10 * d for d in drift], [12 * d for d in drift])
    assert (ratio, low, high) == pytest.approx((1.2, 1.2, 1.2))


def test_rounds_must_be_the_same_of_both_and_positive():
    with pytest.raises(UsageError):
        paired_speedup([1.0, 1.0, 1.0], [1.0, 1.0])
    with pytest.raises(UsageError):
        paired_speedup([1.0, 0.0, 1.0], [1.0, 1.0, 1.0])


def test_an_interval_without_partners_is_that_of_resamples_of_both_sides() -> None:
    """Against the definition: the middle 95% of ratios of medians."""
    ours, baseline = np.linspace(9.0, 11.0, 31) ** 2, np.linspace(10.0, 13.0, 17) ** 2
    rng, ratios_ = np.random.default_rng(4), []
    for _ in range(500):
        theirs = np.median(rng.choice(baseline, 17))
        ratios_.append(theirs / np.median(rng.choice(ours, 31)))
    expected = (np.median(baseline) / np.median(ours), *np.quantile(ratios_, (0.025, 0.975)))
    assert unpaired_speedup(ours.tolist(), baseline.tolist(), seed=4, resamples=500) == pytest.approx(expected)


@pytest.mark.parametrize("samples", [[1.0, 2.0, 4.0, 8.0], [3.0, 1.0, 2.0], [5.0, 1.0, 9.0, 2.0, 7.0, 3.0]])
def test_of_an_even_number_of_samples_the_median_is_between_the_two_in_the_middle(samples) -> None:
    drawn = np.random.default_rng(0).integers(0, len(samples), (2000, len(samples)))
    medians = np.median(np.sort(samples)[drawn], axis=1)
    expected = (np.median(samples), *np.percentile(medians, (2.5, 97.5)))
    assert bootstrap_median(samples, confidence=0.95, seed=0, resamples=2000) == pytest.approx(expected)


def percentiles_of_medians(samples, confidence, resamples, seed):
    """(median, low, high) by the definition, resample by resample."""
    samples = np.sort(np.asarray(samples))
    drawn = np.random.default_rng(seed).integers(0, samples.size, (resamples, samples.size))
    tail = (1.0 - confidence) / 2
    return (np.median(samples), *np.quantile(np.median(samples[drawn], axis=1), (tail, 1.0 - tail)))


NOISE = np.random.default_rng(8).normal(0.0, 0.3, 200).tolist()  # enough values that the 2.4% and 2.5% points differ


@pytest.mark.parametrize("confidence", [None, 0.5])
@pytest.mark.parametrize("seed", [None, 3])
def test_intervals_are_of_2000_resamples_with_seed_zero_and_of_95_percent_unless_told(confidence, seed) -> None:
    given_ = ({} if confidence is None else {"confidence": confidence}) | ({} if seed is None else {"seed": seed})
    expected = percentiles_of_medians(NOISE, confidence or 0.95, 2000, seed or 0)
    assert bootstrap_median(NOISE, **given_) == pytest.approx(expected, abs=1e-13)
    ours, baseline = [2.0] * 200, [2.0 * math.exp(x) for x in NOISE]
    assert paired_speedup(ours, baseline, **given_) == pytest.approx(tuple(map(math.exp, expected)), rel=1e-12)


def test_an_unpaired_interval_is_of_2000_resamples_with_seed_zero_unless_told() -> None:
    ours, baseline = [math.exp(x) for x in NOISE], [1.5, 1.25, 2.0, 1.75]
    rng = np.random.default_rng(0)
    ratios_ = [np.median(rng.choice(baseline, 4)) / np.median(rng.choice(ours, 200)) for _ in range(2000)]
    expected = (1.625 / np.median(ours), *np.quantile(ratios_, (0.025, 0.975)))
    assert unpaired_speedup(ours, baseline) == pytest.approx(expected, rel=1e-12)
    assert unpaired_speedup(ours, baseline, 1) != unpaired_speedup(ours, baseline)


def test_which_samples_are_middles_is_kept_and_cannot_be_written_to() -> None:
    first = stats._middles(6, 50, 2)
    assert stats._middles(6, 50, 2) is first
    drawn = np.sort(np.random.default_rng(2).integers(0, 6, (50, 6)), axis=1)
    for found, column in zip(first, (2, 3), strict=True):
        assert np.array_equal(found, drawn[:, column])
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 1


@pytest.mark.parametrize("limit", [None, 0.5, 1.0])
def test_losses_are_below_the_limit_and_not_at_it(limit) -> None:
    at = 0.99 if limit is None else limit
    values = [at, math.nextafter(at, 0.0), math.nextafter(at, 2.0), at / 2]
    assert (losses(values) if limit is None else losses(values, limit)) == 2


def test_three_rounds_are_enough_and_what_is_wrong_is_said() -> None:
    assert bootstrap_median([1.0, 2.0, 3.0])[0] == 2.0
    with pytest.raises(UsageError, match=r"2 samples of shape \(2,\).* 3 or more"):
        bootstrap_median([1.0, 2.0])
    with pytest.raises(UsageError, match="the weights of the FLOP-weighted mean"):
        flop_weighted([1.0], [0.0])


@pytest.mark.parametrize(("one", "other"), [([1.0] * 3, [1.0] * 4), ([1.0] * 4, [1.0] * 3), ([], [1.0]), ([1.0], [])])
def test_sequences_of_different_lengths_are_refused_whichever_is_the_longer(one, other) -> None:
    for function in (flop_weighted, paired_speedup):
        with pytest.raises(UsageError, match=f"{len(one)} .* and {len(other)} "):
            function(one, other)


@pytest.mark.parametrize(("ours", "baseline"), [([], [1.0]), ([1.0], []), ([], [])])
def test_an_unpaired_speed_up_of_nothing_is_refused(ours: list[float], baseline: list[float]) -> None:
    with pytest.raises(UsageError, match=f"{len(ours)} kernel and {len(baseline)} baseline samples"):
        unpaired_speedup(ours, baseline)


def test_the_interval_of_a_geometric_mean_holds_it_and_narrows_with_more_values():
    few, many = [1.0, 1.2, 0.9, 1.6, 1.1], [1.0, 1.2, 0.9, 1.6, 1.1] * 40
    low, high = stats.bootstrap_geomean(few)
    assert low < geomean(few) < high
    narrow = stats.bootstrap_geomean(many)
    assert low < narrow[0] < geomean(few) < narrow[1] < high
    assert stats.bootstrap_geomean(few[::-1]) == (low, high)
    assert stats.bootstrap_geomean([2.0, 2.0, 2.0]) == pytest.approx((2.0, 2.0))
    with pytest.raises(UsageError, match="3 or more values"):
        stats.bootstrap_geomean([1.0, 2.0])


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [(0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775), (8, 10, 0.4902, 0.9433), (3, 10, 0.1078, 0.6032), (5, 5, 0.5655, 1.0)],
)
def test_the_interval_of_a_share_is_wilsons(hits: int, of: int, low: float, high: float) -> None:
    assert stats.wilson_interval(hits, of) == pytest.approx((low, high), abs=5e-5)
