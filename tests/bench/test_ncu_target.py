"""The target that ncu runs, and the parts of its profile, without ncu and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import RecordError
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.kernels.families.sm90_wgmma.wgmma_config import Sm90WgmmaConfig
from outblas_lab.pool import ncu, ncu_target
from outblas_lab.pool.ncu_target import ProfiledAlgorithm, Profiler, ProfileWork, cache_of
from support.gpus.known import H200
from support.helpers import ROOT

LAUNCHES = ncu.parse((ROOT / "tests" / "support" / "golden" / "ncu_raw.csv").read_text())
THEIRS = ProfiledAlgorithm(b"\x01" * 64, "index=3/8")
#: The profiled entries of the sample; the second one has a warm L2.
FLUSHED = ProfileWork(
    Problem(64, 4096, 4096), (Sm90WgmmaConfig(64, 64, 128, 6, split_k=2, store="direct"), THEIRS), "flushed"
)
WARM = ProfileWork(Problem(64, 4096, 64), (Sm80DirectConfig(32, 64, 2, 2), THEIRS), "warm")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Record (cache, launches) of every start of ncu, and answer with the sample's half."""
    starts: list[tuple[str, dict[str, Any]]] = []

    def profile(tool: str, target: list[str], metrics: Any, cache: str, *_: Any) -> list[ncu.ProfiledLaunch]:
        assert target[:3] == [sys.executable, "-m", "outblas_lab.pool.ncu_target"] and metrics == ncu.METRICS
        starts.append((cache, json.loads(Path(target[-1]).read_text())))
        return LAUNCHES[:5] if cache == "flushed" else LAUNCHES[5:]

    monkeypatch.setattr(ncu_target.ncu, "profile", profile)
    monkeypatch.setattr(ncu_target.ncu, "known_metrics", lambda *_, **__: ncu.METRICS)
    return starts


def test_works_go_both_ways_as_json() -> None:
    for work in (FLUSHED, WARM):
        assert ProfileWork.from_json(json.loads(json.dumps(work.to_json()))) == work


def test_each_state_of_l2_is_one_start_and_answers_come_in_the_works_order(asked: Any, tmp_path: Path) -> None:
    found = Profiler("ncu", tmp_path, 1.0, 3).kernels([WARM, FLUSHED])
    assert [(cache, data["gpu"], data["works"]) for cache, data in asked] == [
        ("flushed", 3, [FLUSHED.to_json()]),
        ("warm", 3, [WARM.to_json()]),
    ]
    assert found == [ncu.between_marks(LAUNCHES[5:]), ncu.between_marks(LAUNCHES[:5])]
    assert [len(kernels) for kernels in found[1]] == [1, 2]


@pytest.mark.parametrize("kept", [4, 2, 1, 0])
def test_a_profile_that_lacks_an_entry_is_refused(
    asked: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: int
) -> None:
    monkeypatch.setattr(ncu_target.ncu, "profile", lambda *_: LAUNCHES[: kept if kept != 4 else 8])
    with pytest.raises(RecordError, match="2, each with at least one kernel"):
        Profiler("ncu", tmp_path, 1.0).kernels([FLUSHED])


def test_l2_is_warm_where_the_clocks_operands_fit_into_it() -> None:
    assert cache_of(Problem(64, 64, 4096), H200) == "warm"
    assert cache_of(Problem(64, 4096, 4096), H200) == "flushed"


def test_what_runs_under_ncu_ends_with_one_line_where_it_cannot_launch(tmp_path: Path) -> None:
    file = tmp_path / "works.json"
    file.write_text(json.dumps({"gpu": 0, "works": [FLUSHED.to_json()]}))
    code = """
import sys
from outblas_lab.pool import ncu_target
from outblas.core.errors import DeviceError
def refuses(works, gpu):
    raise DeviceError(f"no GPU {gpu} for {works[0].problem.key}", "one", "run outblas doctor")
ncu_target.launch = refuses
sys.exit(ncu_target.main())
"""
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, cwd=ROOT / "src")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "no GPU 0 for 64_4096_4096_TN_fp16_fp32; expected one; run outblas doctor\n"
