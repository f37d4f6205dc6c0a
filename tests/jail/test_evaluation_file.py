"""Recordings of free kernels: what a line that cannot be read says, and what a disk that refuses leaves."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.problem import Problem
from outblas.records.evaluation_json import evaluation_to_json
from outblas_lab.custom.free_kernel import FreeKernel
from outblas_lab.jail import evaluation_file
from outblas_lab.jail.evaluation_file import FORMAT, Recorder, load
from support.free_fixture import device_text
from support.gpus.known import H200

P, OTHER = Problem(64, 64, 64), Problem(8, 8, 8)
KERNEL = FreeKernel.parse(device_text())
WRONG, HANG = Evaluation(P, KERNEL, Status.WRONG), Evaluation(OTHER, KERNEL, Status.HANG)
HEAD = json.dumps({"format": FORMAT, "gpu": "h200", "provenance": {"a": 1}}, separators=(",", ":")).encode() + b"\n"


def line(evaluation):
    return json.dumps(evaluation_to_json(evaluation), separators=(",", ":")).encode() + b"\n"


@pytest.fixture(name="path")
def path_fixture(tmp_path):
    path = tmp_path / "new" / "free.jsonl"
    with Recorder(path, H200, {"a": 1}) as recorder:
        recorder.append(WRONG)
        recorder.append(HANG)
    return path


def test_a_file_is_its_head_and_a_line_for_each_evaluation(path):
    assert path.read_bytes() == HEAD + line(WRONG) + line(HANG)
    found = load(path)
    assert (found.gpu, found.provenance, found.evaluations) == (H200, {"a": 1}, (WRONG, HANG))
    assert found.of(P) == [WRONG] and found.of(Problem(8, 8, 16)) == []
    assert found.find(OTHER, KERNEL) == HANG and found.find(Problem(8, 8, 16), KERNEL) is None


def test_the_last_of_a_pair_counts_and_blank_lines_do_not(path):
    again = replace(WRONG, detail="again")
    path.write_bytes(HEAD + line(WRONG) + b"\n  \n" + line(again))
    assert load(path).evaluations == (WRONG, again) and load(path).find(P, KERNEL) == again


def test_a_head_alone_has_no_evaluations(path):
    for data in (HEAD, HEAD.rstrip(), HEAD + line(WRONG)[:-1], json.dumps({"format": FORMAT, "gpu": "h200"}).encode()):
        path.write_bytes(data)
        assert load(path).evaluations == ()
    assert load(path).provenance == {}


@pytest.mark.parametrize("damage", [b"{}\n", b"[]\n", b"x\n", b"\xff\n"])
def test_a_damaged_line_is_named_by_its_number(path, damage):
    path.write_bytes(HEAD + line(WRONG) + damage)
    with pytest.raises(RecordError, match="has an unreadable line 3"):
        load(path)


def test_a_recording_of_another_gpu_is_refused_and_stays(path):
    from support.gpus.known import H100

    before = path.read_bytes()
    with pytest.raises(RecordError, match=f"was recorded on {H200.name}"):
        Recorder(path, H100, {})
    assert path.read_bytes() == before


def test_a_file_without_content_gets_a_head(tmp_path):
    (tmp_path / "x").touch()
    Recorder(tmp_path / "x", H200, {"a": 1}).close()
    assert (tmp_path / "x").read_bytes() == HEAD


def test_a_disk_that_refuses_leaves_the_earlier_content(path, monkeypatch):
    before = path.read_bytes()
    recorder = Recorder(path, H200, {})

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RecordError, match=r"cannot be written \(No space left on device\)"):
            recorder.append(WRONG)
    assert path.read_bytes() == before
    recorder.close()
    with pytest.raises(RecordError, match="is not a regular file"):
        Recorder(path.parent, H200, {})
    with pytest.raises(RecordError, match="cannot be written"):
        Recorder(path / "below", H200, {})


def test_every_line_is_on_the_disk_when_it_is_appended(path, monkeypatch):
    synced = []
    monkeypatch.setattr(evaluation_file.os, "fsync", lambda handle: synced.append(path.read_bytes()))
    recorder = Recorder(path, H200, {})
    before = path.read_bytes()
    recorder.append(WRONG)
    assert synced == [before + line(WRONG)]
    recorder.close()
    with pytest.raises(ValueError, match="closed"):
        recorder.append(WRONG)
