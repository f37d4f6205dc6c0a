"""The file of a library: JSON with a list of rows, and a list of intervals if the library has any."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from outblas.core.config import KernelConfig, config_name
from outblas.core.errors import OutblasError, RecordError, ToolchainMissing
from outblas.core.problem import Problem
from outblas.core.weight import Weight
from outblas.core.workload import SECOND_WORKLOADS
from outblas.kernels.config_text import config_from_name
from outblas.records.library_row import IntervalIndex, LibraryChoice, LibraryInterval, LibraryRow, SecondWinner

if TYPE_CHECKING:
    from pydantic import BaseModel

FORMAT = 1
#: Speed-ups of this size or more are damage.
_MOST_FIGURE = 1e6


class LibraryContent(NamedTuple):
    """The content of a library's file.

    Attributes:
        intervals: intervals of M; those of a weight rise and do not overlap.
        gates: the same for kernels with a gate.
    """

    gpu: str
    rows: Sequence[LibraryRow]
    provenance: Mapping[str, Any]
    intervals: Sequence[LibraryInterval]
    gates: Sequence[LibraryInterval] = ()


def library_to_json(content: LibraryContent) -> dict[str, Any]:
    """Return the JSON of a library's file. The fields ``intervals`` and ``gates`` are absent if they are empty."""
    rows = [{"problem": row.problem.key, **_columns_to_json(row)} for row in content.rows]
    data = {"format": FORMAT, "gpu": content.gpu, "rows": rows, "provenance": dict(content.provenance)}
    lists = {"intervals": content.intervals, "gates": content.gates}
    return data | {name: list(map(_interval_to_json, found)) for name, found in lists.items() if found}


def _interval_to_json(interval: LibraryInterval) -> dict[str, Any]:
    data = {"weight": interval.weight.key, "first": interval.first, "last": interval.last}
    return {**data, "measured": list(interval.measured), **_columns_to_json(interval.row)}


def _columns_to_json(row: LibraryRow) -> dict[str, Any]:
    """Return a row without its problem: one set of columns per launch option; ``weights`` only if present.

    A second winner is an object under its workload's name, and absent without one; so is ``nearest``.
    """
    data: dict[str, Any] = {}
    choices = {"": row.plain, "_pdl": row.pdl, **({} if row.weights is None else {"_weights": row.weights})}
    for suffix, choice in choices.items():
        data[f"config{suffix}"] = None if choice is None else config_name(choice.config)
        for figure in ("speedup", "low", "high"):
            data[f"{figure}{suffix}"] = None if choice is None else getattr(choice, figure)
    data |= {"baseline": row.baseline, "baseline_detail": row.baseline_detail, "source": row.source}
    data |= {"lt_auto_detail": row.lt_auto_detail} if row.lt_auto_detail else {}
    if row.nearest is not None:
        data["nearest"] = _choice_to_json(row.nearest)
    seconds = {workload: getattr(row, workload) for workload in SECOND_WORKLOADS}
    return {**data, **{workload: _second_to_json(second) for workload, second in seconds.items() if second}}


def _second_to_json(second: SecondWinner) -> dict[str, Any]:
    return {**_choice_to_json(second), **({"algorithm": second.algorithm} if second.algorithm else {})}


def _choice_to_json(choice: LibraryChoice | SecondWinner) -> dict[str, Any]:
    config = None if choice.config is None else config_name(choice.config)
    return {"config": config, "speedup": choice.speedup, "low": choice.low, "high": choice.high}


