"""The table of equivalent kernels: its validity, its growth, and that the packaged one is for the present kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from outblas import __version__
from outblas.core.errors import RecordError
from outblas.kernels.kernel_hash import kernels_sha
from outblas.records.user_library import EqualKernels, KernelRelease

OLD, MIDDLE, NOW = KernelRelease("0.1.0", "a"), KernelRelease("0.1.0", "b"), KernelRelease("0.2.0", "b")
OTHER = KernelRelease("0.3.0", "c")


def test_the_packaged_table_is_of_this_release_and_these_kernels() -> None:
    table = EqualKernels.load()
    assert table.now == (__version__, kernels_sha()), "python scripts/restamp.py --since <commit before the change>"
    assert table.now not in table.before and len(set(table.before)) == len(table.before)


def test_it_holds_for_what_it_was_written_for_and_no_other() -> None:
    table = EqualKernels(NOW, (OLD, MIDDLE))
    assert table.are_equal(OLD, NOW) and table.are_equal(MIDDLE, NOW) and table.are_equal(NOW, NOW)
    assert not table.are_equal(OTHER, NOW), "not in the table"
    assert not table.are_equal(OLD, OTHER), "the kernels have changed since the table was written"
    assert not table.are_equal(NOW, OLD), "a library of a later release is not of earlier kernels"
    assert not table.are_equal(KernelRelease("0.2.0", "a"), NOW), "release and hash belong together"
    assert table.are_equal(OTHER, OTHER), "equal anyway"


def test_it_is_kept_as_a_file(tmp_path: Path) -> None:
    table = EqualKernels(NOW, (OLD, MIDDLE))
    table.save(tmp_path / "table.json")
    assert EqualKernels.load(tmp_path / "table.json") == table


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "outblas-equal-kernels-0"}'])
def test_a_damaged_table_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(RecordError, match="table of equivalent kernels"):
        EqualKernels.load(tmp_path / "table.json")
    with pytest.raises(RecordError, match="table of equivalent kernels"):
        EqualKernels.load(tmp_path / "none.json")
