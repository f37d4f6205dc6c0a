"""Operands in one flat buffer: what every single word of it is, and what is said when it changes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from outblas.core.errors import DeviceError  # noqa: E402
from outblas.core.problem import Problem  # noqa: E402
from outblas.judge import operands  # noqa: E402
from outblas.judge.operands import Operands  # noqa: E402

CANARY = 0x7FED


def word_map(problem, sets, guard, columns):
    """Return (set, part) of every word by the module's text; a guard has the name of the part behind it."""
    words = [(0, "front A")] * guard
    sizes = {"A": problem.m * problem.k, "B": problem.n * problem.k, "C": problem.m * columns}
    behind = {"A": "front B", "B": "front C", "C": "end"}
    for index in range(sets):
        for name, size in sizes.items():
            words += [(index, name)] * size
            words += [(index, behind[name])] * (-size % 128 + guard)
    return words


CASES = [
    # M, N, K, layout, columns of C, guard in bytes and in words
    (3, 5, 7, "TN", None, 256, 128),
    (3, 5, 7, "NN", None, 1, 128),
    (16, 8, 8, "TN", None, 258, 256),
    (3, 4, 2, "TN", 9, 512, 256),
    (1, 1, 129, "NN", None, 2, 128),
]


@pytest.mark.parametrize(("m", "n", "k", "layout", "columns", "guard_bytes", "guard"), CASES)
def test_every_word_is_of_one_operand_or_guard(m, n, k, layout, columns, guard_bytes, guard):
    problem = Problem(m, n, k, layout)
    data = Operands(problem, 2, guard_bytes=guard_bytes, columns=columns)
    words = word_map(problem, 2, guard, columns or n)
    flat = data._flat
    assert len(words) == flat.numel() and (flat == CANARY).all()
    for index in range(2):
        for name, tensor in zip("ABC", data[index], strict=True):
            places = [at for at, word in enumerate(words) if word == (index, name)]
            assert tensor.storage_offset() == places[0] and tensor.numel() == len(places) and places[0] % 128 == 0
        a, b, c = data[index]
        assert (a.shape, b.shape, c.shape) == ((m, k), (n, k) if layout == "TN" else (k, n), (m, columns or n))
        assert a.isnan().all() and c.isnan().all()
    with pytest.raises(IndexError):
        data[2]


@pytest.mark.parametrize(("m", "n", "k", "layout", "columns", "guard_bytes", "guard"), CASES[:4])
def test_a_change_of_any_word_is_named(m, n, k, layout, columns, guard_bytes, guard):
    problem = Problem(m, n, k, layout)
    data = Operands(problem, 2, guard_bytes=guard_bytes, columns=columns)
    data.fill_normal(3)
    words = word_map(problem, 2, guard, columns or n)
    before = data.sums()
    assert before.shape == (4,) and [data.broken_guard(i) for i in range(2)] == ["", ""]
    first_and_last = [at for at in range(len(words)) if at in (0, len(words) - 1) or words[at] != words[at - 1]]
    first_and_last += [at - 1 for at in first_and_last if at] + list(range(5, len(words), 61))
    end_of_first = max(at for at, word in enumerate(words) if word == (0, "end"))
    for at, flip in ((at, flip) for at in first_and_last for flip in (1, 2)):  # a canary is less, and more
        index, what = words[at]
        kept = int(data._flat[at])
        data._flat[at] = kept ^ flip
        changed = (data.sums() != before).tolist()
        tails = [bool(data.tail_broken(i)) for i in range(2)]
        broken = [data.broken_guard(i) for i in range(2)]
        assert [bool(data.any_guard_broken(i)) for i in range(2)] == [bool(name) for name in broken]
        # The last guard of a set is as wide as a guard and its padding; its last part is in front of the next A.
        shared = what == "end" and index == 0 and at > end_of_first - guard
        expected = ["", ""]
        if what.startswith("front"):
            expected[index] = what[-1]
        elif what == "end":
            expected[index] = "end"
            if shared:
                expected[1] = "A"
        assert broken == expected, (at, words[at])
        assert tails == [name == "end" for name in expected]
        summed = [
            index == i and what in ("front A", "A", "front B", "B", "front C") or (shared and i == 1) for i in (0, 1)
        ]
        assert changed == [summed[0], tails[0], summed[1], tails[1]], (at, words[at])
        data._flat[at] = kept
    assert torch.equal(data.sums(), before)


