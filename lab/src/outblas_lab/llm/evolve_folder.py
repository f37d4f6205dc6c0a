"""The folder of an evolution: its files, and the identity of its run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.files import write_json
from outblas.core.journal import check_same_settings
from outblas.core.plain_files import read_json, read_object
from outblas.core.problem import Problem
from outblas.core.version import __version__
from outblas.records.provenance import utc_now
from outblas.records.run_directory import RunDirectory

FORMAT, KIND = 1, "evolve"


@dataclass(frozen=True)
class EvolveFiles(RunDirectory):
    """Paths of an evolution's files; :class:`outblas.records.run_directory.RunDirectory` has the others.

    ``best`` is the folder ``best``, of the fastest kernels. ``transcript`` is ``transcript.jsonl``. The others are
    ``run`` (``run.json``), ``store`` (``store.sqlite``), ``recording`` (``recorded.jsonl``) and ``report``
    (``report.html``). Nothing is made or read. Example: ``EvolveFiles(Path("runs/a")).run`` is
    ``Path("runs/a/run.json")``.
    """

    @property
    def best(self) -> Path:
        return self.path / "best"

    @property
    def transcript(self) -> Path:
        return self.path / "transcript.jsonl"

    @property
    def recording(self) -> Path:
        """Path of ``recorded.jsonl``: recording of a run on a GPU, which another run can take as ``--device``."""
        return self.path / "recorded.jsonl"


def folder_name(problems: Sequence[Problem], model: str, place: str) -> str:
    """Return the name of a run's folder, which states its settings, in lower case.

    Characters except letters, digits, ``_``, ``.`` and ``-`` become ``-``, several in a row a single one. Example:
    ``evolve-512_512_512_tn_fp16_fp32-gpt-cuda-0`` for place ``cuda:0``.

    Args:
        problems: problems of the run, at least one. Three of them are named ``<key of the first>-and-2-more``.
        place: the evaluator. Of a text with a slash, such as ``runs/a.jsonl``, only the file's stem counts: ``a``.
    """
    first = problems[0].key if len(problems) == 1 else f"{problems[0].key}-and-{len(problems) - 1}-more"
    return re.sub(r"[^\w.-]+", "-", f"evolve-{first}-{model}-{Path(place).stem if '/' in place else place}").lower()


def open_folder(files: EvolveFiles, wanted: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Write run.json into a run's folder, or check that the one there has the same settings.

    Args:
        wanted: settings that must be the same, JSON values.
        more: further entries of a new run.json. An existing one is not changed, whatever they are.

    Returns:
        The content of run.json: ``format``, ``kind``, the settings, ``outblas`` (its version), the further entries and
        ``started``. Of an earlier run it is what the file holds.

    Raises:
        UsageError: the folder has a run with other settings.
        RecordError: run.json cannot be read or written, or is of another kind or format.
    """
    if files.run.exists():
        about = read_run(files.path)
        was, asked = _flat({key: about.get(key) for key in wanted}), _flat(wanted)
        what = f"{files.path} contains a run with other settings"
        do = "repeat those settings to resume it, or pass another --run"
        check_same_settings(what, was, asked, do)
        return about
    about = {"format": FORMAT, "kind": KIND, **wanted, "outblas": __version__, **more, "started": utc_now()}
    write_json(files.run, about)
    return about


def read_run(path: Path) -> dict[str, Any]:
    """Return the content of run.json in an evolution's folder.

    Raises:
        RecordError: it is missing, cannot be read, or is of another kind or format.
    """
    expected = f"a run of `outblas evolve` (kind {KIND}, format {FORMAT})"
    return read_object(EvolveFiles(path).run, expected, "pass another --run", kind=KIND, format=FORMAT)


def is_evolution(path: Path) -> bool:
    """Return whether a folder has a readable run.json of `outblas evolve`, of any format."""
    try:
        data = read_json(EvolveFiles(path).run)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND


def without_passwords(command: str) -> str:
    """Return a command line in which ``...`` replaces the part of each address before its ``@``.

    Example: ``http://me:secret@host/v1`` becomes ``http://...@host/v1``.
    """
    return re.sub(r"://[^/@\s]+@", "://...@", command)


def _flat(data: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """``{"shape": {"width": 1}}`` as ``{"shape.width": 1}``, so that what differs can be named."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{within}{key}.") if isinstance(value, Mapping) else {f"{within}{key}": value}
    return found
