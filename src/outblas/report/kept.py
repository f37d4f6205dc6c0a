"""Lines of the published table's notes that come of a JSON file beside the result files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outblas.errors import OutblasError, RecordError


def note_of(path: Path, form: str, made_by: str, line: Callable[[dict[str, Any]], str]) -> list[str]:
    """``line`` of what the file holds, as a list of one; an empty list where the file is not there.

    Args:
        form: what its key ``format`` has to be. made_by: the script that writes it, for the error.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != form:
            raise ValueError(f"it is not of format {form}")
        return [line(data)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OutblasError) as error:
        raise RecordError(
            f"{path} cannot be read ({error})", f"what {made_by} writes", "measure again, or restore the committed file"
        ) from error
