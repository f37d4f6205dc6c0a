"""Default folder and agent of a tune run, and the kernels whose measurements it has."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from outblas.core.errors import UsageError
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.core.version import __version__
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.equal_kernels import EqualKernels, KernelRelease
from outblas.records.replay import ReplayEvaluator
from outblas.runtime.device import Device
from outblas.search import tune_run
from outblas.search.tune_folder import RunFiles, read_run
from outblas.search.tune_run import TuneRequest, default_agent, folder_name, run_tune, usual_folder
from support.fake_gpu import PROVENANCE
from support.helpers import synthetic_recording

ONE, OTHER = Problem(64, 64, 64), Problem(1, 2, 3)
OTHER_KERNELS = "0" * 64


class LiveInWords(ReplayEvaluator):
    """A recording that says it is a GPU."""

    @property
    def source(self) -> str:
        return "cuda:0"


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneRequest:
    """A request whose GPU is a recording, in an empty working directory."""
    recording = synthetic_recording(2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_run, "open_evaluator", lambda *_: nullcontext(LiveInWords(recording)))
    monkeypatch.setattr(tune_run, "_origin", lambda *_: {"provenance": PROVENANCE})
    path = usual_folder("a")
    return TuneRequest(recording.problems, "custom", "exhaustive", 4, 0, Device(gpu_index=0), path, "outblas tune")


def change_kernels(request: TuneRequest) -> None:
    """Let the run be one of other kernels."""
    file = RunFiles(request.path).run
    write_json(file, {**read_run(file), "kernels": OTHER_KERNELS})


def test_measurements_of_other_kernels_are_not_resumed(live: TuneRequest) -> None:
    run_tune(live)
    run_tune(live)  # the same kernels: it resumes
    change_kernels(live)
    with pytest.raises(UsageError, match=f"other kernels; expected those of OutBLAS {__version__}, 0{{12}}; "):
        run_tune(live)
    assert usual_folder("a") == Path("runs", f"a-kernels-{kernels_sha()[:8]}")
    assert run_tune(replace(live, path=usual_folder("a"))).asked == 2


def test_kernels_that_compile_to_the_same_cubins_are_the_same(
    live: TuneRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tune(live)
    change_kernels(live)
    there, here = KernelRelease(__version__, OTHER_KERNELS), KernelRelease(__version__, kernels_sha())
    monkeypatch.setattr(EqualKernels, "load", lambda: EqualKernels(here, (there,)))
    assert usual_folder("a") == live.path
    assert run_tune(live).asked == 2


def test_a_run_that_does_not_name_its_kernels_resumes(live: TuneRequest) -> None:
    run_tune(live)
    file = RunFiles(live.path).run
    write_json(file, {key: value for key, value in read_run(file).items() if key != "kernels"})
    assert usual_folder("a") == live.path
    assert run_tune(live).asked == 2


@pytest.mark.parametrize(
    ("suite", "problems", "seed", "budget", "sample", "name"),
    [
        ("llm", [ONE, OTHER], 0, "16", None, "llm-tn-fp16-fp32-random-16-cuda-0"),
        ("llm", [ONE], 2, "16", 1, "llm-sample1-tn-fp16-fp32-random-seed2-16-cuda-0"),
        ("custom", [ONE], 0, "32,60s", None, "custom-64_64_64-tn-fp16-fp32-random-32-60s-cuda-0"),
        ("custom", [ONE, OTHER], 0, "16", None, "custom-6c5c35e6-tn-fp16-fp32-random-16-cuda-0"),
        ("captured", [ONE, OTHER], 0, "16", None, "captured-6c5c35e6-random-16-cuda-0"),
        ("captured", [OTHER, ONE], 0, "16", None, "captured-52547f0d-random-16-cuda-0"),
    ],
)
def test_a_folder_says_its_settings(
    suite: str, problems: list[Problem], seed: int, budget: str, sample: int | None, name: str
) -> None:
    assert folder_name(suite, problems, "random", seed, budget, "cuda:0", sample) == name


def test_a_recording_in_a_folder_is_one_name() -> None:
    assert folder_name("llm", [ONE], "ppo", 0, "16", "replay:/tmp/a") == "llm-tn-fp16-fp32-ppo-16-replay--tmp-a"


def test_the_policy_searches_on_recordings_only() -> None:
    assert default_agent(Device(gpu_index=0)) == "heuristic"
    assert default_agent(Device(recording="h200")) == "regressor"
