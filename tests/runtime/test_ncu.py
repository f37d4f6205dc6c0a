"""Counters by Nsight Compute without ncu: a script prints its messages and its table.

``tests/support/golden/ncu_raw.csv`` is in ncu's format (``--csv --page raw --print-units base``) with invented figures.
It has two problems; for the first, cuBLASLt splits K. Shares without a value are ``nan`` and ``n/a``.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import DeviceError, RecordError, ToolchainMissing
from outblas_lab.pool import ncu
from support.helpers import ROOT

GOLDEN = ROOT / "tests" / "support" / "golden" / "ncu_raw.csv"
TEXT = GOLDEN.read_text(encoding="utf-8")
PERMISSION = (
    "==PROF== Connected to process 7 (/usr/bin/python3)\n"
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the"
    " target device 0. For instructions on enabling permissions and to get more information see"
    " https://developer.nvidia.com/ERR_NVGPUCTRPERM\n==WARNING== No kernels were profiled.\n"
)
#: Stands in for ncu: knows no metric of $UNKNOWN, else writes $SAMPLE; leaves its arguments in $ARGUMENTS.
FAKE = """#!{python}
import json, os, re, sys, time
args = sys.argv[1:]
if args == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.0.0 (build 1) (public-release)")
    sys.exit(0)
with open(os.environ["ARGUMENTS"], "a") as file:
    file.write(json.dumps(args) + "\\n")
if "SECONDS" in os.environ:
    open(args[args.index("--log-file") + 1], "w").write("==PROF== begun\\n")
    time.sleep(float(os.environ["SECONDS"]))
