"""The directory of a tune run: its name, its files, and what a finished or killed run has left in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outblas.core.errors import RecordError
from outblas.core.files import json_text
from outblas.core.plain_files import read_json
from outblas.core.problem import Problem
from outblas.core.weight import WeightRange
from outblas.records.run_directory import RunDirectory
from outblas.records.store import Store
from outblas.records.user_library import stamp_differences, stamp_of

FORMAT = 1


@dataclass(frozen=True)
class RunFiles(RunDirectory):
    """Paths inside the directory of a tune run, as properties of ``RunFiles(path)``. No file is made or read.

    ``library`` is ``library.json``, ``result`` is ``result.parquet`` and ``times`` is ``times.json`` in it. Those of
    :class:`RunDirectory` are ``run`` (``run.json``), ``store`` (``store.sqlite``) and ``report`` (``report.html``).
    """

    @property
    def library(self) -> Path:
        return self.path / "library.json"

    @property
    def result(self) -> Path:
        return self.path / "result.parquet"

    @property
    def times(self) -> Path:
        return self.path / "times.json"


def folder_name(
    suite: str,
    problems: Sequence[Problem],
    agent: str,
    seed: int,
    budget: str,
    place: str,
    sample: int | None = None,
    ranges: Sequence[WeightRange] = (),
) -> str:
    """Return the name of a run's directory, which states its settings.

    Example: ``grid1000-sample40-tn-fp16-fp32-ppo-8-replay-h200``. A seed other than 0 adds ``seed<N>`` after the agent.
    Suite ``custom`` adds the ``M_N_K`` of a single problem, e.g. ``custom-64_4096_64-tn-fp16-fp32-ppo-8-cuda-0``. For
    several, it adds 8 hex digits of a hash instead. ``captured`` has a hash and no layout, dtype and accumulator.
    Ranges add ``m`` and their M, e.g. ``linear-4096_4096-m1-8192-tn-fp16-fp32-heuristic-16-cuda-0``, or ``m`` and a
    hash.

    Args:
        suite: as in :class:`TuneRequest`.
        problems: one or more, or none beside ranges; all of one layout, dtype and accumulator unless ``captured``.
        agent: name of the search agent.
        seed: seed of the agent and the sample.
        budget: the budget as the user wrote it; a comma becomes ``-``.
        place: the evaluator, e.g. ``replay:h200``; ``:`` and ``/`` become ``-``.
        sample: number of problems drawn from the suite, or None; unused for ``custom`` and ``captured``.
        ranges: weights that are tuned for a range of M; of a model all, also those of which nothing lacks.
    """
    if suite == "captured":
        kind: tuple[str, ...] = (*((_hash(problems),) if problems else ()), *_range_words(ranges))
    else:
        one = problems[0] if problems else ranges[0].problem(ranges[0].first)
        kind = (one.layout.lower(), one.dtype.lower(), one.acc.lower())
        if suite == "custom":
            kind = (one.mnk if len(problems) == 1 else _hash(problems), *kind)
        elif sample is not None:
            kind = (f"sample{sample}", *kind)
        elif suite == "linear" and len(ranges) == 1:
            kind = (f"{one.n}_{one.k}", f"m{ranges[0].first}-{ranges[0].last}", *kind)
        else:
            kind = (*_range_words(ranges), *kind)
    seeded = () if seed == 0 else (f"seed{seed}",)
    return "-".join((suite, *kind, agent, *seeded, budget.replace(",", "-"), place.replace(":", "-").replace("/", "-")))


def other_conditions(about: Mapping[str, Any], stamp: Mapping[str, Any]) -> list[str]:
    """Return how the conditions of a run differ from the present ones, a text each; an empty list if they agree.

    They are what an installed library is stamped with: GPU, driver, NVRTC, release and kernels. An earlier release did
    not write all of them; the others count as equal.

    Args:
        about: content of ``run.json``.
        stamp: the present conditions, as of :func:`outblas.records.user_library.stamp_of`.

    Raises:
        RecordError: the table of equal kernels is damaged.
    """
    there = about.get("stamp")
    if not isinstance(there, dict):
        found = {key: value for key, value in stamp_of(about.get("provenance") or {}).items() if value is not None}
        release = about.get("outblas", stamp["outblas"])
        kernels = stamp["kernels"] if release == stamp["outblas"] else None
        there = {**stamp, **found, "outblas": release, "kernels": kernels}
    return stamp_differences(there, stamp)


def folder_beside(path: Path, stamp: Mapping[str, Any]) -> Path:
    """Return the folder for a run of other conditions than those in ``path``, e.g. ``runs/a-1b2c3d4e``.

    Args:
        path: folder of the run that is there.
        stamp: the present conditions, which give the name its end.
    """
    return path.with_name(f"{path.name}-{hashlib.sha256(json_text(dict(stamp))).hexdigest()[:8]}")


def run_name(store: Store, path: Path) -> str:
    """Return the name of a folder's run in its store: the folder's, or that of the only run if it was renamed.

    Args:
        store: the store of the folder.
        path: the folder. Its name is that of a new run.
    """
    runs, name = [run.run_id for run in store.runs()], path.resolve().name
    return runs[0] if name not in runs and len(runs) == 1 else name


@contextmanager
def open_store(path: Path) -> Iterator[tuple[Store, str]]:
    """Open the store of a run directory; it is closed at the end of the context.

    Args:
        path: the directory.

    Yields:
        (store, name of the run in it). The name is the directory's, or that of the only run if the directory was
        renamed.

    Raises:
        RecordError: there is no store, it cannot be read, or it has several runs of other names.
    """
    file = RunFiles(path).store
    if not file.is_file():
        raise RecordError(f"{path} holds no {file.name}", "the directory of an `outblas tune` run", "pass another path")
    with Store(file) as store:
        runs, name = [run.run_id for run in store.runs()], run_name(store, path)
        if name not in runs:
            do = "give the directory the name of one"
            raise RecordError(f"{file} has {len(runs)} runs, none of them {name!r}", "a run of that name", do)
        yield store, name


def provenance_of(path: Path) -> dict[str, Any]:
    """Return the provenance of a finished run's figures, from its ``run.json``.

    Its keys are ``gpu``, ``driver``, ``toolchain``, ``date``, ``commit`` and ``command``.

    Args:
        path: directory of the run.

    Raises:
        RecordError: ``run.json`` is missing, cannot be read or is of another format, or the run is not finished.
    """
    found = read_run(RunFiles(path).run).get("provenance")
    if not isinstance(found, dict):
        raise RecordError(f"the run in {path} is not finished", "a run that ended", "repeat its command: it resumes")
    return dict(found)


def measured_on(path: Path) -> list[str] | None:
    """Return the names of the GPUs that measured a finished run, e.g. ``["NVIDIA H200"]``; None if they are not known.

    They are not known if ``run.json`` is missing, or the run is not finished.

    Args:
        path: directory of the run.

    Raises:
        RecordError: ``run.json`` cannot be read or is of another format.
    """
    files = RunFiles(path)
    origin = read_run(files.run).get("provenance") if files.run.exists() else None
    name = origin.get("gpu") if isinstance(origin, dict) else None
    return name.split("; ") if isinstance(name, str) and name != "unknown" else None


def read_run(path: Path) -> dict[str, Any]:
    """Return the content of a ``run.json``.

    Raises:
        RecordError: the file cannot be read, or is of another format.
    """
    try:
        data = read_json(path)
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{path} cannot be read ({error})", "a whole JSON file", "choose another --run, or restore the file"
        ) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordError(f"{path} is of another format", f"format {FORMAT}", "choose another --run")
    return data


def _hash(asked: Sequence[Problem | WeightRange]) -> str:
    """Eight hex digits for a list of problems or ranges."""
    return hashlib.sha256("".join(one.key for one in asked).encode()).hexdigest()[:8]


def _range_words(ranges: Sequence[WeightRange]) -> tuple[str, ...]:
    """Return the part of a folder's name that stands for ranges; empty without any."""
    return (f"m{_hash(ranges)}",) if ranges else ()
