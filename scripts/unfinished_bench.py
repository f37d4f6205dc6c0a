"""Turn the journal of an unfinished bench into a result file of the problems that it has.

    python scripts/unfinished_bench.py bench.parquet.jsonl --library library.json --out partial.parquet

Provenance is that of the library, tuned on the same machine just before; the date is the journal's last
change. The file says of how many problems it holds how many.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path

from outblas.library import Library
from outblas.results import write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = options.journal.read_text().splitlines(keepends=True)
    settings, *entries = [json.loads(line) for line in lines if line.endswith("\n")]
    changed = datetime.datetime.fromtimestamp(options.journal.stat().st_mtime, datetime.timezone.utc)
    provenance = {
        **Library.load(options.library).provenance,
        "command": f"outblas bench --suite {settings['suite']}",
        "date": changed.isoformat(timespec="seconds"),
        "note": f"unfinished: {len(entries)} of {len(settings['problems'])} problems, in the suite's order",
    }
    rows = [row for entry in entries for row in entry["rows"]]
    write_result(rows, {"suite": settings["suite"], "provenance": provenance}, options.out)
    print(f"{len(entries)} of {len(settings['problems'])} problems -> {options.out}")


if __name__ == "__main__":
    main()
