"""The user's library: tuned from captured products, installed, preferred, and ignored when it is stale."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outblas.cli.main import app
from outblas.cli.tune import budget_of, parse_budget
from outblas.core.errors import DeviceError, RecordError, UsageError
from outblas.core.problem import Problem
from outblas.dispatch import device_registry, matmul
from outblas.dispatch.decide import Operand, decide
from outblas.kernels.cost.cost_model import predicted_us
from outblas.kernels.families.sm80_mma_gemm import Sm80MmaConfig
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records import user_library
from outblas.records.captured_products import CapturedProduct, CapturedProducts
from outblas.records.library import Library
from outblas.records.library_merge import merge_user_row
from outblas.records.library_row import LibraryChoice, LibraryRow
from outblas.records.user_library import (
    EqualKernels,
    KernelRelease,
    install,
    load,
    stamp_differences,
    stamp_of,
    user_library_path,
)
from outblas.tune.time_shares import budgets, time_shares, weighted_speedup
from support.gpus.known import H200

FIRST, SECOND = Problem(64, 64, 64), Problem(8, 64, 64)
SLOW, FAST = (LibraryChoice(Sm80MmaConfig(16, n, wm=1, wn=1), 1.2, low, 1.3) for n, low in ((16, 1.1), (32, 1.15)))
PROVENANCE = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "toolchain": {"nvrtc": "13.0 (wheel 13.0.88)", "outblas": "0.1.0"},
    "command": "outblas tune",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set up a user's home, and a machine that matches PROVENANCE."""
    monkeypatch.delenv("OUTBLAS_LIBRARY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(user_library, "stamp_of_device", lambda index: stamp_of(PROVENANCE))
    monkeypatch.setattr(user_library, "_warned", set())
    yield tmp_path


def tuned(*rows: LibraryRow) -> Library:
    return Library("h200", rows, {"source": "cuda:0"})


def test_where_it_lies(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_library_path("h200") == home / "outblas" / "libraries" / "h200.json"
    assert user_library_path("NVIDIA RTX A6000/x") == home / "outblas" / "libraries" / "nvidia-rtx-a6000-x.json"
    monkeypatch.setenv("OUTBLAS_LIBRARY", "/else/mine.json")
    assert user_library_path("h200") == Path("/else/mine.json")
    monkeypatch.setenv("OUTBLAS_LIBRARY", "/else")
    assert user_library_path("h200") == Path("/else/h200.json")
    monkeypatch.setenv("OUTBLAS_LIBRARY", "~nosuchuser/else")
    assert user_library_path("h200") == Path("~nosuchuser/else/h200.json") and load("h200", 0) is None
    monkeypatch.setenv("OUTBLAS_LIBRARY", "")
    assert user_library_path("h200") is None and load("h200", 0) is None
    with pytest.raises(UsageError, match="OUTBLAS_LIBRARY"):
        install(tuned(LibraryRow(FIRST)), PROVENANCE)


@pytest.mark.parametrize("stamp", [None, "old", [1], {"gpu": [1]}])
def test_a_file_with_a_foreign_stamp_is_moved_aside(stamp: Any, home: Path) -> None:
    path = home / "outblas" / "libraries" / "h200.json"
    Library("h200", (LibraryRow(SECOND),), {"stamp": stamp}).save(path)
    done = install(tuned(LibraryRow(FIRST, plain=FAST)), PROVENANCE)
    assert done.rows == 1 and done.aside is not None and Library.load(done.aside).rows == (LibraryRow(SECOND),)


def test_an_installed_library_is_found_and_merged(home: Path) -> None:
    done = install(tuned(LibraryRow(FIRST, plain=FAST), LibraryRow(SECOND, plain=SLOW)), PROVENANCE)
    assert (done.changed, done.rows, done.aside) == (2, 2, None)
    done = install(tuned(LibraryRow(FIRST, plain=SLOW), LibraryRow(SECOND, plain=FAST)), PROVENANCE)
    assert (done.changed, done.rows) == (1, 2)
    found = load("h200", 0)
    assert found is not None and found[1] == done.path
    assert [row.plain for row in found[0].rows] == [FAST, FAST]
    assert found[0].provenance["stamp"]["driver"] == "580" and found[0].provenance["command"] == "outblas tune"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": "NVIDIA H100"}, "GPU NVIDIA H200, now NVIDIA H100"),
        ({"driver": "590.2"}, "driver 580, now 590"),
        ({"driver": None}, "driver 580, now unknown"),
        ({"toolchain": {"nvrtc": "13.1", "outblas": "0.1.0"}}, "NVRTC 13.0 (wheel 13.0.88), now 13.1"),
        ({"toolchain": {**PROVENANCE["toolchain"], "outblas": "0.3.0"}}, "outblas 0.1.0, now 0.3.0"),  # type: ignore[dict-item]
    ],
)
def test_a_stale_library_is_ignored_with_one_warning(
    home: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    install(tuned(LibraryRow(FIRST, plain=FAST)), PROVENANCE)
    monkeypatch.setattr(user_library, "stamp_of_device", lambda index: stamp_of({**PROVENANCE, **change}))
    with pytest.warns(RuntimeWarning) as caught:
        assert load("h200", 0) is None
    assert len(caught) == 1 and words in str(caught[0].message) and "outblas tune" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load("h200", 0) is None


def test_other_kernel_sources_are_a_difference_and_a_later_minor_driver_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = stamp_of(PROVENANCE)
    assert stamp_differences(now, stamp_of({**PROVENANCE, "driver": "580.95.05"})) == []
    monkeypatch.setattr("outblas.kernels.kernel_hash.kernels_sha", lambda: "f" * 64)
    (word,) = stamp_differences(now, stamp_of(PROVENANCE))
    assert word.startswith("kernel sources ") and "now ffffffffffff" in word


def test_a_library_of_0_1_0_is_served_while_the_cubins_are_the_same(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hash follows the old rule; a table says that its kernels equal the present ones."""
    was = KernelRelease("0.1.0", "667998899a57bb774374cf8e36938fe705196a6f300efff51ca4b2604f605247")
    table = EqualKernels(KernelRelease(PROVENANCE["toolchain"]["outblas"], kernels_sha()), (was,))
    monkeypatch.setattr(EqualKernels, "load", lambda: table)
    path = install(tuned(LibraryRow(FIRST, plain=FAST)), PROVENANCE).path
    old = {"outblas": was.release, "kernels": was.sha}
    data = json.loads(path.read_text())
    data["provenance"]["stamp"].update(old)
    path.write_text(json.dumps(data))
    here = user_library.stamp_of_device(0)
    assert stamp_differences(old, {"outblas": here["outblas"], "kernels": here["kernels"]}) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load("h200", 0)
    assert found is not None and [row.plain for row in found[0].rows] == [FAST]
    assert found[0].provenance["stamp"]["kernels"] == old["kernels"] != here["kernels"]

    done = install(tuned(LibraryRow(SECOND, plain=SLOW)), PROVENANCE)
    assert (done.rows, done.aside) == (2, None), "merged, not moved aside"
    assert Library.load(path).provenance["stamp"] == here

    path.write_text(json.dumps(data))
    monkeypatch.setattr("outblas.kernels.kernel_hash.kernels_sha", lambda: "f" * 64)  # a token was changed
    with pytest.warns(RuntimeWarning, match="kernel sources 667998899a57, now ffffffffffff"):
        assert load("h200", 0) is None


def test_a_library_of_another_release_is_served_where_the_table_has_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(tuned(LibraryRow(FIRST, plain=FAST)), PROVENANCE)
    old, later = (
        user_library.stamp_of_device(0),
        {**PROVENANCE, "toolchain": {**PROVENANCE["toolchain"], "outblas": "9.9"}},
    )  # type: ignore[dict-item]
    monkeypatch.setattr(user_library, "stamp_of_device", lambda index: stamp_of(later))
    with pytest.warns(RuntimeWarning, match="outblas 0.1.0, now 9.9"):
        assert load("h200", 0) is None
    now = KernelRelease("9.9", old["kernels"])
    table = EqualKernels(now, (KernelRelease("0.1.0", old["kernels"]),))
    monkeypatch.setattr(EqualKernels, "load", lambda: table)
    assert load("h200", 0) is not None
    assert stamp_differences({**old, "driver": "1"}, user_library.stamp_of_device(0)) == ["driver 1, now 580"]


def test_a_damaged_table_leaves_the_packaged_library(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tuned(LibraryRow(FIRST, plain=FAST)), PROVENANCE)

    def damaged() -> EqualKernels:
        raise RecordError("the table of equivalent kernels is cut off", "a whole file", "install again")

    monkeypatch.setattr(EqualKernels, "load", damaged)
    assert load("h200", 0) is not None, "not asked where nothing differs"
    monkeypatch.setattr("outblas.kernels.kernel_hash.kernels_sha", lambda: "f" * 64)
    with pytest.warns(RuntimeWarning, match="ignores the user library .* the table of equivalent kernels is cut off"):
        assert load("h200", 0) is None


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"format": 1, "gpu": "h200", "rows": [], "provenance": {}}'],
    ids=["cut off", "too deep", "no stamp"],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning_and_kept_when_installing(home: Path, text: str) -> None:
    path = user_library_path("h200")
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(RuntimeWarning, match="ignores the user library"):
        assert load("h200", 0) is None
    done = install(tuned(LibraryRow(FIRST, plain=FAST)), PROVENANCE)
    assert done.aside is not None and done.aside.read_text() == text
    assert load("h200", 0) is not None


def test_a_folder_that_may_not_be_read_is_one_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.warns(RuntimeWarning, match="Permission denied") as told:
        assert user_library.load("h200", 0) is None and user_library.load("h200", 0) is None
    assert len(told) == 1


def test_a_library_of_another_gpu_is_ignored(home: Path) -> None:
    path = install(tuned(LibraryRow(FIRST, plain=FAST)), PROVENANCE).path
    path.rename(path.with_name("other.json"))
    with pytest.warns(RuntimeWarning, match="it is for GPU h200, but this GPU is other"):
        assert load("other", 0) is None


def test_figures_of_a_recording_are_never_installed(home: Path) -> None:
    for library in (
        Library("h200", (LibraryRow(FIRST, "torch", "", "replay:h200"),)),
        Library("h200", (), {"source": "replay:h200"}),
    ):
        with pytest.raises(UsageError, match="recording cannot be installed"):
            install(library, PROVENANCE)
    assert list(home.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_error(home: Path) -> None:
    (home / "outblas").write_text("a file")
    with pytest.raises(RecordError, match="cannot write to"):
        install(tuned(LibraryRow(FIRST)), PROVENANCE)


def test_the_users_row_goes_first_and_the_packaged_kernel_stands_in_where_it_has_none() -> None:
    own, packaged = (
        LibraryRow(FIRST, "torch", plain=FAST),
        LibraryRow(FIRST, "lt_auto", plain=SLOW, pdl=SLOW, weights=FAST),
    )
    both = merge_user_row(own, packaged)
    assert (both.plain, both.pdl, both.weights, both.baseline) == (FAST, SLOW, FAST, "torch")
    assert merge_user_row(own, None) == own
    # Constant weights without a kernel of their own take the one of PDL: the user's.
    assert merge_user_row(LibraryRow(FIRST, pdl=FAST), packaged).choice("weights") == FAST


def test_a_file_names_the_dates_and_commits_of_all_its_installs(home: Path) -> None:
    def about(day: int, commit: str) -> dict[str, Any]:
        return {**PROVENANCE, "date": f"2026-01-{day:02}T00:00:00+00:00", "commit": commit}

    install(tuned(LibraryRow(FIRST, "torch", "", "cuda:0", plain=FAST)), about(1, "aaaa"))
    for day, commit in ((3, "bbbb"), (2, "aaaa"), (4, "bbbb")):
        path = install(tuned(LibraryRow(SECOND, "torch", "", "cuda:0", plain=FAST)), about(day, commit)).path
    found = Library.load(path).provenance
    assert found["date"] == "2026-01-01T00:00:00+00:00 to 2026-01-04T00:00:00+00:00"
    assert (found["commit"], found["command"]) == ("aaaa; bbbb", "outblas tune")
    for number in range(2 * user_library.MOST_NAMED):
        install(tuned(LibraryRow(SECOND, "torch", "", "cuda:0", plain=FAST)), about(5, str(number)))
    assert Library.load(path).provenance["commit"] == "5; 6; 7; 8; 9"


def test_the_dispatch_uses_it_and_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tuned(LibraryRow(FIRST, "torch", "", "cuda:0", plain=FAST)), PROVENANCE)
    monkeypatch.setattr(device_registry, "gpu_of_device", lambda index: H200)
    monkeypatch.setattr(device_registry, "devices", {})
    monkeypatch.setattr(device_registry, "libraries", {})
    packaged = Library.packaged("h200")
    device = device_registry.device_state(0)
    assert device.library.lookup(FIRST).plain == FAST  # type: ignore[union-attr]
    assert len(device.library.rows) == len(packaged.rows) + (packaged.lookup(FIRST) is None)
    said = matmul.status()["cuda:0"]["libraries"]
    assert said == [f"{user_library_path('h200')} (1 rows)", f"packaged h200 ({packaged.size()})"]
    matmul.use_library(tuned())
    assert matmul.status()["cuda:0"]["libraries"] == ["a library from the caller (0 rows)"]
    matmul.use_library(None)
    assert matmul.status()["cuda:0"]["libraries"] == said


def test_a_gpu_that_is_not_served_asks_for_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(index: int) -> None:
        raise DeviceError("sm_70", "sm_80", "torch")

    monkeypatch.setattr(device_registry, "gpu_of_device", old)
    monkeypatch.setattr(device_registry, "library_for_device", lambda *a: pytest.fail("asked"))
    assert device_registry._new_device(0).gpu is None


# -- shares and budgets ----------------------------------------------------------------------------------------------


def test_problems_are_ranked_by_their_share_of_the_time() -> None:
    ranked = time_shares({FIRST: 10, SECOND: 1}, {FIRST: 2.0, SECOND: 60.0}.__getitem__)
    assert [(one.problem, one.share) for one in ranked] == [(SECOND, 0.75), (FIRST, 0.25)]
    dealt = budgets(ranked, 16)
    assert dealt == {SECOND: 4 + 18, FIRST: 4 + 6} and sum(dealt.values()) == 32
    assert budgets(ranked, 2) == {FIRST: 2, SECOND: 2}
    library = tuned(LibraryRow(SECOND, plain=LibraryChoice(FAST.config, 1.5, 1.4, 1.6)))
    assert weighted_speedup(ranked, library, "plain") == pytest.approx(1 / (0.75 / 1.5 + 0.25))


def test_the_predicted_time_grows_with_the_work() -> None:
    assert 0 < predicted_us(FIRST, H200) < predicted_us(Problem(4096, 4096, 4096), H200)


@pytest.mark.parametrize(
    ("text", "meant"), [("16", (16, None)), ("60s", (16, 60.0)), ("32,60s", (32, 60.0)), ("1.5s", (16, 1.5))]
)
def test_a_budget_is_measurements_seconds_or_both(text: str, meant: Any) -> None:
    assert parse_budget(text) == meant


def test_less_is_measured_of_an_engines_model() -> None:
    config = Path("config.json")
    assert budget_of(None, None) == (16, None) and budget_of(None, config) == (12, None)
    assert budget_of("60s", config) == (12, 60.0) and budget_of("32,60s", config) == (32, 60.0)


@pytest.mark.parametrize("text", ["", "s", "60 s", "60s,32", "16,", ",60s", "sixty", "0", "0s", "-1", "1e3s"])
def test_another_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--budget"):
        parse_budget(text)


# -- from a model to a decision, on the recording --------------------------------------------------------------------


def outblas(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def captured_file(path: Path, *products: tuple[CapturedProduct, int]) -> str:
    CapturedProducts(dict(products), ({"command": "test"},)).save(path)
    return str(path)


def test_a_captured_model_is_tuned_and_its_kernel_decided(home: Path) -> None:
    torch = pytest.importorskip("torch")
    import outblas as package

    model = torch.nn.Sequential(
        torch.nn.Linear(128, 256, bias=False, dtype=torch.float16),
        torch.nn.Linear(256, 64, bias=False, dtype=torch.float16),
    )
    with package.capture(home / "p.json"), torch.inference_mode():
        for _ in range(3):
            model(torch.ones(64, 128, dtype=torch.float16))
    run = home / "run"
    result = outblas(
        *(
            "tune",
            "--captured",
            str(home / "p.json"),
            "--device",
            "replay:h200",
            "--budget",
            "8",
            "--agent",
            "heuristic",
        ),
        *("--run", str(run)),
    )
    assert result.exit_code == 0, result.stderr
    assert "not installed: measured on the recording" in result.stdout and "all captured matmuls" in result.stdout
    assert not (home / "outblas").exists()
    library = Library.load(run / "library.json")
    problems = {Problem(64, 256, 128), Problem(64, 64, 256)}
    assert {row.problem for row in library.rows} == problems
    for problem in problems:
        row = library.lookup(problem)
        assert row is not None and row.pdl is not None and row.source == "replay:h200"
        a = Operand((problem.m, problem.k), (problem.k, 1), "fp16", "cuda:0")
        b = Operand((problem.k, problem.n), (1, problem.k), "fp16", "cuda:0")
        assert decide(a, b, None, gpu=H200, library=library, launch="pdl").config == row.pdl.config


def test_what_is_not_recorded_is_left_out_and_said(tmp_path: Path) -> None:
    known, other = (
        CapturedProduct(64, 256, 128, "TN", "fp16", "cpu", "mm"),
        CapturedProduct(63, 256, 128, "TN", "fp16", "cpu", "mm"),
    )
    transposed = CapturedProduct(64, 256, 128, "NT", "fp16", "cpu", "mm")
    file = captured_file(tmp_path / "p.json", (known, 1), (other, 5), (transposed, 2))
    arguments = ("tune", "--captured", file, "--device", "replay:h200", "--budget", "4", "--run", str(tmp_path / "run"))
    result = outblas(*arguments, "--agent", "random")
    assert result.exit_code == 0, result.stderr
    assert "2 products left out: layout NT; 5 products left out: not in replay:h200" in result.stderr
    file = captured_file(tmp_path / "q.json", (other, 5))
    result = outblas("tune", "--captured", file, "--device", "replay:h200")
    assert result.exit_code == 2 and "contains no problem to tune" in result.stderr


def test_bad_uses_of_captured_are_one_line(tmp_path: Path) -> None:
    file = captured_file(tmp_path / "p.json", (CapturedProduct(64, 256, 128, "TN", "fp16", "cpu", "mm"), 1))
    for arguments, word in (
        (("--mnk", "64_64_64"), "--captured conflicts with"),
        (("--device", "replay:h200", "--install"), "--install conflicts with the recording"),
        (("--budget", "soon"), "--budget"),
    ):
        result = outblas("tune", "--captured", file, *arguments)
        assert result.exit_code == 2 and word in result.stderr and len(result.stderr.strip().splitlines()) == 1
    (tmp_path / "p.json").write_text(json.dumps({"format": 9}))
    assert "outblas capture" in outblas("tune", "--captured", file).stderr
