"""``python -m outblas`` and the ``outblas`` command."""

from __future__ import annotations

import io
import os
import sys


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # where the locale knows ASCII only, a name must not end the command
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from outblas.cli.main import app_of, names_for

        app_of(names_for(sys.argv[1:], os.environ))()
    except KeyboardInterrupt:  # while still importing; a running command answers Ctrl-C itself
        sys.exit(130)
    except MemoryError:  # as well
        sys.stderr.write("error: out of memory at the start; expected more memory; raise the limit (ulimit -v)\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
