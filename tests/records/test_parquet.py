"""Files of records are read by the calling thread, so that no thread of Arrow aborts a process that ends at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outblas.records.parquet import read_whole
from support.bench_fixture import write_bench
from support.helpers import synthetic_recording

READ = """
import os, sys
import pyarrow.parquet
from outblas_lab.recordings.recording import Recording
from outblas.records.results import read_result
before = len(os.listdir("/proc/self/task"))
Recording.load(sys.argv[1])
read_result(sys.argv[2])
print(before, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_no_thread_outlives_a_read(tmp_path: Path) -> None:
    synthetic_recording().write(tmp_path / "recording")
    write_bench(tmp_path / "bench.parquet")
    command = [sys.executable, "-c", READ, str(tmp_path / "recording"), str(tmp_path / "bench.parquet")]
    before, after = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert before == after


def test_a_file_of_too_many_equal_rows_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("outblas.records.parquet._MOST_ROWS", 3)
    table = pa.table({"x": [1, 1, 1, 1]})
    pq.write_table(table, tmp_path / "x.parquet")
    pq.write_table(table.slice(1), tmp_path / "y.parquet")
    with pytest.raises(ValueError, match="it has 4 rows, more than 3"):
        read_whole(tmp_path / "x.parquet")
    assert read_whole(tmp_path / "y.parquet") == table.slice(1)
