"""``python -m outblas`` and the ``outblas`` command."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from outblas.cli.main import app

        app()
    except KeyboardInterrupt:  # while still importing; a running command answers Ctrl-C itself
        sys.exit(130)


if __name__ == "__main__":
    main()