def test_words_that_change_places_are_a_change(monkeypatch):
    """In one piece of the checksum, between two of them, and if a change elsewhere keeps the plain sum."""
    monkeypatch.setattr(operands, "_WEIGHTS", 16)
    operands._weights.cache_clear()
    data = Operands(Problem(16, 16, 16), 1)
    data.fill_normal(3)
    words, before = data[0][0].view(torch.int64).view(-1), data.input_sum(0)
    kept = words.clone()
    for first, second in ((0, 1), (0, 16), (3, 35)):
        words[first], words[second] = kept[second], kept[first]
        assert words.sum() == kept.sum() and data.input_sum(0) != before
        words.copy_(kept)
    words[1:], words[0] = 0, kept.sum()
    assert words.sum() == kept.sum() and data.input_sum(0) != before
    words.copy_(kept)
    assert data.input_sum(0) == before
    operands._weights.cache_clear()


def test_filling_draws_every_set_from_one_seeded_generator_and_restoring_brings_it_back():
    problem = Problem(3, 5, 7, "NN")
    for seed in (None, 0, 4):
        data = Operands(problem, 2)
        data.fill_normal() if seed is None else data.fill_normal(seed)
        generator = torch.Generator().manual_seed(seed or 0)
        for index in range(2):
            a, b, c = data[index]
            assert torch.equal(a, torch.empty(3, 7, dtype=torch.float16).normal_(generator=generator))
            assert torch.equal(b, torch.empty(7, 5, dtype=torch.float16).normal_(generator=generator))
            assert (c.view(torch.int16) == CANARY).all()
        kept = data._flat.clone()
        data._flat.random_()
        data.restore()
        assert torch.equal(data._flat, kept)


def test_before_a_filling_restoring_takes_seed_zero():
    one, other = Operands(Problem(2, 2, 2)), Operands(Problem(2, 2, 2))
    one.restore()
    other.fill_normal(0)
    assert torch.equal(one._flat, other._flat) and one.sets == 1


def test_inputs_are_copied_into_one_set_and_its_c_is_poisoned():
    data = Operands(Problem(2, 3, 4, "TN", "bf16"), 2)
    data.fill_normal(1)
    other = [t.clone() for t in data[0]]
    data[1][2].zero_()
    data.set_inputs(1, torch.full((2, 4), 2.0), torch.full((3, 4), 3.0))
    assert (data[1][0] == 2).all() and (data[1][1] == 3).all() and data[1][2].isnan().all()
    assert data[1][0].dtype == torch.bfloat16
    for now, then in zip(data[0], other, strict=True):
        assert torch.equal(now.view(torch.int16), then.view(torch.int16))
    data.poison(0, 0x1234)
    assert (data[0][2].view(torch.int16) == 0x1234).all() and data.broken_guard(0) == ""


def test_the_canary_is_a_nan_of_both_formats_and_guards_are_4096_bytes():
    word = np.array([operands.CANARY], np.int16)
    assert operands.CANARY == CANARY
    assert np.isnan(word.view(np.float16)).all() and torch.from_numpy(word).view(torch.bfloat16).isnan().all()
    data = Operands(Problem(1, 1, 1))
    assert [t.storage_offset() for t in data[0]] == [2048, 2048 + 128 + 2048, 2 * (2048 + 128) + 2048]
    assert data._flat.numel() == 4 * 2048 + 3 * 128


def test_no_room_is_an_error_that_says_how_much_was_asked_for(monkeypatch):
    def full(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceError, match=r"2 operand sets of 1_1_1\S* need 5120 bytes"):
        Operands(Problem(1, 1, 1), 2, guard_bytes=512)
