"""The line that says which products an engine has on the library's kernels: when it comes, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from outblas.adapt import engine_log
from outblas.adapt.engine_log import summary, watch


def row(outblas: Any = (), cublaslt: Any = (), torch: Any = ()) -> dict[str, list[int]]:
    return {"outblas": list(outblas), "cublaslt": list(cublaslt), "torch": list(torch)}


def test_it_names_the_sizes_that_are_not_torchs_and_the_weights_that_stay() -> None:
    weights = {
        "6144 x 4096 bf16": row(outblas=(1, 8, 256), cublaslt=(64,)),
        "4096 x 14336 bf16": row(outblas=(1, 8, 256), torch=(64,)),
        "128256 x 4096 bf16": row(torch=(1, 8)),
    }
    assert summary(weights) == (
        "outblas computes the matmuls of 2 of 3 weights (N x K): 6144 x 4096 bf16 at all M seen (1 to 256); "
        "4096 x 14336 bf16 at M 1 to 8, 256; torch computes 128256 x 4096 bf16 (M 1 to 8 so far): "
        "no faster kernel is known or allowed"
    )


def test_where_nothing_is_gained_it_says_so() -> None:
    found = summary({"96 x 32 bf16": row(torch=(1,)), "32 x 96 bf16": row(torch=(1, 2))})
    assert found.startswith(
        "outblas has no effect here; torch computes 96 x 32 bf16 (M 1 so far), 32 x 96 bf16 (M 1 to 2 so "
    )


@pytest.mark.parametrize(("sizes", "after"), [([0, 0, 3, 5], 19.0), (range(1, 200), 61.0)])
def test_it_comes_once_no_new_size_does_or_after_a_minute(
    sizes: Any, after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sizes``: how many the process has met at each look, one a second; the last stays."""
    now, counts, told = [0.0], list(sizes), []

    def weights() -> dict[str, dict[str, list[int]]]:
        count = counts[min(int(now[0]) - 1, len(counts) - 1)]
        return {"8 x 8 bf16": row(outblas=range(1, count + 1))} if count else {}

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(engine_log, "weights_of_process", weights)
    watch(told.append, lambda: now[0], sleep)
    assert len(told) == 1 and now[0] == after


def test_a_look_that_fails_is_said_once_and_later_ones_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [0.0], []

    def weights() -> dict[str, dict[str, list[int]]]:
        if now[0] <= 3:
            raise RuntimeError("size changed\nmeanwhile")
        return {"8 x 8 bf16": row(outblas=[1])}

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(engine_log, "weights_of_process", weights)
    watch(told.append, lambda: now[0], sleep)
    assert told == [
        "outblas cannot report yet which matmuls it computes: RuntimeError('size changed\\nmeanwhile')",
        "outblas computes the matmuls of 1 of 1 weights (N x K): 8 x 8 bf16 at all M seen (1)",
    ]


def test_the_weights_are_those_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, name: str) -> None:
            self._name = name

        def weights(self) -> dict[str, dict[str, list[int]]]:
            return {self._name: row(outblas=[1])}

    monkeypatch.setattr(engine_log.device_registry, "devices", {0: Device("a"), 1: Device("b")})
    assert engine_log.weights_of_process() == {"a": row(outblas=[1]), "b": row(outblas=[1])}
