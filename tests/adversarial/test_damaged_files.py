"""Files of each kind that were damaged at random: a reader takes them, or ends in one line."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outblas.core.errors import OutblasError, RecordError
from outblas.core.evaluation import Evaluation
from outblas.core.gpu_records import packaged_records, user_records
from outblas.core.journal import Journal
from outblas.core.problem import Problem
from outblas.kernels.catalogue import candidates
from outblas.records.captured_products import CapturedProduct, CapturedProducts
from outblas.records.contribution import (
    MANIFEST,
    Contribution,
    contribution_faults,
    load_contribution,
    save_contribution,
)
from outblas.records.library import Library
from outblas.records.library_row import LibraryChoice, LibraryInterval, LibraryRow
from outblas.records.store import Store
from outblas.records.user_library import EqualKernels
from outblas_lab.custom.examples.example_kernels import example
from outblas_lab.jail.evaluation_file import Recorder
from outblas_lab.jail.evaluation_file import load as load_evaluations
from outblas_lab.recordings.recording_files import BASELINES, read_table, write_table
from outblas_lab.train.policy import Policy
from support.gpus.known import H200
from support.helpers import ROOT, failed_evaluation, passed_evaluation, random_policy

DATA = ROOT / "src" / "outblas" / "data"
#: Damaged files of each kind.
TRIES = 60


#: JSON values that replace others.
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 2**200, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "\0", "1e5", " " * 5000,
    [], [1], [[]], {}, {"a": 1},
]  # fmt: skip
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a JSON value."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from _places(one, (*place, key))


def _with_odd_value(draw: random.Random, text: bytes) -> bytes:
    """Return JSON with an odd value in place of one of its values, or without it."""
    data = {"": json.loads(text)}
    *above, last = "", *draw.choice(list(_places(data[""])))
    inner: Any = data
    for key in above:
        inner = inner[key]
    if isinstance(inner, dict) and above and draw.random() < 0.1:
        del inner[last]
    else:
        inner[last] = draw.choice(ODD_VALUES)
    return json.dumps(data[""]).encode()


def _with_odd_line(draw: random.Random, text: bytes) -> bytes:
    lines = text.splitlines()
    at = draw.randrange(len(lines))
    lines[at] = _with_odd_value(draw, lines[at])
    return b"\n".join(lines) + b"\n"


def _with_odd_bytes(draw: random.Random, data: bytes) -> bytes:
    """Return a file that is cut, or has bytes that are changed, added or removed."""
    found, at = bytearray(data), draw.randrange(len(data))
    how = draw.randrange(4)
    if how == 0:
        return data[:at]
    if how == 1:
        for _ in range(draw.choice([1, 3, 20])):
            found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    elif how == 2:
        found[at:at] = draw.randbytes(draw.randrange(1, 40))
    else:
        del found[at : at + draw.randrange(1, 400)]
    return bytes(found)


def _packed(members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return sink.getvalue()


def _unpacked(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def _packed_otherwise(draw: random.Random, data: bytes) -> bytes:
    """Return an archive with another method of packing, damaged within or behind its first bytes."""
    packed = _packed(_unpacked(data), draw.choice(METHODS))
    return _with_odd_bytes(draw, packed) if draw.random() < 0.5 else packed[:30] + _with_odd_bytes(draw, packed[30:])


def _with_odd_member(draw: random.Random, data: bytes) -> bytes:
    """Return a contribution with an odd value, and with the hash of the changed member."""
    members = _unpacked(data)
    name = draw.choice([*members])
    members[name] = _with_odd_value(draw, members[name])
    if name != MANIFEST:
        manifest = json.loads(members[MANIFEST])
        manifest["sha256"][name] = hashlib.sha256(members[name]).hexdigest()
        members[MANIFEST] = json.dumps(manifest).encode()
    return _packed(members)


def _checked(path: Path) -> None:
    contribution_faults(load_contribution(path))


def _all_of_store(path: Path) -> None:
    with Store(path) as store:
        for run in store.runs():
            list(store.evaluations(run.run_id))


def _small_library() -> Library:
    problem = Problem(64, 4096, 4096)
    config = candidates(problem, H200)[0]
    row = LibraryRow(problem, "lt_auto", source="cuda:0", plain=LibraryChoice(config, 1.2, 1.1, 1.3))
    return Library("h200", (row,), {"gpu": "NVIDIA H200"}, (LibraryInterval(row, 200, (64, 200)),))


def _journal(path: Path) -> None:
    Journal(path, {"seed": 0}).close()


def _library(path: Path) -> None:
    _small_library().save(path)


def _contribution(path: Path) -> None:
    about = {"gpu": "NVIDIA H200", "stamp": {"gpu": "NVIDIA H200", "outblas": "0"}}
    proofs = {"kernels": 1, "proved": {"64_4096_4096_TN_fp16_fp32": {}}}
    save_contribution(Contribution(_small_library(), packaged_records()["h200"], about, proofs), path)


def _captured(path: Path) -> None:
    CapturedProducts({CapturedProduct(64, 64, 64, "TN", "fp16", "cuda:0", "mm"): 3}, ({"command": "x"},)).save(path)


def _evaluations() -> list[Evaluation]:
    problem, kernel = Problem(64, 64, 64), example("naive")
    return [replace(passed_evaluation(problem, kernel), log="x"), failed_evaluation(problem, kernel)]


def _recorded(path: Path) -> None:
    with Recorder(path, H200, {"gpu": "NVIDIA H200"}) as recorder:
        for one in _evaluations():
            recorder.append(one)


def _stored(path: Path) -> None:
    with Store(path) as store:
        store.begin("r", {"seed": 0})
        for one in _evaluations():
            store.append("r", one)


def _journalled(path: Path) -> None:
    journal = Journal(path, {"seed": 0})
    journal.append({"piece": [1, "x"]})
    journal.close()


def _baselines(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    columns = [pa.array([value] * 9) for value in (0, "torch", 1.0, 0.1, "")]
    write_table(path, BASELINES, columns, {"suite": "s"})


def _copied(name: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes((DATA / name).read_bytes())


#: Kind of file -> its name, what writes a whole one, what reads it, and what damages its content.
FILES: dict[str, tuple[str, Callable[[Path], Any], Callable[[Path], Any], Callable[[random.Random, bytes], bytes]]] = {
    "GPU record": ("outblas/gpus/h200.json", _copied("gpus/h200.json"), lambda _: user_records(), _with_odd_value),
    "library": ("l.json", _library, Library.load, _with_odd_value),
    "member of a contribution": ("c.zip", _contribution, _checked, _with_odd_member),
    "packing of a contribution": ("c.zip", _contribution, _checked, _packed_otherwise),
    "captured products": ("p.json", _captured, CapturedProducts.load, _with_odd_value),
    "evaluations": ("e.jsonl", _recorded, load_evaluations, _with_odd_line),
    "journal": ("j.jsonl", _journalled, _journal, _with_odd_line),
    "store": ("s.sqlite", _stored, _all_of_store, _with_odd_bytes),
    "table": ("x_baselines.parquet", _baselines, lambda path: read_table(path, BASELINES), _with_odd_bytes),
    "equal kernels": ("equal.json", _copied("equal_kernels.json"), EqualKernels.load, _with_odd_value),
    "policy": ("p.npz", lambda path: random_policy().save(path), Policy.load, _packed_otherwise),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_whole_or_an_error_of_the_house(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    name, write, read, damage = FILES[kind]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    read(path)
    whole, draw, refused = path.read_bytes(), random.Random(1), 0
    for number in range(TRIES):
        path.write_bytes(damaged := (_with_odd_bytes if number % 3 == 0 else damage)(draw, whole))
        try:
            read(path)
        except OutblasError as error:
            refused += "\n" not in str(error)
            continue
        except Exception as error:
            pytest.fail(f"damage {number} of {kind}: {error!r}, {damaged[:200]!r}")
    assert refused > TRIES // 4


@pytest.mark.parametrize("part", ["rows", "intervals"])
@pytest.mark.parametrize("value", ["1e5", True, 2**200, 10**400, float("nan"), float("inf"), 0, 1e6, [1.0]], ids=str)
def test_a_figure_of_a_library_is_a_number_of_its_own_type(part: str, value: Any, tmp_path: Path) -> None:
    data = json.loads(_small_library().to_bytes())
    fields = {"rows": ("speedup", "low", "high"), "intervals": ("speedup", "low", "high", "first", "last")}[part]
    for field in fields:
        changed = json.loads(json.dumps(data))
        changed[part][0][field] = value
        (tmp_path / "l.json").write_text(json.dumps(changed))
        with pytest.raises(RecordError, match="cannot be used"):
            Library.load(tmp_path / "l.json")
