"""Bounds on the distance of logits and greedy tokens: benchmarks/transformer/model_rounding.py."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from outblas.core.errors import UsageError  # noqa: E402


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks" / "transformer"))
    return importlib.import_module("model_rounding")


def logits(seed: int, *shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_two_runs_of_the_same_roundings_are_within(rounding: Any) -> None:
    z = logits(0, 3, 5, 400)
    theirs, ours = (z + 1e-3 * logits(seed, 3, 5, 400) for seed in (1, 2))
    found = rounding.logit_errors(list(z), theirs, ours, 2, "fp16")
    assert found.within and found.comparable
    assert found.torch_rms == pytest.approx(1e-3, rel=0.05) and found.reference_rms == pytest.approx(1, rel=0.05)
    assert found.torch_max == pytest.approx(float((theirs - z).abs().max()), rel=1e-6)
    assert found.gap_bound == 5 * found.torch_max
    assert found.record()["within"] is True


@pytest.mark.parametrize("spoil", ["larger", "one", "nan"])
def test_ours_may_not_be_worse(rounding: Any, spoil: str) -> None:
    z = logits(0, 2, 5, 400)
    theirs, ours = (z + 1e-3 * logits(seed, 2, 5, 400) for seed in (1, 2))
    if spoil == "larger":
        ours = z + 1.4e-3 * logits(2, 2, 5, 400)
    else:
        ours[0, 1, 2] = math.nan if spoil == "nan" else z[0, 1, 2] + 0.02
    assert not rounding.logit_errors(list(z), theirs, ours, 2, "fp16").within


def test_a_wrong_reference_excuses_nothing(rounding: Any) -> None:
    z, wrong = logits(0, 2, 5, 400), logits(7, 2, 5, 400)
    found = rounding.logit_errors(list(wrong), z, z + 0.05, 32, "fp16")
    assert found.ours_rms < 1.25 * found.torch_rms and not found.comparable and not found.within


def test_sequences_without_a_reference_are_not_looked_at(rounding: Any) -> None:
    z = logits(0, 2, 5, 40)
    ours = z + 1e-3
    ours[1] = math.nan
    assert rounding.logit_errors([z[0]], z + 1e-3, ours, 2, "bf16").within


def test_the_size_of_roundings(rounding: Any) -> None:
    assert rounding.prior_rms(3.0, 32, "fp16") == pytest.approx(3 * 2 * 2**-11 * math.sqrt(450))
    assert rounding.prior_rms(1.0, 2, "bf16") == 8 * rounding.prior_rms(1.0, 2, "fp16")


def test_the_first_difference_of_each_sequence(rounding: Any) -> None:
    z = torch.zeros(3, 4, 5)
    theirs = torch.tensor([[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]])
    z.scatter_(2, theirs[..., None], 1.0)
    z[1, 2, 4], z[1, 2, 0] = 0.99, 0.995
    ours = theirs.clone()
    ours[1, 2:] = 4
    ours[2, 1] = 0
    near, far = rounding.first_differences(theirs, ours, z, 0.02)
    assert (near.row, near.step, near.torch_token, near.our_token) == (1, 2, 2, 4)
    assert near.gap == pytest.approx(0.01) and near.top2_gap == pytest.approx(0.005) and near.allowed
    assert (far.row, far.step, far.gap) == (2, 1, 1.0) and not far.allowed and far.record()["allowed"] is False
    assert rounding.first_differences(theirs, theirs, z, 0.0) == []


def test_the_gap_bound_covers_every_choice_of_two_runs_within(rounding: Any) -> None:
    """No pair of greedy tokens has a wider gap while errors are within the bound."""
    z = logits(0, 1, 2000, 50).mul_(0.01)  # close logits: many choices differ
    error = 2e-3
    theirs = z + error * (2 * torch.rand(z.shape, generator=torch.Generator().manual_seed(1)) - 1)
    ours = z + 1.5 * error * (2 * torch.rand(z.shape, generator=torch.Generator().manual_seed(2)) - 1)
    found = rounding.LogitErrors(1, 1, error, 1.5 * error, 1, 1)
    chosen, other = (run.argmax(-1).view(-1, 1) for run in (theirs, ours))
    differences = rounding.first_differences(chosen, other, theirs.view(-1, 1, 50), found.gap_bound)
    assert len(differences) > 20 and all(each.allowed and each.top2_gap <= each.gap for each in differences)


def test_shapes_that_do_not_match_are_refused(rounding: Any) -> None:
    z = logits(0, 2, 5, 40)
    for reference, theirs, ours in (([], z, z), (list(z), z[:1], z), (list(z), z, z[:, :4]), ([z[0, :4]], z, z)):
        with pytest.raises(UsageError):
            rounding.logit_errors(reference, theirs, ours, 2, "fp16")
    tokens = z.argmax(-1)
    with pytest.raises(UsageError):
        rounding.first_differences(tokens, tokens[:, :4], z, 0.1)
    with pytest.raises(UsageError):
        rounding.first_differences(tokens, tokens, z[:, :4], 0.1)
