"""Read a result file in JSON, and refuse one that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from outblas.core.errors import OutblasError, RecordError
from outblas.core.plain_files import read_json

_T = TypeVar("_T")


def use_json(path: Path, made_by: str, use: Callable[[dict[str, Any]], _T], form: str = "") -> _T:
    """Return the result of ``use``, called with the content of a result file in JSON.

    Args:
        form: the format that the file must have; empty: any.

    Raises:
        RecordError: the file cannot be read, has another format, or ``use`` raises one of the usual errors for a
            missing or damaged field.
    """
    try:
        data = read_json(path)
        if form and data["format"] != form:
            raise ValueError(f"its format is not {form}")
        return use(data)
    except (
        OSError, ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, OutblasError,
    ) as error:  # fmt: skip
        wrong, do = f"{path} cannot be read ({error!r})", "measure again, or restore the committed file"
        raise RecordError(wrong, f"a file from {made_by}", do) from error
