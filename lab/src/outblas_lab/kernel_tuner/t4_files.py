"""A task (problem, launch option) in Kernel Tuner's two formats: T4 results, and the cache file of its simulation mode.

Both formats are those of Kernel Tuner 1.5. T4 follows ``schema/T4/1.0.0/results-schema.json`` and
``file_utils.get_t4_results``; the cache follows ``util.process_cache``. T4 has no field for problem, GPU, baselines and
provenance. They stand under the key ``outblas`` of its metadata, and in a cache's header. A file that Kernel Tuner
wrote lacks them; a caller may pass them. Times in the files are milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outblas.core.config import LAUNCHES, KernelConfig, Launch, config_name, launch_of
from outblas.core.errors import OutblasError, RecordError, UsageError
from outblas.core.evaluation import Evaluation, Status, Timing, Verdict
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas_lab.kernel_tuner.knob_space import PARAMETERS, config_at, point, tunable
from outblas_lab.recordings.recording import STATUSES, Recording

T4_VERSION = "1.0.0"
#: Status -> T4's ``invalidity`` and Kernel Tuner's error in a cache. Kernel Tuner has no error of its own for wrong
#: numbers in a cache; there they are failures at run time.
_ERRORS = {
    Status.ILLEGAL: ("constraints", "InvalidConfig"),
    Status.COMPILE_ERROR: ("compile", "CompilationFailedConfig"),
    Status.STATIC_REJECTED: ("compile", "CompilationFailedConfig"),
    Status.EXITED: ("runtime", "RuntimeFailedConfig"),
    Status.HANG: ("timeout", "RuntimeFailedConfig"),
    Status.FAULT: ("runtime", "RuntimeFailedConfig"),
    Status.LAUNCH_ERROR: ("runtime", "RuntimeFailedConfig"),
    Status.MEMORY_VIOLATION: ("correctness", "RuntimeFailedConfig"),
    Status.WRONG: ("correctness", "RuntimeFailedConfig"),
    Status.NOT_REPEATABLE: ("correctness", "RuntimeFailedConfig"),
    Status.RULE_BROKEN: ("correctness", "RuntimeFailedConfig"),
}
#: Error of either format -> status, where the file does not say which.
_STATUS = {
    "correct": Status.PASSED,
    "constraints": Status.ILLEGAL,
    "compile": Status.COMPILE_ERROR,
    "runtime": Status.LAUNCH_ERROR,
    "timeout": Status.HANG,
    "correctness": Status.WRONG,
    "InvalidConfig": Status.ILLEGAL,
    "CompilationFailedConfig": Status.COMPILE_ERROR,
    "RuntimeFailedConfig": Status.LAUNCH_ERROR,
    "ErrorConfig": Status.LAUNCH_ERROR,
}
#: Kernel Tuner adds these up per config, milliseconds; a recording does not know them.
_UNKNOWN_TIMES = dict.fromkeys(
    ("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"), 0
)


@dataclass(frozen=True)
class T4Entry:
    """The measurement of one config. The figures exist only if it passed.

    Attributes:
        median_us: GPU time per call, microseconds; None without a measurement.
        spread: (p75 - p25) / median; None without a measurement or if unknown.
        rounds: interleaved rounds of the median; 0 if unknown.
    """

    status: Status
    median_us: float | None = None
    spread: float | None = None
    rounds: int = 0


@dataclass(frozen=True)
class T4Task:
    """The measured configs of one problem.

    Attributes:
        cells: config -> measurement, in catalogue order; from a file, in its order.
        gpu: name of the GPU; empty if unknown.
        baselines_us: name -> microseconds; empty if unknown.
        provenance: provenance of the recording; empty if unknown.
    """

    problem: Problem
    cells: dict[KernelConfig, T4Entry]
    gpu: str = ""
    baselines_us: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def launch(self) -> Launch:
        """The launch option that allows all of the configs."""
        return max((launch_of(config) for config in self.cells), key=LAUNCHES.index)

    def best(self) -> tuple[KernelConfig, float] | None:
        """Return the fastest config that passed and its microseconds; None if none passed. The first one wins a tie."""
        timed = [(c, cell.median_us) for c, cell in self.cells.items() if cell.median_us is not None]
        return min(timed, key=lambda one: one[1]) if timed else None

    def evaluations(self) -> list[Evaluation]:
        """Return evaluations of all configs, in the order of the cells, without a speed-up.

        Neither format has paired samples, so ``speedup`` is None. An unknown spread counts as 0. A failed one has the
        detail ``imported``, and ``timing`` None.
        """
        found = []
        for config, cell in self.cells.items():
            timing = None if cell.median_us is None else Timing("offline", (), cell.median_us, cell.spread or 0.0)
            detail, verdict = "imported" if timing is None else "", Verdict(cell.status)
            baselines = dict(self.baselines_us)
            found.append(Evaluation(self.problem, config, cell.status, detail, verdict, timing, baselines))
        return found


def task_of(recording: Recording, problem: Problem, launch: Launch) -> T4Task:
    """Return the recorded cells of a problem whose configs need exactly one launch option, passed or failed.

    Args:
        launch: ``plain``, ``pdl`` or ``weights``. ``pdl`` does not include the configs of ``plain``.

    Raises:
        UsageError: the problem was not recorded, or no such config was.
    """
    row = recording.row(problem)
    cells: dict[KernelConfig, T4Entry] = {}
    for column in np.flatnonzero(recording.recorded_mask(problem)):
        config, status = recording.catalogue[column], STATUSES[recording.status[row, column]]
        if launch_of(config) != launch:
            continue
        figures = (recording.median_us, recording.spread)
        median, spread = (float(a[row, column]) for a in figures) if status is Status.PASSED else (None, None)
        cells[config] = T4Entry(status, median, spread, int(recording.rounds[row, column]))
    if not cells:
        raise UsageError(
            f"launch option {launch} was not recorded on {problem.key}", " or ".join(LAUNCHES), "use another option"
        )
    gpu = str(recording.provenance.get("gpu", ""))
    return T4Task(problem, cells, gpu, recording.baselines_of(problem), dict(recording.provenance))


def to_t4(task: T4Task) -> dict[str, Any]:
    """Return a task as the content of a T4 results file, a dictionary of JSON values.

    Its keys are ``results``, ``schema_version`` (``"1.0.0"``) and ``metadata``. A result has ``configuration``,
    ``objectives``, ``times``, ``invalidity``, ``correctness`` and ``measurements``; times are milliseconds.
    """
    results = []
    for config, cell in task.cells.items():
        invalidity = "correct" if cell.status is Status.PASSED else _ERRORS[cell.status][0]
        results.append(
            {
                "configuration": dict(zip(PARAMETERS, point(config), strict=True)),
                "objectives": ["time"],
                "times": {"runtimes": []},
                "invalidity": invalidity,
                "correctness": int(invalidity != "correctness"),
                "measurements": [
                    {"name": name, "value": value, "unit": "ms" if name == "time" else ""}
                    for name, value in _figures(cell).items()
                ],
            }
        )
    metadata = {"timeunit": "milliseconds", "outblas": _about(task)}
    return {"results": results, "schema_version": T4_VERSION, "metadata": metadata}


def to_cache(task: T4Task) -> str:
    """Return a task as the text of a cache file, for ``kernel_tuner.tune_cache`` and ``simulation_mode=True``.

    The text is JSON; times are milliseconds. The product of all values of all knobs is far too large to be filtered. So
    Kernel Tuner needs :func:`outblas_lab.kernel_tuner.knob_space.restriction` with it.
    """
    configs = list(task.cells)
    cache: dict[str, Any] = {}
    for config, cell in task.cells.items():
        values = point(config)
        error = {} if cell.status is Status.PASSED else {"__error__": _ERRORS[cell.status][1]}
        knobs = dict(zip(PARAMETERS, values, strict=True))
        cache[",".join(map(str, values))] = {**knobs, **_figures(cell), **error, **_UNKNOWN_TIMES}
    problem = task.problem
    header = {
        "device_name": task.gpu,
        "kernel_name": f"gemm_{problem.layout}_{problem.dtype}_{problem.acc}",
        "problem_size": [problem.m, problem.n, problem.k],
        "outblas": _about(task),
        "tune_params_keys": list(PARAMETERS),
        "tune_params": tunable(configs),
        "objective": ["time"],
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in cache.items())
    # Kernel Tuner appends to the text: the cache is last, and exactly these characters end it.
    return json.dumps(header, indent=0)[:-2] + ',\n"cache": {\n' + lines + "}\n}"


def read_task(path: Path, problem: Problem | None = None) -> T4Task:
    """Read a T4 results file or a cache, of OutBLAS or of Kernel Tuner. A file with the key ``cache`` is a cache.

    Args:
        path: path of the file. A cache that a killed Kernel Tuner left open can be read.
        problem: the measured problem, if the file does not name it (T4 files of Kernel Tuner).

    Raises:
        RecordError: the file is missing, truncated, of neither format, without results, or holds impossible values.
        ConfigError: a configuration belongs to no kernel family.
        UsageError: the file does not name its problem and none was given, or it names another one.
    """
    try:
        data = json.loads(_closed(read_plain_file(path).decode()))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path} cannot be read ({error})", "JSON from Kernel Tuner", "export it again") from error
    try:
        return _from_cache(data, problem) if "cache" in data else _from_t4(data, problem)
    except OutblasError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise RecordError(
            f"{path} is not a T4 results file or cache ({type(error).__name__}: {error})",
            f"a file written by Kernel Tuner 1.5 (T4 {T4_VERSION})",
            "export it again",
        ) from error


def _from_t4(data: Mapping[str, Any], problem: Problem | None) -> T4Task:
    version = str(data["schema_version"])
    if version.partition(".")[0] != T4_VERSION.partition(".")[0]:
        raise RecordError(f"T4 version {version} is not supported", T4_VERSION, "use a newer release")
    metadata = data.get("metadata", {})
    unit = metadata.get("timeunit", "milliseconds")
    if unit != "milliseconds":
        raise RecordError(f"the times are in {unit}", "milliseconds", "convert them")
    pairs = []
    for result in data["results"]:
        measured = {one["name"]: one["value"] for one in result["measurements"]}
        pairs.append((config_at(result["configuration"]), _cell(result["invalidity"], measured)))
    return _task(pairs, metadata.get("outblas", {}), None, "", problem)


def _from_cache(data: Mapping[str, Any], problem: Problem | None) -> T4Task:
    names: Sequence[str] = data["tune_params_keys"]
    pairs = []
    for entry in data["cache"].values():
        # Older caches have the error in place of the time.
        error = next((v for v in entry.values() if isinstance(v, str) and v.endswith("Config")), "correct")
        pairs.append((config_at({name: entry[name] for name in names}), _cell(error, entry)))
    kind = str(data["kernel_name"]).split("_")
    named = None
    if kind[0] == "gemm" and len(kind) == 4:
        named = Problem.from_key("_".join((*map(str, data["problem_size"]), *kind[1:])))
    return _task(pairs, data.get("outblas", {}), named, str(data["device_name"]), problem)


def _task(
    pairs: Iterable[tuple[KernelConfig, T4Entry]],
    about: Mapping[str, Any],
    named: Problem | None,
    gpu: str,
    given: Problem | None,
) -> T4Task:
    """Puts together what the file says, what its header says, and what the caller says."""
    if "problem" in about:
        named = Problem.from_key(about["problem"])
    if named is not None and given is not None and named != given:
        do = "pass the file's problem, or none"
        raise UsageError(f"the file is for {named.key}", f"{given.key}, as passed", do)
    problem = named or given
    if problem is None:
        raise UsageError("the file does not name its problem", "its M, N and K", "pass them, e.g. --mnk 64_4096_64")
    cells: dict[KernelConfig, T4Entry] = {}
    for config, cell in pairs:  # a strategy asks for some configs again and again
        if cells.setdefault(config, cell) != cell:
            raise RecordError(
                f"{config_name(config)} occurs twice with different figures",
                "one measurement per config",
                "correct the file",
            )
    if not cells:
        raise RecordError("the file has no results", "one or more results", "export it again")
    baselines = {str(name): _microseconds(ms) for name, ms in about.get("baselines_ms", {}).items()}
    return T4Task(problem, cells, str(about.get("gpu", gpu)), baselines, dict(about.get("provenance", {})))


def _about(task: T4Task) -> dict[str, Any]:
    baselines = {name: us / 1000 for name, us in task.baselines_us.items()}
    return {
        "problem": task.problem.key,
        "launch": task.launch,
        "gpu": task.gpu,
        "baselines_ms": baselines,
        "provenance": task.provenance,
    }


def _figures(cell: T4Entry) -> dict[str, Any]:
    """Return the measurement under the names of both formats; the time is in milliseconds."""
    figures: dict[str, Any] = {"status": cell.status.value}
    if cell.median_us is not None:
        figures["time"] = cell.median_us / 1000
    if cell.spread is not None:
        figures["spread"] = cell.spread
    return {**figures, "rounds": cell.rounds}


def _cell(error: str, measured: Mapping[str, Any]) -> T4Entry:
    """Inverse of :func:`_figures`; ``error`` decides where the status is not written."""
    status = Status(measured["status"]) if "status" in measured else _STATUS[error]
    if (status is Status.PASSED) != (_STATUS[error] is Status.PASSED) or status is Status.LEFT_OUT:
        raise RecordError(f"a result has status {status} and error {error}", "a consistent pair", "correct the file")
    rounds = measured.get("rounds", 0)
    if type(rounds) is not int or rounds < 0:
        raise RecordError(f"a result has {rounds!r} rounds", "an integer of 0 or more", "correct the file")
    if status is not Status.PASSED:
        return T4Entry(status, rounds=rounds)
    spread = measured.get("spread")
    if spread is not None and not (math.isfinite(spread) and spread >= 0):
        raise RecordError(f"a result has spread {spread!r}", "0 or more", "correct the file")
    return T4Entry(status, _microseconds(measured["time"]), None if spread is None else float(spread), rounds)


def _microseconds(ms: Any) -> float:
    """Microseconds as recordings hold them, in single precision, so that a time comes back as it went."""
    us = math.nan if isinstance(ms, bool) or not isinstance(ms, int | float) else float(np.float32(ms * 1000))
    if not (math.isfinite(us) and us > 0):
        raise RecordError(f"a time is {ms!r} ms", "a number above 0", "correct the file")
    return us


def _closed(text: str) -> str:
    """The text of a cache as Kernel Tuner leaves it when it is killed: with a comma in place of its last two braces."""
    text = text.strip()
    return text[:-1] + "}\n}" if text.endswith(",") else text