def parse_content(text: str, where: str) -> LibraryContent:
    """Return the content of a library file's text; ``where`` names the file in errors.

    Raises:
        RecordError: the content is damaged, of another format, or has a problem twice. Or intervals overlap, are out of
            order, or have a kernel that was not measured at both ends.
        ToolchainMissing: pydantic is not installed.
    """
    try:
        import pydantic
    except ImportError as error:
        raise ToolchainMissing("pydantic is not installed", "the package pydantic", "pip install pydantic") from error
    wrong = f"library {where} cannot be used"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(wrong, "a complete JSON file", f"the file is damaged ({error}); create it again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise RecordError(
            f"library {where} has format {found!r}", f"format {FORMAT}", "use the release that wrote it, or tune again"
        )
    try:
        file: Any = _file_model().model_validate(data)
        configs: dict[str, KernelConfig] = {}
        rows = tuple(_row_from_file(Problem.from_key(row.problem), row, configs) for row in file.rows)
        intervals, gates = (
            tuple(_interval_from_file(one, configs) for one in found) for found in (file.intervals, file.gates)
        )
        for found in (intervals, gates):
            IntervalIndex(found)
    except (pydantic.ValidationError, OutblasError) as error:
        reason = str(error)
        if isinstance(error, pydantic.ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise RecordError(f"{wrong} ({reason})", f"a library of format {FORMAT}", "tune again") from error
    if len({row.problem for row in rows}) != len(rows):
        raise RecordError(f"{wrong} (a problem has two rows)", "one row per problem", "tune again")
    return LibraryContent(file.gpu, rows, file.provenance, intervals, gates)


def _interval_from_file(one: Any, configs: dict[str, KernelConfig]) -> LibraryInterval:
    """Return an interval of the file's model. Raises RecordError if an end of one with a kernel was not measured."""
    weight = Weight.from_key(one.weight)
    found = LibraryInterval(_row_from_file(weight.problem(one.first), one, configs), one.last, tuple(one.measured))
    weight.problem(one.last)
    if found.has_kernel and not {found.first, found.last} <= set(found.measured):
        wrong = f"the kernels of {found.words} for {weight.key} were not measured at both ends"
        raise RecordError(wrong, "both ends of the interval in the field 'measured'", "tune again")
    return found


def _row_from_file(problem: Problem, row: Any, configs: dict[str, KernelConfig]) -> LibraryRow:
    """Return a row of the file's model; ``configs`` caches parsed names. Raises RecordError for a kernel without
    figures.
    """

    def config_of(name: str) -> KernelConfig:
        if name not in configs:
            configs[name] = config_from_name(name)
        return configs[name]

    def choice(suffix: str) -> LibraryChoice | None:
        name = getattr(row, f"config{suffix}")
        if name is None:
            return None
        figures = [getattr(row, f"{figure}{suffix}") for figure in ("speedup", "low", "high")]
        if None in figures:
            wrong = f"{problem.key} has a kernel without results"
            raise RecordError(wrong, "the fields speedup, low and high", "tune again")
        return LibraryChoice(config_of(name), *figures)

    def second(found: Any) -> SecondWinner | None:
        if found is None:
            return None
        config = None if found.config is None else config_of(found.config)
        return SecondWinner(config, found.speedup, found.low, found.high, found.algorithm)

    near = row.nearest
    nearest = None if near is None else LibraryChoice(config_of(near.config), near.speedup, near.low, near.high)
    named = row.baseline, row.baseline_detail, row.source
    found = LibraryRow(problem, *named, choice(""), choice("_pdl"), row.lt_auto_detail, choice("_weights"))
    return replace(found, cold=second(row.cold), single=second(row.single), nearest=nearest)


@lru_cache(maxsize=1)
def _file_model() -> type[BaseModel]:
    """Return the pydantic schema of the file. Pydantic is imported only here and in :func:`parse_content`."""
    from pydantic import BaseModel, ConfigDict, Field, PositiveInt

    figure = Annotated[float, Field(gt=0, lt=_MOST_FIGURE)]

    class Strict(BaseModel):
        model_config = ConfigDict(strict=True, allow_inf_nan=False)

    class Figures(Strict):
        speedup: figure
        low: figure
        high: figure

    class Nearest(Figures):
        config: str

    class Second(Figures):
        config: str | None
        algorithm: str = ""

    class Columns(Strict):
        config: str | None
        speedup: figure | None
        low: figure | None
        high: figure | None
        config_pdl: str | None
        speedup_pdl: figure | None
        low_pdl: figure | None
        high_pdl: figure | None
        baseline: str
        baseline_detail: str
        source: str
        lt_auto_detail: str = ""
        config_weights: str | None = None
        speedup_weights: figure | None = None
        low_weights: figure | None = None
        high_weights: figure | None = None
        cold: Second | None = None
        single: Second | None = None
        nearest: Nearest | None = None

    class RowOfFile(Columns):
        problem: str

    class IntervalOfFile(Columns):
        weight: str
        first: PositiveInt
        last: PositiveInt
        measured: list[PositiveInt]

    class LibraryFile(Strict):
        format: int
        gpu: str
        rows: list[RowOfFile]
        provenance: dict[str, Any]
        intervals: list[IntervalOfFile] = []
        gates: list[IntervalOfFile] = []

    return LibraryFile
