"""Places of torch that the native table reads: found in every kind of tensor, or not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outblas.runtime import native, torch_state
from support.native_fixture import (  # noqa: F401
    FakeCuda,
    Host,
    built_fixture,
    cuda_fixture,
    host_fixture,
    learn,
    needs_compiler,
    open_with_fixture,
    operands,
    prepared,
    torch,
)

NUMBERS = torch_state.torch_state()
pytestmark = [needs_compiler, pytest.mark.skipif(NUMBERS is None, reason="this torch is not read by loads")]


def test_the_places_are_the_same_whatever_the_thread_does() -> None:
    with torch.inference_mode():
        assert torch_state.torch_state() == NUMBERS
    with torch.no_grad(), torch.autocast("cpu"):
        assert torch_state.torch_state() == NUMBERS


@pytest.mark.parametrize("name", ["_keys", "_word", "_address"])
def test_a_torch_that_answers_otherwise_is_asked_by_methods(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> int:
        if name == "_address":
            raise AttributeError("no such function")
        return 12345

    monkeypatch.setattr(torch_state, name, lacking)
    assert torch_state.torch_state() is None


def test_an_answer_that_stands_in_two_places_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    read = torch_state._word

    def doubled(address: int) -> int:
        known = {t._cdata for t in torch_state_tensors}
        return read(address - 8) if address - NUMBERS["keys"] - 8 in known else read(address)

    torch_state_tensors = list[Any]()
    make = torch_state._tensors_of_each_kind

    def kept() -> dict[str, Any]:
        made = make()
        torch_state_tensors.extend(made.values())
        return made

    assert NUMBERS is not None
    monkeypatch.setattr(torch_state, "_tensors_of_each_kind", kept)
    monkeypatch.setattr(torch_state, "_word", doubled)
    assert torch_state.torch_state() is None


def test_the_exchange_is_used_without_the_state(open_with: Callable[..., Any]) -> None:
    table = open_with(state=None)
    a, b, out = operands()
    assert learn(table, a, b, out, prepared()) and table.matmul(a, b, out, False) is out
    assert (table.counts()["reads_by"], table.counts()["state_by"]) == ("exchange", "methods")
    with torch.autocast("cpu"):
        assert table.matmul(a, b, out, False) is None
    assert table.matmul(a.requires_grad_(), b, out, False) is None


def test_a_state_that_contradicts_the_methods_is_given_up(open_with: Callable[..., Any]) -> None:
    assert NUMBERS is not None
    table = open_with(state={**NUMBERS, "strange": NUMBERS["versioned"]})
    a, b, out = operands()
    assert table.counts()["state_by"] == "loads"
    assert learn(table, a, b, out, prepared()) and table.counts()["state_by"] == "methods"
    assert table.matmul(a, b, out, False) is out


@pytest.mark.parametrize("name", ["keys", "bump_version"])
def test_a_table_refuses_numbers_that_are_missing(built: Any, cuda: FakeCuda, host: Host, name: str) -> None:
    assert NUMBERS is not None
    with pytest.raises(ValueError, match=f"torch's state lacks {name}"):
        built[0].Table(cuda.path, **{**native._hooks(), **host.hooks(), "state": {**NUMBERS, name: 0}})


def test_a_gradient_that_is_wanted_later_is_seen(open_with: Callable[..., Any]) -> None:
    table = open_with()
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    assert table.matmul(a, b, out, False) is out and table.counts()["state_by"] == "loads"
    a.requires_grad_()
    assert table.matmul(a, b, out, False) is None
    with torch.no_grad():
        assert table.matmul(a, b, out, False) is out
    a.requires_grad_(False)
    assert table.matmul(a, b, out, False) is out and table.matmul(torch._neg_view(a), b, out, False) is None


@pytest.mark.skipif("describe" not in (NUMBERS or {}), reason="this torch does not describe tensors")
@pytest.mark.parametrize("kind", ["no word for the dtype", "no memory", "batched"])
def test_a_tensor_that_torch_cannot_describe_is_not_the_tables(open_with: Callable[..., Any], kind: str) -> None:
    table = open_with()
    a, b, out = operands()
    learn(table, a, b, out, prepared())
    assert table.matmul(a, b, out, False) is out and table.counts()["reads_by"] == "tensors"
    if kind == "batched":
        seen = list[Any]()
        torch.vmap(lambda row: seen.append(table.matmul(row, b, out, False)) or row)(torch.stack([a, a]))
    else:
        strange = torch.empty(a.shape, dtype=torch.bits8) if kind == "no word for the dtype" else a.to_sparse()
        seen = [table.matmul(strange, b, out, False), table.matmul(a, b, strange, False)]
    assert seen == [None] * len(seen) != []
    assert table.matmul(a, b, out, False) is out
