"""Problems of ``outblas tune``: those that are named, weights for ranges of M, or a model in an inference engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outblas.cli import common
from outblas.cli.command_group import given_options
from outblas.cli.common import err
from outblas.core.errors import UsageError
from outblas.core.problem import Problem
from outblas.runtime.device import Device
from outblas.search.intervals.engine_model import check_engine

if TYPE_CHECKING:
    from outblas.search.intervals.range_search import RangesRequest
    from outblas.search.time_shares import TimeShare

#: Range of M of --linear.
WHOLE_RANGE = "1:8192"
_NOT_OF_A_MODEL = ("mnk", "captured", "linear", "m", "sample", "intervals", "layout", "acc")
#: Layout, dtype and accumulator.
Kind = tuple[str, str, str]


def check_sources(context: typer.Context) -> None:
    """Raise UsageError where `outblas tune` is given its problems in two ways, or an option that would be ignored."""
    given = context.params
    mnk, captured, sample, linear, model = (given[name] for name in ("mnk", "captured", "sample", "linear", "model"))
    if given_options(context, "suite") and (mnk or captured is not None or linear or model is not None):
        raise UsageError("--suite with --mnk, --captured, --linear or --model", "one of them", "leave one out")
    if linear and (mnk or captured is not None or sample is not None):
        raise UsageError("--linear with --mnk, --captured or --sample", "one of them", "leave one out")
    if given["m"] is not None and not linear and model is None:
        raise UsageError("--m without --linear", "a weight N_K", "e.g. --linear 4096_14336 --m 1:8192")
    if given["intervals"] is False and linear:
        raise UsageError("--points with --linear", "one of them", "name single problems by --mnk")
    if given["intervals"] and (mnk or sample is not None):
        raise UsageError("--intervals with --mnk or --sample", "a suite, --captured or --linear", "leave one out")
    if mnk and sample is not None:
        raise UsageError("--sample with --mnk", "one of them", "leave one out")
    if captured is not None and (mnk or sample is not None):
        raise UsageError("--captured with --mnk or --sample", "one of them", "leave one out")
    _check_model(context, model, given["engine"])


def named_problems(context: typer.Context, kind: Kind) -> tuple[str, list[Problem]]:
    """Return the name of what is tuned, and the problems that the command line or a suite names."""
    given = context.params
    if given["captured"] is not None or given["model"] is not None:
        return "model" if given["captured"] is None else "captured", []
    if given["mnk"]:
        return "custom", list(dict.fromkeys(Problem.from_mnk(one, *kind) for one in given["mnk"]))
    if given["linear"]:
        return "linear", []
    layout, dtype, acc = kind
    suite = given["suite"]
    return suite, common.suite_problems(suite, (layout,), dtype, acc, given["sample"], given["seed"])


def ranges_and_others(
    context: typer.Context, kind: Kind, problems: Sequence[Problem], ranked: list[TimeShare], where: Device
) -> tuple[RangesRequest, list[TimeShare]]:
    """Return the ranges to tune, and the captured problems that are tuned by themselves.

    Args:
        kind: layout, dtype and accumulator.
        problems: those of :func:`named_problems`.
        ranked: captured problems, the largest share of the time first.
        where: the GPU or the recording that measures.
    """
    from outblas.search.intervals.range_choice import RangesRequest, linear_ranges, ranges_of_suite, split_captured

    given = context.params
    if given["model"] is not None:
        dtype = kind[1] if given_options(context, "dtype") else None
        return _model_ranges(given["model"], given["tp"], dtype, where), []
    if ranked and given["intervals"] is not False:
        return split_captured(ranked)
    linear = linear_ranges(given["linear"] or (), given["m"] or WHOLE_RANGE, kind)
    if given["intervals"] and problems:
        return ranges_of_suite(given["suite"], problems), ranked
    return RangesRequest(linear), ranked


def _model_ranges(file: Path, tp: int, dtype: str | None, where: Device) -> RangesRequest:
    """Return the ranges of a model with what the library lacks, and print a line for each of its weights."""
    from outblas.search.intervals.model_ranges import lacking_ranges, weights_of_file

    weights, _ = weights_of_file(file, tp, dtype, where)
    for one in weights:
        err.print(one.words, markup=False)
    found = lacking_ranges(weights)
    if found.searched and where.recording is not None:
        raise UsageError(f"--model with figures of {where}", "a GPU that measures", "tune with --device cuda:0")
    return found


def _check_model(context: typer.Context, model: Path | None, engine: str) -> None:
    """Raise UsageError for options that do not go with --model, or with it alone."""
    others = ("tp", "engine") if model is None else _NOT_OF_A_MODEL
    for option in given_options(context, *others).values():
        if model is None:
            raise UsageError(f"{option} without --model", "a model's config.json", "e.g. --model config.json")
        raise UsageError(f"--model with {option}", "one of them", "leave one out")
    check_engine(engine)
