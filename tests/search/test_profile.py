"""``outblas profile`` without ncu or GPU: a script in ncu's place writes a table for what it was to launch."""

from __future__ import annotations

import json
import math
import sqlite3
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli import common
from outblas.cli.main import app
from outblas.core.errors import DeviceError, RecordError, ToolchainMissing, UsageError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import lock_folder
from outblas.core.problem import Problem
from outblas.kernels.families.sm80_direct_gemm import Sm80DirectConfig
from outblas.records.store import Store
from outblas.runtime import device
from outblas.runtime.device import Device
from outblas.tune.agents.base import Agent
from outblas.tune.tune import SearchOptions, tune
from outblas.tune.tune_run import TuneRequest, provenance_of, run_tune
from outblas_lab.pool import profile
from outblas_lab.pool.counters import COUNTERS, PROFILED_COUNTERS, counters_of, main_stalls
from outblas_lab.pool.ncu import METRICS, ProfiledLaunch, parse
from outblas_lab.pool.profile import ProfileRequest, ProfileResult, Progress, run_profile, select_pairs
from outblas_lab.publish.html.tune_page import write_report
from outblas_lab.recordings.replay import ReplayEvaluator
from outblas_lab.train.reward import reward
from support.fake_gpu import PROVENANCE
from support.gpus.known import H200
from support.helpers import ROOT, failed_evaluation, passed_evaluation, synthetic_recording
from support.json_output import document

#: A fake ncu. It writes its launches to $OUTBLAS_ASKED, and a table with a mark and a kernel for each entry. The L2 hit
#: rate is the number of the entry. With $OUTBLAS_SAYS it prints that text instead.
FAKE = """#!{python}
import json, os, sys
args = sys.argv[1:]
if args == ["--version"]:
    print("Version 2025.3.0.0 (build 1)")
    sys.exit(0)
works = json.load(open(args[-1]))["works"]
with open(os.environ["OUTBLAS_ASKED"], "a") as file:
    file.write(json.dumps(works) + "\\n")
with open(args[args.index("--log-file") + 1], "w") as log:
    if os.environ.get("OUTBLAS_SAYS"):
        log.write(os.environ["OUTBLAS_SAYS"])
        sys.exit(1)
    metrics = ["lts__t_sector_hit_rate.pct", "sm__cycles_elapsed.max",
               "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"]
    rows = [["ID", "Kernel Name", *metrics], ["", "", "%", "cycle", ""]]
    for number in range(max(1, sum(len(work["entries"]) for work in works))):
        rows += [["0", "spin_kernel", "0", "1", "0"], ["1", "ours", str(number), "2000", "1.5"]]
    log.write("\\n".join(",".join(f'"{{x}}"' for x in row) for row in rows) + "\\n")
"""
PERMISSION = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"
)
RECORDING = synthetic_recording(4)


