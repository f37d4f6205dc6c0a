"""The end of a bench that resumes: an error or Ctrl-C is one line, and not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from outblas.core.errors import OutblasError


@contextmanager
def resumable(kept: str) -> Iterator[None]:
    """Exit with one line after an error of the project or Ctrl-C; ``kept`` says what of the work is where."""
    try:
        yield
    except OutblasError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"interrupted; {kept}, and the same command goes on")
