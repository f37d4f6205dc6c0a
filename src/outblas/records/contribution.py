"""Contributions: one file with a tuned library, the GPU's record, the provenance and a summary of the proofs.

The file is a ZIP archive of four JSON members and a manifest with their hashes. A reader reads members in memory, up to
a limit, and never writes one to disk. So a hostile file can neither leave its folder nor fill the disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import RecordError
from outblas.core.evaluation import Evaluation, Status
from outblas.core.files import json_text, write_atomic
from outblas.core.gpu_records import GpuRecord, record_from_json
from outblas.core.plain_files import ZIP_ERRORS, open_zip, read_plain_file
from outblas.core.problem import Problem
from outblas.kernels.legality import why_illegal
from outblas.records.library import Library, parse_library
from outblas.records.library_row import LibraryRow
from outblas.records.user_library import stamp_differences, stamp_of

FORMAT = 1
MANIFEST = "manifest.json"
#: Member -> most bytes when unpacked.
MEMBERS = {"library.json": 32 << 20, "gpu.json": 64 << 10, "provenance.json": 1 << 20, "proofs.json": 8 << 20}
#: Most bytes of the file, and of its manifest when unpacked.
MOST_BYTES, MANIFEST_BYTES = 16 << 20, 64 << 10
#: The date of every member, so that equal contents give equal files.
_DATE = (2000, 1, 1, 0, 0, 0)
#: A speed-up beyond these is no measurement.
_LEAST_SPEEDUP, _MOST_SPEEDUP = 0.5, 100.0


@dataclass(frozen=True)
class Contribution:
    """The content of a contribution.

    Attributes:
        provenance: of the figures, with their ``stamp``.
        proofs: proof summary, see :func:`proof_summary`.
    """

    library: Library
    record: GpuRecord
    provenance: Mapping[str, Any]
    proofs: Mapping[str, Any]


def proof_summary(library: Library, evaluations: Iterable[Evaluation]) -> dict[str, Any]:
    """Return which installed kernels have a recorded proof.

    Returns:
        ``kernels`` (number of installed (problem, kernel) pairs) and ``proved``: problem key -> kernel name -> names of
            the passed gates. A kernel without a recorded proof is missing. An interval's kernels count at each M at
            which they were measured.
    """
    wanted: dict[Problem, set[KernelConfig]] = {}
    for row, problems in _proved_rows(library):
        for problem in problems:
            wanted.setdefault(problem, set()).update(c.config for c in (row.plain, row.pdl, row.weights) if c)
    proved: dict[str, dict[str, list[str]]] = {}
    for e in evaluations:
        if e.status is not Status.PASSED or e.verdict is None or not isinstance(e.config, KernelConfig):
            continue
        if e.config in wanted.get(e.problem, ()):
            proved.setdefault(e.problem.key, {})[config_name(e.config)] = list(e.verdict.gates)
    return {"kernels": sum(map(len, wanted.values())), "proved": proved}


def _proved_rows(library: Library) -> Iterator[tuple[LibraryRow, list[Problem]]]:
    """Yield each row with the problems on which its kernels need a proof; for an interval, its measured M."""
    for row in library.rows:
        yield row, [row.problem]
    for one in library.intervals:
        yield one.row, [one.weight.problem(m) for m in one.measured]


def save_contribution(found: Contribution, path: Path) -> Path:
    """Write a contribution as one file; return ``path``. Equal contents give equal bytes.

    Raises:
        RecordError: the disk refuses.
    """
    members = {
        "library.json": found.library.to_bytes(),
        "gpu.json": json_text(found.record.to_json()),
        "provenance.json": json_text(dict(found.provenance)),
        "proofs.json": json_text(dict(found.proofs)),
    }
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    members = {MANIFEST: json_text({"format": FORMAT, "sha256": hashes}), **members}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(zipfile.ZipInfo(name, _DATE), data, zipfile.ZIP_DEFLATED)
    return write_atomic(path, packed.getvalue())


def load_contribution(path: Path) -> Contribution:
    """Read a contribution; nothing is unpacked to disk.

    Raises:
        RecordError: the file is missing, too large or damaged, has other members, or a member is too large, changed or
            invalid.
        ToolchainMissing: pydantic is not installed.
    """
    members = _members(path)
    manifest = _json(path, MANIFEST, members.pop(MANIFEST))
    hashes = manifest.get("sha256")
    if manifest.get("format") != FORMAT or not isinstance(hashes, dict):
        raise _refused(path, f"has format {manifest.get('format')!r}")
    for name, data in members.items():
        if hashes.get(name) != hashlib.sha256(data).hexdigest():
            raise _refused(path, f"has a modified member {name}")
    library = parse_library(_text(path, "library.json", members["library.json"]), f"library.json of {path}")
    record = record_from_json(_json(path, "gpu.json", members["gpu.json"]), f"gpu.json of {path}", "contributed")
    provenance, proofs = (_json(path, name, members[name]) for name in ("provenance.json", "proofs.json"))
    return Contribution(library, record, provenance, proofs)


def contribution_faults(found: Contribution) -> list[str]:
    """Return the faults of a contribution, one line each; empty if its content is consistent.

    Kernels are not run here. The rows are a proposal: a judging run on such a GPU decides.
    """
    gpu, faults = found.record.gpu, []
    if found.library.is_empty:
        faults.append("the library has no rows")
    if found.library.gpu != gpu.name:
        faults.append(f"the library is for {found.library.gpu}, the record for {gpu.name}")
    product = str(found.provenance.get("gpu", ""))
    if not found.record.names_product(product):
        faults.append(f"the provenance names GPU {product!r}, which the record does not cover")
    stamp = found.provenance.get("stamp")
    if not isinstance(stamp, dict):
        faults.append("the provenance lacks the driver, toolchain and kernel versions")
    else:
        here = stamp_of({"gpu": stamp.get("gpu"), "toolchain": {"outblas": stamp.get("outblas")}})
        here |= {key: stamp.get(key) for key in ("driver", "nvrtc")}
        faults += [f"made with other kernels: {line}" for line in stamp_differences(stamp, here)]
    return faults + _row_faults(found)


def _row_faults(found: Contribution) -> list[str]:
    """Return the faults of single rows: figures out of range, illegal kernels, replayed times, missing proofs."""
    faults: list[str] = []
    proved = found.proofs.get("proved")
    known = proved if isinstance(proved, dict) else {}
    for row, problems in _proved_rows(found.library):
        if row.source.startswith("replay:"):
            faults.append(f"{row.problem.key}: times come from recording {row.source}")
        for choice in {c.config: c for c in (row.plain, row.pdl, row.weights) if c is not None}.values():
            name = config_name(choice.config)
            if not _LEAST_SPEEDUP <= choice.low <= choice.speedup <= choice.high <= _MOST_SPEEDUP:
                figures = f"{choice.low} to {choice.high} around {choice.speedup}"
                faults.append(f"{row.problem.key}: {name} has an impossible speedup, {figures}")
            for problem in problems:
                if reason := why_illegal(problem, choice.config, found.record.gpu):
                    faults.append(f"{problem.key}: {name} is illegal on {found.record.gpu.name}: {reason}")
                kernels = known.get(problem.key)
        if not (isinstance(kernels, dict) and kernels.get(name)):
            faults.append(f"{problem.key}: {name} has no recorded proof")
    return faults


def _members(path: Path) -> dict[str, bytes]:
    """Return name -> content of the members, all in memory and within their limits."""
    limits = {MANIFEST: MANIFEST_BYTES, **MEMBERS}
    try:
        data = read_plain_file(path, MOST_BYTES + 1)
    except OSError as error:
        raise _refused(path, f"cannot be read ({error.strerror or error})") from error
    try:
        if len(data) > MOST_BYTES:
            raise _refused(path, f"exceeds {MOST_BYTES} bytes")
        with open_zip(data) as file:
            names = [info.filename for info in file.infolist()]
            if sorted(names) != sorted(limits):
                shown = ", ".join(ascii(name)[:60] for name in names[:8])
                raise _refused(path, f"has the members {shown or 'none'}")
            found = {}
            for info in file.infolist():
                with file.open(info) as member:  # the sizes in the archive may lie
                    found[info.filename] = member.read(limits[info.filename] + 1)
                if len(found[info.filename]) > limits[info.filename]:
                    raise _refused(path, f"has a member {info.filename} of more than {limits[info.filename]} bytes")
            return found
    except ZIP_ERRORS as error:
        if isinstance(error, RecordError):
            raise
        raise _refused(path, f"is damaged ({str(error)[:120]})") from error


def _text(path: Path, name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _refused(path, f"has a member {name} that is not valid UTF-8") from error


def _json(path: Path, name: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(_text(path, name, data))
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecordError):
            raise
        raise _refused(path, f"has a member {name} that is not valid JSON") from error
    if not isinstance(found, dict):
        raise _refused(path, f"has a member {name} that is not a JSON object")
    return found


def _refused(path: Path, wrong: str) -> RecordError:
    return RecordError(f"contribution {path} {wrong}", "a file from `outblas contribute`", "create the file again")