print("words of the target")
asked = args[args.index("--metrics") + 1].split(",")
lacking = [m for m in asked if m.split(".")[0] in os.environ.get("UNKNOWN", "").split()]
with open(args[args.index("--log-file") + 1], "w") as log:
    if lacking:
        log.write("==ERROR== Failed to find metric " + lacking[0] + "\\n")
        sys.exit(1)
    log.write(open(os.environ["SAMPLE"]).read())
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Path of the stand-in; ``fake.asked()``: the arguments of every call."""
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.write_text(FAKE.format(python=sys.executable))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("ARGUMENTS", str(tmp_path / "arguments"))
    monkeypatch.setenv("SAMPLE", str(GOLDEN))

    class Fake:
        path = str(tool)

        @staticmethod
        def asked() -> list[list[str]]:
            return [json.loads(line) for line in (tmp_path / "arguments").read_text().splitlines()]

    return Fake


def test_the_sample_reads_as_it_was_written() -> None:
    launches = ncu.parse(TEXT)
    assert [launch.kernel.split("(")[0] for launch in launches[1:4:2]] == [
        "sm90_wgmma_gemm",
        "nvjet_hsh_64x32_64x16_2x1_v_bz_splitK_TNT",
    ]
    ours = launches[1]
    assert (ours.block, ours.grid) == ("(160, 1, 1)", "(64, 2, 1)")
    assert ours.metrics["gpu__time_duration.sum"] == 13408 and ours.metrics["dram__bytes_read.sum"] == 34603008
    assert "lts__t_sector_hit_rate.pct" not in launches[0].metrics, "nan is not a figure"
    assert "dram__throughput.avg.pct_of_peak_sustained_elapsed" not in launches[4].metrics, "n/a is not a figure"


def test_figures_have_plain_names_and_the_three_main_stalls() -> None:
    launches = ncu.parse(TEXT)
    assert ncu.figures(launches[1]) == {
        "kernel": "sm90_wgmma_gemm",
        "grid": "(64, 2, 1)",
        "block": "(160, 1, 1)",
        "time_ns": 13408.0,
        "tensor_pct": 41.32,
        "dram_pct": 57.9,
        "dram_read_bytes": 34603008.0,
        "dram_write_bytes": 512.0,
        "l2_hit_pct": 31.24,
        "l2_bytes": 70254592.0,
        "occupancy_pct": 7.8,
        "instructions": 203264.0,
        "cycles": 22160.0,
        "stalls": [["long_scoreboard", 12.61], ["gmma", 4.75], ["barrier", 0.92]],
    }
    assert ncu.figures(launches[4])["dram_pct"] is None
    assert ncu.figures(launches[6])["stalls"][:2] == [["long_scoreboard", 5.0], ["wait", 5.0]], "equal ones by name"


def test_another_name_of_a_figure_serves_where_the_first_is_not_known() -> None:
    second = ncu.FIGURE_METRICS["tensor_pct"][1]
    assert ncu.figures(ncu.ProfiledLaunch("k", metrics={second: 4.0}))["tensor_pct"] == 4.0
    assert (
        ncu.figures(ncu.ProfiledLaunch("k"))["tensor_pct"] is None
        and ncu.figures(ncu.ProfiledLaunch("k"))["stalls"] == []
    )


@pytest.mark.parametrize(
    ("unit", "scale"),
    [("ns", 1), ("nsecond", 1), ("us", 1e3), ("usecond", 1e3), ("ms", 1e6), ("second", 1e9)]
    + [("byte", 1), ("Kbyte", 1e3), ("Gbyte", 1e9), ("%", 1), ("", 1), ("inst", 1), ("Minst", 1e6), ("cycle", 1)],
)
def test_units_become_nanoseconds_and_plain_counts(unit: str, scale: float) -> None:
    text = f'"ID","Kernel Name","a__b.sum"\n"","","{unit}"\n"0","k","1,234.5"\n'
    assert ncu.parse(text)[0].metrics == {"a__b.sum": 1234.5 * scale}


def test_what_the_device_and_the_launch_say_in_words_is_no_figure() -> None:
    names = ["device__attribute_mode", "device__attribute_sms", "launch__policy", "a__b.sum"]
    head = ",".join(f'"{name}"' for name in ["ID", "Kernel Name", *names])
    text = f'{head}\n"","","","","",""\n"0","k","No-CC","132","PolicySpread","7"\n'
    assert ncu.parse(text)[0].metrics == {"device__attribute_sms": 132.0, "a__b.sum": 7.0}


def test_kernels_belong_to_the_mark_before_them() -> None:
    groups = ncu.between_marks(ncu.parse(TEXT))
    assert [len(group) for group in groups] == [1, 2, 1, 1]
    assert ncu.between_marks([]) == []
    with pytest.raises(RecordError, match="before any mark"):
        ncu.between_marks(ncu.parse(TEXT)[1:])


def table(*rows: str) -> str:
    return "\n".join(['"ID","Kernel Name","a__b.sum"', '"","","ns"', *rows]) + "\n"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", RecordError, "no table"),
        ("words\n", RecordError, "no table"),
        (table('"0","k"'), RecordError, "row 3 of ncu's table has 2 fields"),
        (table('"0","k","fast"'), RecordError, "'fast' for a__b.sum"),
        (table('"0","k","1","2"'), RecordError, "4 fields"),
        ('"ID","Kernel Name","a__b.sum"\n', RecordError, "no row of units"),
        ('"ID","Kernel Name","a__b.sum"\n"0","k","1"\n', RecordError, "no row of units"),
        ('"ID","Metric Name","Kernel Name"\n"0","a","k"\n', RecordError, "not from the raw page"),
        ('"ID","a__b.sum"\n"","ns"\n"0","1"\n', RecordError, "not from the raw page"),
        (table(), DeviceError, "no kernels"),
        ("==WARNING== No kernels were profiled.\n", DeviceError, "no kernels"),
        (PERMISSION, DeviceError, "ERR_NVGPUCTRPERM"),
        ("==ERROR== Cuda driver is not compatible with Nsight Compute.\n", DeviceError, "newer Nsight Compute"),
        ("==ERROR== Unknown Error on device 0.\n", DeviceError, "Unknown Error on device 0"),
    ],
)
def test_what_is_not_a_whole_profile_is_one_clear_line(text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as found:
        ncu.parse(text)
    assert "\n" not in str(found.value)


def test_a_table_that_ends_too_soon_is_refused() -> None:
    with pytest.raises(RecordError, match="fields"):
        ncu.parse(TEXT[: TEXT.rindex(',"')])


def test_the_command_does_not_lock_clocks_and_waits_for_the_profiler_to_start(tmp_path: Path) -> None:
    line = ncu.command("ncu", ["python", "x.py"], ["a__b.sum", "c__d.pct"], "warm", tmp_path / "log")
    assert line[0] == "ncu" and line[-2:] == ["python", "x.py"]
    text = " ".join(line)
    for wanted in ("--clock-control none", "--profile-from-start off", "--cache-control none", "--csv --page raw"):
        assert wanted in text
    assert "--metrics a__b.sum,c__d.pct" in text and f"--log-file {tmp_path / 'log'}" in text
    assert "--cache-control all" in " ".join(ncu.command("ncu", [], [], "flushed", tmp_path / "log"))


def test_metrics_are_asked_for_once_each() -> None:
    assert len(set(ncu.METRICS)) == len(ncu.METRICS) and all("." in name for name in ncu.METRICS)
    assert not any("selected" in name for name in ncu.METRICS), "a warp that is selected, or could be, does not stall"


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("==ERROR== Failed to find metric sm__a_b.avg.pct", ["sm__a_b"]),
        ("==ERROR== Failed to find metric regex:^sm__a_b\\.(sum|min|max)$", ["sm__a_b"]),
        ("==ERROR== Failed to find metrics: sm__a.sum, lts__b.pct\n==PROF== sm__c", ["lts__b", "sm__a"]),
        (TEXT, []),
    ],
)
def test_metrics_that_ncu_lacks_are_named(said: str, names: list[str]) -> None:
    assert ncu.unknown_metrics(said) == names


def test_ncu_is_run_and_its_words_are_kept_apart_from_the_targets(fake: Any, tmp_path: Path) -> None:
    log = tmp_path / "kept" / "out.csv"
    launches = ncu.profile(fake.path, ["target", "--run"], ["a__b.sum"], "warm", log=log)
    assert launches == ncu.parse(TEXT)
    (asked,) = fake.asked()
    assert asked[-2:] == ["target", "--run"] and asked[asked.index("--cache-control") + 1] == "none"
    assert "words of the target" not in log.read_text() and ncu.parse(log.read_text()) == launches


def test_metrics_that_a_gpu_lacks_are_left_out_one_by_one(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNKNOWN", "sm__b lts__c")
    metrics = ["sm__a.sum", "sm__b.sum", "lts__c.pct", "sm__b.avg.pct"]
    assert ncu.known_metrics(fake.path, ["target"], metrics) == ("sm__a.sum",)
    assert len(fake.asked()) == 3
    with pytest.raises(DeviceError, match="does not know lts__c"):
        ncu.known_metrics(fake.path, ["target"], ["lts__c.pct"])
    with pytest.raises(DeviceError, match="does not know sm__b"):
        ncu.profile(fake.path, ["target"], metrics)


@pytest.mark.parametrize("status", ["0", "1"])
def test_a_refusal_is_said_whatever_the_exit_status(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str
) -> None:
    (tmp_path / "refused").write_text(PERMISSION)
    monkeypatch.setenv("SAMPLE", str(tmp_path / "refused"))
    monkeypatch.setenv("STATUS", status)
    for call in (ncu.profile, ncu.known_metrics):
        with pytest.raises(DeviceError, match="NVreg_RestrictProfilingToAdminUsers=0"):
            call(fake.path, ["target"], ["a__b.sum"])


def test_a_target_that_fails_is_named_by_its_last_words(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "failed").write_text("==ERROR== The application returned an error code (1).\n")
    monkeypatch.setenv("SAMPLE", str(tmp_path / "failed"))
    monkeypatch.setenv("STATUS", "1")
    with pytest.raises(DeviceError, match="ended with 1: words of the target"):
        ncu.profile(fake.path, ["target"], ["a__b.sum"])


def test_a_profile_that_does_not_end_is_ended_and_leaves_its_log(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECONDS", "60")
    with pytest.raises(DeviceError, match="did not finish in 1.5 s"):
        ncu.profile(fake.path, ["target"], ["a__b.sum"], timeout_s=1.5, log=tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == "==PROF== begun\n"


def test_ncu_is_looked_for(fake: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", os.path.dirname(fake.path))
    assert ncu.find_ncu() == ncu.find_ncu(fake.path) == fake.path
    assert ncu.version(fake.path) == "2025.3.0.0"
    with pytest.raises(ToolchainMissing, match="cannot be run"):
        ncu.version(str(tmp_path / "other"))
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    monkeypatch.setattr(ncu, "_NCU_GLOBS", (f"{tmp_path}/b*/ncu",))
    assert ncu.find_ncu() == fake.path
    monkeypatch.setattr(ncu, "_NCU_GLOBS", ())
    for named in (None, str(tmp_path / "other")):
        with pytest.raises(ToolchainMissing, match="is not installed"):
            ncu.find_ncu(named)