class Tool:
    """The stand-in: ``path``, and what it was asked to launch; ``starts``: without the probe for metrics."""

    def __init__(self, folder: Path) -> None:
        self.path, self._log = str(folder / "ncu"), folder / "asked"
        Path(self.path).write_text(FAKE.format(python=sys.executable))
        Path(self.path).chmod(stat.S_IRWXU)

    @property
    def starts(self) -> list[list[dict[str, Any]]]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [works for works in map(json.loads, lines) if works]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    monkeypatch.setenv("OUTBLAS_ASKED", str(tmp_path / "asked"))
    monkeypatch.setattr(profile, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(profile, "collect_provenance", lambda command, index=0: {**PROVENANCE, "gpu": "NVIDIA H200"})
    monkeypatch.setattr(profile, "why_illegal", lambda *_: None)
    return Tool(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished tune run over four problems."""
    where = Device(recording=str(RECORDING.write(tmp_path / "recording")))
    run_tune(TuneRequest(RECORDING.problems, "custom", "exhaustive", 10, 0, where, tmp_path / "run", "outblas tune"))
    return tmp_path / "run"


def profiled(run: Path, progress: Progress | None = None, **asked: Any) -> ProfileResult:
    return run_profile(ProfileRequest(run, 0, **asked), progress)


def evaluations(run: Path) -> list[Evaluation]:
    with Store(run / "store.sqlite") as store:
        return list(store.evaluations(run.name))


def test_every_counter_has_a_metric_that_is_asked_for() -> None:
    assert len(set(PROFILED_COUNTERS)) == len(PROFILED_COUNTERS) and "l2_hit_rate" in PROFILED_COUNTERS
    assert all(counter.unit and set(counter.metrics) <= set(METRICS) for counter in COUNTERS)


def test_counters_of_the_sample_have_the_units_that_are_documented() -> None:
    counters = counters_of(parse((ROOT / "tests" / "support" / "golden" / "ncu_raw.csv").read_text())[1])
    assert {name: value for name, value in counters.items() if not name.startswith("stall_")} == pytest.approx(
        {
            "tensor_pipe": 0.4132,
            "dram": 0.579,
            "l2_hit_rate": 0.3124,
            "occupancy": 0.078,
            "instructions": 203264,
            "cycles": 22160,
            "dram_read_bytes": 34603008,
            "dram_write_bytes": 512,
            "l2_bytes": 70254592,
        }
    )
    assert counters["stall_gmma"] == 4.75
    assert main_stalls(counters) == [("long_scoreboard", 12.61), ("gmma", 4.75), ("barrier", 0.92)]


def test_a_kernel_of_which_ncu_tells_nothing_is_no_profile() -> None:
    with pytest.raises(RecordError, match="reported no counters for k"):
        counters_of(ProfiledLaunch("k", metrics={"gpu__time_duration.sum": 1.0}))


def test_the_best_of_every_problem_are_profiled_and_read_back_in_their_evaluations(tool: Tool, run: Path) -> None:
    before = evaluations(run)
    found = profiled(run, top=2, tool=tool.path)
    assert found.new == len(found.counters) == 8
    after = evaluations(run)
    for problem in RECORDING.problems:
        passed = [e for e in after if e.problem == problem and e.timing is not None]
        best = sorted(passed, key=lambda e: e.timing.median_us if e.timing else math.inf)[:2]
        asked = [(p, config) for p, config in found.counters if p == problem]
        assert asked == [(problem, e.config) for e in best], "fastest first"
        assert all(e.counters == found.counters[problem, e.config] for e in best)
        assert all(not e.counters for e in passed if e not in best)
    values = list(found.counters.values())
    assert [v["l2_hit_rate"] for v in values] == [n / 100 for n in range(8)], "each has the figures of its own launch"
    assert values[0] | {"l2_hit_rate": 0.0} == {"l2_hit_rate": 0.0, "cycles": 2000.0, "stall_wait": 1.5}
    assert [(e.problem, e.config, e.status, e.timing) for e in before] == [
        (e.problem, e.config, e.status, e.timing) for e in after
    ]
    paid = max(after, key=lambda e: e.counters.get("l2_hit_rate", 0.0))
    plain = next(e for e in before if (e.problem, e.config) == (paid.problem, paid.config))
    assert reward(paid, "additive") - reward(plain, "additive") == pytest.approx(0.15 * 0.07 / 0.9)


def test_what_is_profiled_is_not_profiled_again(tool: Tool, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = profiled(run, top=1, tool=tool.path)
    more = profiled(run, top=2, tool=tool.path)
    assert (first.new, more.new, len(more.counters)) == (4, 4, 8)
    assert all(more.counters[pair] == counters for pair, counters in first.counters.items())
    launched = [(work["problem"], e["config"]) for works in tool.starts for work in works for e in work["entries"]]
    assert len(launched) == len(set(launched)) == 8
    monkeypatch.setattr(profile, "gpu_of_device", lambda index: pytest.fail("nothing is left to do"))
    assert profiled(run, top=2, tool="none such").new == 0


def test_two_processes_do_not_profile_one_run(tool: Tool, run: Path) -> None:
    with lock_folder(run), pytest.raises(RecordError, match="in use by another process"):
        profiled(run, tool=tool.path)
    new = profiled(run, top=1, tool=tool.path).new
    with lock_folder(run):
        assert profiled(run, top=1, tool=tool.path).new == 0 < new, "what is known is read"


def test_an_interrupted_profile_keeps_its_batches(tool: Tool, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PROBLEMS_AT_ONCE", 1)

    def stop(done: int, total: int) -> None:
        assert total == 4
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiled(run, top=1, tool=tool.path, progress=stop)
    assert sum(bool(e.counters) for e in evaluations(run)) == 3
    assert profiled(run, top=1, tool=tool.path).new == 1 and len(tool.starts) == 4


def test_problems_and_a_candidate_can_be_named(tool: Tool, run: Path) -> None:
    problem, config = RECORDING.problems[1], RECORDING.catalogue[0]
    assert list(profiled(run, mnk=[problem.mnk], config=config, tool=tool.path).counters) == [(problem, config)]
    with pytest.raises(UsageError, match="1_2_3 is not a problem of this run"):
        profiled(run, mnk=["1_2_3"], tool=tool.path)
    with pytest.raises(UsageError, match="failed on every problem"):
        profiled(run, config=Sm80DirectConfig(32, 64), tool=tool.path)
    with pytest.raises(UsageError, match="--top is 0"):
        profiled(run, top=0, tool=tool.path)


def test_only_a_finished_run_has_a_provenance(run: Path) -> None:
    assert provenance_of(run)["command"] == "outblas tune"
    about = json.loads((run / "run.json").read_text())
    del about["provenance"]  # it is written at the end
    (run / "run.json").write_text(json.dumps(about))
    with pytest.raises(RecordError, match="run is not finished; expected a finished run; rerun its command"):
        provenance_of(run)


def test_what_failed_is_never_launched() -> None:
    problem, (good, bad, *_) = RECORDING.problems[0], RECORDING.catalogue
    tried = [failed_evaluation(problem, bad), passed_evaluation(problem, good), passed_evaluation(problem, bad)]
    assert select_pairs(iter(tried), 4, (), None) == [(problem, good)], "of a pair recorded twice the first counts"


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (PERMISSION, "ERR_NVGPUCTRPERM"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute.\n", "newer Nsight Compute"),
        ("==WARNING== No kernels were profiled.\n", "no kernels"),
    ],
)
def test_a_refusal_is_one_line_and_records_nothing(
    tool: Tool, run: Path, monkeypatch: pytest.MonkeyPatch, says: str, words: str
) -> None:
    monkeypatch.setenv("OUTBLAS_SAYS", says)
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    before = evaluations(run)
    with pytest.raises(DeviceError, match=words):
        profiled(run, tool=tool.path)
    result = CliRunner().invoke(app, ["profile", str(run), "--ncu", tool.path])
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert evaluations(run) == before


def test_without_ncu_or_a_gpu_or_on_another_gpu_it_says_so(
    tool: Tool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ToolchainMissing, match="is not installed"):
        profiled(run, tool=str(run / "none"))
    monkeypatch.setattr(profile, "collect_provenance", lambda *_: {**PROVENANCE, "gpu": "NVIDIA H100"})
    with pytest.raises(UsageError, match="measured on NVIDIA H200, but this GPU is NVIDIA H100"):
        profiled(run, tool=tool.path)
    monkeypatch.setattr(device, "gpu_count", lambda: 0)
    for words, named in (("no CUDA GPU was found", "cuda:0"), ("expected a GPU", "replay:h200")):
        result = CliRunner().invoke(app, ["profile", str(run), "--device", named])
        assert result.exit_code == 2 and words in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_a_candidate_that_this_version_cannot_launch_is_refused(
    tool: Tool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "why_illegal", lambda *_: "bm must be 64")
    with pytest.raises(UsageError, match="bm must be 64"):
        profiled(run, tool=tool.path)
    assert tool.starts == []


def test_a_directory_that_is_no_run_is_refused(tool: Tool, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no store\.sqlite"):
        profiled(tmp_path, tool=tool.path)


def test_a_run_whose_directory_was_renamed_is_found(tool: Tool, run: Path) -> None:
    run = run.rename(run.with_name("other"))
    assert profiled(run, top=1, tool=tool.path).new == 4
    with Store(run / "store.sqlite") as store:
        assert len(store.counters_by_pair("run")) == 4
        store.append("a", passed_evaluation(RECORDING.problems[0], RECORDING.catalogue[0]))
    with pytest.raises(RecordError, match="2 runs, none named 'other'"):
        profiled(run, tool=tool.path)


def test_the_command_prints_a_line_for_each_and_the_report_shows_them(
    tool: Tool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Hardware counters" not in write_report(run, run / "before.html").read_text()
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    arguments = ["profile", str(run), "--top", "1", "--ncu", tool.path]
    monkeypatch.setattr(common.out, "width", 240)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + 4 + 1 and lines[-1].startswith("4 profiled now, 0 earlier")
    for number, (line, problem) in enumerate(zip(lines[1:], RECORDING.problems, strict=False)):
        assert problem.key in line and f" {number}.0%" in line and "wait 1.50" in line
    found = document(*arguments, "--json")
    assert found["facts"] == {"new": 0, "held": 4} and [one["problem"] for one in found["rows"]][:1] == [
        RECORDING.problems[0].key
    ]
    page = write_report(run, run / "after.html").read_text()
    assert "Hardware counters" in page and page.count("wait 1.50") == 4


class Curious(Agent):
    """Proposes in an order that depends on the counters that it has seen."""

    name = "curious"

    def propose(self, problem: Problem, candidates: Any, history: Sequence[Evaluation], n: int) -> list[Any]:
        tried = {e.config for e in history}
        left = [c for c in candidates if c not in tried]
        return (left[::-1] if any(e.counters for e in history) else left)[:n]


def test_a_run_resumed_after_a_profile_goes_on_as_it_would_have(tmp_path: Path) -> None:
    def search(store: Store, budget: int) -> None:
        tune(
            RECORDING.problems,
            Curious(0, H200),
            budget,
            ReplayEvaluator(RECORDING),
            store,
            "r",
            options=SearchOptions(per_round=1),
        )

    with Store(tmp_path / "whole") as whole, Store(tmp_path / "part") as part:
        search(whole, 4)
        search(part, 2)
        seen = {(e.problem, e.config): {"cycles": 1.0} for e in part.evaluations("r")}
        part.add_counters("r", seen, {})
        search(part, 4)
        assert part.recorded_pairs("r") == whole.recorded_pairs("r")


def test_counters_are_kept_beside_those_of_the_evaluation_and_the_first_count(tmp_path: Path) -> None:
    problem, config = RECORDING.problems[0], RECORDING.catalogue[0]
    with Store(tmp_path / "s.sqlite") as store:
        for name in ("a", "b"):
            store.append(name, passed_evaluation(problem, config))  # with counter l2_hit_rate = 0.5
        store.add_counters("a", {(problem, config): {"dram": 0.25, "l2_hit_rate": 0.75}}, {"ncu": "1"})
        store.add_counters("a", {(problem, config): {"dram": 0.5}}, {})
    with Store(tmp_path / "s.sqlite") as store:
        wanted = {"l2_hit_rate": 0.75, "dram": 0.25}
        assert [e.counters for e in store.evaluations()] == [wanted, {"l2_hit_rate": 0.5}], "of that run only"
        assert store.recorded("a", problem)[config].counters == wanted
        assert store.recorded("a", problem, profiled=False)[config].counters == {"l2_hit_rate": 0.5}
        assert store.counters_by_pair("b") == {}


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None, True])
def test_only_finite_numbers_of_pairs_that_were_tried_are_recorded(tmp_path: Path, value: Any) -> None:
    problem, config, other = RECORDING.problems[0], *RECORDING.catalogue[:2]
    with Store(tmp_path / "s.sqlite") as store:
        store.append("a", failed_evaluation(problem, config, Status.WRONG))
        with pytest.raises(UsageError, match="a finite number"):
            store.add_counters("a", {(problem, config): {"dram": value}}, {})
        with pytest.raises(UsageError, match="run a has not measured"):
            store.add_counters("a", {(problem, config): {"dram": 1.0}, (problem, other): {"dram": 1.0}}, {})
        assert store.counters_by_pair("a") == {}


def test_a_store_of_before_is_read_and_written_to(tmp_path: Path) -> None:
    """Stores had no table of counters, and still have none until there is something in it."""
    path, problem, config = tmp_path / "s.sqlite", RECORDING.problems[0], RECORDING.catalogue[0]
    with Store(path) as store:
        store.append("a", passed_evaluation(problem, config))

    def tables() -> set[str]:
        db = sqlite3.connect(path)
        try:
            return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        finally:
            db.close()

    assert tables() == {"runs", "evaluations"}, "as the release before wrote it"
    with Store(path) as store, Store(path) as reader:
        assert [e.counters for e in reader.evaluations("a")] == [{"l2_hit_rate": 0.5}]
        store.add_counters("a", {(problem, config): {"dram": 0.25}}, {})
        assert [e.counters for e in reader.evaluations("a")] == [{"l2_hit_rate": 0.5, "dram": 0.25}]
    assert tables() == {"runs", "evaluations", "counters"}


@pytest.mark.parametrize("text", ["[1]", '{"dram": "x"}', "no JSON"])
def test_damaged_counters_are_named(tmp_path: Path, text: str) -> None:
    path, problem, config = tmp_path / "s.sqlite", RECORDING.problems[0], RECORDING.catalogue[0]
    with Store(path) as store:
        store.append("a", passed_evaluation(problem, config))
        store.add_counters("a", {(problem, config): {"dram": 0.25}}, {})
    db = sqlite3.connect(path)
    db.execute("UPDATE counters SET counters = ?", (text,))
    db.commit()
    db.close()
    with Store(path) as store, pytest.raises(RecordError, match="contains counters that cannot be read"):
        store.counters_by_pair("a")
