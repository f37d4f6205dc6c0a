"""Contributions come back whole; damaged and hostile files are refused in one line, and nothing is unpacked."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation, Status, Verdict
from outblas.core.gpu_records import packaged_records
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.records import contribution
from outblas.records.contribution import (
    MANIFEST,
    MEMBERS,
    Contribution,
    contribution_faults,
    load_contribution,
    proof_summary,
    save_contribution,
)
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow
from outblas.records.user_library import stamp_of
from support.fake_gpu import timing
from support.gpus.known import H200

PROBLEM = Problem(64, 4096, 4096)
CONFIG = candidates(PROBLEM, H200)[0]
ROW = LibraryRow(PROBLEM, "lt_auto", source="cuda:0", plain=LibraryChoice(CONFIG, 1.2, 1.1, 1.3))
ABOUT = {"gpu": "NVIDIA H200", "driver": "580.1", "toolchain": {"nvrtc": "13.0", "outblas": "0"}, "date": "2026-01-01"}
VERDICT = Verdict(Status.PASSED, ("static", "memory"), "", 0.5)
PROVED = Evaluation(PROBLEM, CONFIG, Status.PASSED, "", VERDICT, timing(5.0))


def made(**changed: Any) -> Contribution:
    library = Library("h200", (ROW,))
    about = {**ABOUT, "stamp": stamp_of(ABOUT)}
    found = Contribution(library, packaged_records()["h200"], about, proof_summary(library, [PROVED]))
    return replace(found, **changed)


@pytest.fixture(name="path")
def path_fixture(tmp_path: Path) -> Path:
    return save_contribution(made(), tmp_path / "in" / "h200.outblas.zip")


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def test_a_contribution_comes_back_whole(path: Path) -> None:
    found = load_contribution(path)
    assert found.library.rows == (ROW,) and found.library.gpu == "h200"
    assert found.record.gpu == H200 and found.record.origin == "contributed"
    assert found.proofs == {
        "kernels": 1,
        "proved": {PROBLEM.key: {contribution.config_name(CONFIG): ["static", "memory"]}},
    }
    assert contribution_faults(found) == []
    again = save_contribution(made(), path.with_name("again.zip"))
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"library": Library("h200", ())}, "the library has no rows"),
        ({"library": Library("a100", (ROW,))}, "the library is for a100, the record for h200"),
        (
            {"provenance": {**ABOUT, "stamp": stamp_of(ABOUT), "gpu": "NVIDIA H200 NVL"}},
            "which the record does not cover",
        ),
        ({"provenance": ABOUT}, "lacks the driver"),
        ({"provenance": {**ABOUT, "stamp": {**stamp_of(ABOUT), "kernels": "0" * 64}}}, "made with other kernels"),
        ({"proofs": {"kernels": 1, "proved": {}}}, "has no recorded proof"),
        ({"proofs": {"kernels": 1, "proved": []}}, "has no recorded proof"),
        ({"library": Library("h200", (replace(ROW, source="replay:h200"),))}, "times come from recording"),
        (
            {"library": Library("h200", (replace(ROW, plain=LibraryChoice(CONFIG, 900.0, 800.0, 999.0)),))},
            "impossible speedup",
        ),
        (
            {"record": replace(packaged_records()["h200"], gpu=replace(H200, arch=80, wgmma_tflops=0.0))},
            "is illegal on",
        ),
    ],
)
def test_content_that_does_not_fit_is_a_fault(changed: dict[str, Any], fault: str) -> None:
    assert any(fault in line for line in contribution_faults(made(**changed))), contribution_faults(made(**changed))


def test_an_interval_needs_a_proof_at_each_measured_m() -> None:
    last = replace(PROBLEM, m=200)
    library = Library("h200", (), intervals=(LibraryInterval(ROW, 200, (64, 200)),))
    both = proof_summary(library, [PROVED, replace(PROVED, problem=last), replace(PROVED, problem=Problem(65, 8, 8))])
    assert (both["kernels"], list(both["proved"])) == (2, [PROBLEM.key, last.key])
    assert contribution_faults(made(library=library, proofs=both)) == []
    (fault,) = contribution_faults(made(library=library, proofs=proof_summary(library, [PROVED])))
    assert fault.startswith(last.key) and "has no recorded proof" in fault


def test_proofs_count_only_for_installed_kernels_that_passed() -> None:
    other = candidates(PROBLEM, H200)[1]
    evaluations = [
        replace(PROVED, config=other),
        replace(PROVED, status=Status.WRONG, timing=None),
        replace(PROVED, verdict=None),
    ]
    assert proof_summary(Library("h200", (ROW,)), evaluations) == {"kernels": 1, "proved": {}}


def hostile_name(members: dict[str, bytes]) -> None:
    members["../../evil.py"] = b"print()"


def absolute_name(members: dict[str, bytes]) -> None:
    members["/tmp/evil"] = members.pop("proofs.json")


def missing(members: dict[str, bytes]) -> None:
    del members["gpu.json"]


def changed_member(members: dict[str, bytes]) -> None:
    members["gpu.json"] = members["gpu.json"].replace(b"132", b"133", 1)


def bomb(members: dict[str, bytes]) -> None:
    members["gpu.json"] = b" " * (MEMBERS["gpu.json"] + 1)


def other_format(members: dict[str, bytes]) -> None:
    members[MANIFEST] = members[MANIFEST].replace(b'"format": 1', b'"format": 2')


def with_hash(name: str, data: bytes) -> Callable[[dict[str, bytes]], None]:
    """Return a change that replaces a member, and its hash with it."""

    def change(members: dict[str, bytes]) -> None:
        members[name] = data
        manifest = json.loads(members[MANIFEST])
        manifest["sha256"][name] = contribution.hashlib.sha256(data).hexdigest()
        members[MANIFEST] = json.dumps(manifest).encode()

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hostile_name, "has the members"),
        (absolute_name, "has the members"),
        (missing, "has the members"),
        (changed_member, "has a modified member gpu.json"),
        (bomb, "has a member gpu.json of more than 65536 bytes"),
        (other_format, "has format 2"),
        (with_hash("gpu.json", b"[]"), "gpu.json that is not a JSON object"),
        (with_hash("gpu.json", b"{}"), "cannot be read"),
        (with_hash("gpu.json", b"\xff"), "not valid UTF-8"),
        (with_hash("proofs.json", b"[" * 100_000), "proofs.json that is not valid JSON"),
        (with_hash("library.json", b"{}"), "has format None"),
        (with_hash("library.json", b'{"format": 1, "gpu": "h200", "rows": [{}], "provenance": {}}'), "cannot be used"),
    ],
)
def test_hostile_files_are_refused(
    change: Callable[[dict[str, bytes]], None], words: str, path: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=words) as error:
        load_contribution(rewritten(path, change))
    assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["h200.outblas.zip"]


def test_a_member_that_understates_its_size_is_cut_at_the_limit(path: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as file:
        for name in old.namelist():
            file.writestr(name, old.read(name) if name != "proofs.json" else b"0" * (MEMBERS["proofs.json"] + 10))
    assert len(data.getvalue()) < 100_000
    path.write_bytes(data.getvalue())
    with pytest.raises(RecordError, match="proofs.json of more than"):
        load_contribution(path)


@pytest.mark.parametrize("keep", [0, 10, 500])
def test_truncated_files_are_damaged(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RecordError, match="is damaged"):
        load_contribution(path)


def test_a_file_that_is_missing_or_too_large_is_refused(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        load_contribution(tmp_path / "none")
    monkeypatch.setattr(contribution, "MOST_BYTES", 100)
    with pytest.raises(RecordError, match="exceeds 100 bytes"):
        load_contribution(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_stored_and_deflated_members_are_unpacked(method: int, path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    for packed_by, taken in ((zipfile.ZIP_STORED, True), (method, False)):
        with zipfile.ZipFile(path, "w", packed_by) as file:
            for name, data in members.items():
                file.writestr(name, data)
        if taken:
            assert load_contribution(path).library.rows == (ROW,)
            continue
        with pytest.raises(RecordError, match="neither stored nor deflated"):
            load_contribution(path)
