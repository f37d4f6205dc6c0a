"""``python -m outblas`` and the ``outblas`` command."""

from __future__ import annotations


def main() -> None:
    from outblas.cli import app

    app()


if __name__ == "__main__":
    main()
