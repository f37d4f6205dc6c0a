"""Default folder and agent of a tune run, and the conditions under which it goes on."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import UsageError
from outblas.core.files import write_json
from outblas.core.problem import Problem
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.provenance import utc_now
from outblas.records.user_library import EqualKernels, KernelRelease
from outblas.runtime.device import Device
from outblas.tune import tune_run
from outblas.tune.tune_folder import RunFiles, read_run
from outblas.tune.tune_run import TuneRequest, default_agent, folder_name, provenance_of, run_tune
from outblas_lab.recordings.replay import ReplayEvaluator
from support.fake_gpu import PROVENANCE
from support.helpers import synthetic_recording

ONE, OTHER = Problem(64, 64, 64), Problem(1, 2, 3)
OTHER_KERNELS = "0" * 64


class LiveInWords(ReplayEvaluator):
    """A recording that says it is a GPU."""

    @property
    def source(self) -> str:
        return "cuda:0"


class Live:
    """Runs of one request whose GPU is a recording.

    Attributes:
        request: the request, whose folder is ``runs/a``.
        driver: version of the GPU's driver.
        kept: measurements that the last run found in its folder.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        recording = synthetic_recording(2)
        self.driver, self.kept = "550.54.15", -1
        monkeypatch.setattr(tune_run, "open_evaluator", lambda *_: nullcontext(LiveInWords(recording)))
        monkeypatch.setattr(
            tune_run, "_origin", lambda *words: {"provenance": {**PROVENANCE, "driver": self.driver, "date": utc_now()}}
        )
        self.request = TuneRequest(
            recording.problems, "custom", "exhaustive", 4, 0, Device(gpu_index=0), Path("runs/a"), "outblas tune",
            beside=True,
        )  # fmt: skip

    def run(self, **changes: Any) -> Path:
        """Run the request with some changes; return the folder."""
        found = run_tune(replace(self.request, **changes), begun=lambda path, kept: setattr(self, "kept", kept))
        assert self.kept == found.kept
        return found.files.path

    def change(self, **entries: Any) -> None:
        """Replace entries of run.json; None removes one."""
        file = RunFiles(self.request.path).run
        content = {**read_run(file), **entries}
        write_json(file, {key: value for key, value in content.items() if value is not None})

    @property
    def stamp(self) -> dict[str, Any]:
        """Return the stamp of run.json."""
        return dict(read_run(RunFiles(self.request.path).run)["stamp"])


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Live:
    monkeypatch.chdir(tmp_path)
    return Live(monkeypatch)


def test_measurements_of_other_kernels_are_not_resumed(live: Live) -> None:
    assert live.run() == live.run() == Path("runs/a") and live.kept > 0
    live.change(stamp={**live.stamp, "kernels": OTHER_KERNELS})
    with pytest.raises(
        UsageError, match="runs/a was measured under other conditions .kernel sources 0{12}, now .* another --run"
    ):
        live.run(beside=False)
    beside = live.run()
    assert beside.name.startswith("a-") and live.kept == 0
    assert live.run() == beside and live.kept > 0


def test_measurements_under_another_driver_are_not_resumed(live: Live) -> None:
    live.run()
    was = provenance_of(Path("runs/a"))
    live.driver = "580.95.05"
    assert live.run() != Path("runs/a") and live.kept == 0
    assert provenance_of(Path("runs/a")) == was
    live.driver = "550.99.99"
    assert live.run() == Path("runs/a"), "minor versions count as equal"
    assert provenance_of(Path("runs/a")) == was, "the figures are those of the first session"


def test_kernels_that_compile_to_the_same_cubins_are_the_same(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    live.run()
    live.change(stamp={**live.stamp, "kernels": OTHER_KERNELS})
    there, here = (KernelRelease(str(live.stamp["outblas"]), sha) for sha in (OTHER_KERNELS, kernels_sha()))
    monkeypatch.setattr(EqualKernels, "load", lambda: EqualKernels(here, (there,)))
    assert live.run() == Path("runs/a") and live.kept > 0


def test_a_run_without_a_stamp_starts_anew(live: Live) -> None:
    live.run()
    live.change(stamp=None)
    assert live.run() != Path("runs/a")


def test_a_renamed_folder_resumes(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs/a").rename(live.run().with_name("b"))
    assert live.run(path=Path("runs/b")) == Path("runs/b") and live.kept > 0
    monkeypatch.chdir("runs/b")
    assert live.run(path=Path()) == Path() and live.kept > 0


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
