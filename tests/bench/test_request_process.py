"""Tests of the processes that serve requests."""

from __future__ import annotations

import os

import pytest

from outblas.core.errors import ProblemError
from outblas.core.problem import Problem
from outblas_lab.pool.run_bench import caller, serving_gpus


@pytest.mark.parametrize(("cores", "served"), [(1, (3,)), (7, (3,)), (8, (3, 1)), (64, (3, 1, 0))])
def test_gpus_serve_that_have_cores_enough(cores: int, served: tuple[int, ...]) -> None:
    assert serving_gpus((3, 1, 0), cores) == served


def test_a_gpu_that_serves_alone_is_called_here() -> None:
    with caller(alone=True) as call:
        assert call(os.getpid) == os.getpid()


def test_several_have_a_process_each_that_hands_on_errors_and_ends_with_the_block() -> None:
    with caller(alone=False) as call, caller(alone=False) as other:
        process = call(os.getpid)
        assert len({process, call(os.getpid), other(os.getpid), os.getpid()}) == 3, "each keeps its process"
        with pytest.raises(ProblemError, match="problem key"):
            call(Problem.from_key, "no key")
    assert not os.path.exists(f"/proc/{process}") or not _alive(process)


def _alive(process: int) -> bool:
    with open(f"/proc/{process}/stat") as file:
        return file.read().split()[2] not in ("Z", "X")
