"""Write or check what the project's own pages say of the result files in results/.

``python tools/published_pages.py --write`` writes each GPU's summary.json, the pictures, and the generated blocks of
README.md and docs/. ``--check`` writes nothing, and exits with 2 if a file is stale. Run it from the root of the
repository. It needs the extra ``report`` of outblas-lab.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # they define formats of result files

from pages.publish_results import check_published, publish  # noqa: E402

from outblas.core.errors import OutblasError  # noqa: E402

#: Result files of the GPU that comes first on the pages.
FOLDER = Path("results", "h200")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files, or say which are stale; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--write", action="store_true", help="write the files")
    work.add_argument("--check", action="store_true", help="name each stale file")
    try:
        if parser.parse_args(argv).write:
            for path in publish(FOLDER):
                print(f"written: {path}")
            return 0
        stale = check_published(FOLDER)
    except OutblasError as error:
        stale = [str(error)]
    for line in stale:
        print(f"error: {line}", file=sys.stderr)
    if not stale:
        print("checked: summaries, pictures, README and docs match the result files")
    return 2 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
