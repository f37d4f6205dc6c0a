"""The table of earlier releases whose kernels compile to the present cubins. Libraries tuned with them stay valid.

A library file names its release and the hash of its kernel files. Other values can still mean the same machine code.
``tools/restamp.py`` compares the cubins and is the only writer of the table.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outblas.core.errors import RecordError
from outblas.core.files import write_json
from outblas.core.plain_files import read_json

FORMAT = "outblas-equal-kernels-1"
TABLE_PATH = Path(__file__).parents[1] / "data" / "equal_kernels.json"


class KernelRelease(NamedTuple):
    """The identity of a release's kernels.

    Attributes:
        sha: hash of the kernel files, by the rule of that release.
    """

    release: str | None
    sha: str | None


@dataclass(frozen=True)
class EqualKernels:
    """The releases whose kernels compile to the same cubins.

    Attributes:
        now: the kernels for which the table was written. The table says nothing about other kernels.
        before: earlier kernels with the same cubins, oldest first.
    """

    now: KernelRelease
    before: tuple[KernelRelease, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str] = TABLE_PATH) -> EqualKernels:
        """Read the table.

        Raises:
            RecordError: the file is missing or damaged.
        """
        try:
            data = read_json(Path(path))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}")
            return cls(_from_json(data), tuple(map(_from_json, data["equal"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(
                f"the table of equal kernels {path} cannot be read ({error})",
                f"a file of format {FORMAT}",
                "install the package afresh",
            ) from error

    def save(self, path: str | os.PathLike[str] = TABLE_PATH) -> None:
        """Write the table as JSON; by default in place of the package's own.

        Raises:
            RecordError: the disk refuses.
        """
        data = {"format": FORMAT, **_to_json(self.now), "equal": list(map(_to_json, self.before))}
        write_json(Path(path), data)

    def are_equal(self, there: KernelRelease, here: KernelRelease) -> bool:
        """Return True if a library made with the kernels ``there`` is valid with the kernels ``here``.

        It is if both are the same release, or if ``here`` is ``now`` and ``there`` is one of ``before``. The reverse is
        not
        enough: an old release does not know a later one.
        """
        return there == here or (here == self.now and there in self.before)

    def extended_by(self, now: KernelRelease, proved: KernelRelease, compared: str) -> EqualKernels:
        """Return the table for later kernels whose cubins were found equal to those of earlier kernels.

        Args:
            now: the later kernels.
            proved: the earlier kernels, as a library file of their release names them.
            compared: hash of the earlier kernel files by the present rule. If this table is for that hash or for
                ``now``, its entries are kept.
        """
        kept: Iterable[KernelRelease] = (*self.before, self.now) if now == self.now or self.now.sha == compared else ()
        before = dict.fromkeys((*kept, proved))
        before.pop(now, None)
        return EqualKernels(now, tuple(before))


def _from_json(data: dict[str, str]) -> KernelRelease:
    """Return the kernels of an entry. Raises KeyError if a key is missing."""
    return KernelRelease(str(data["outblas"]), str(data["kernels"]))


def _to_json(kernels: KernelRelease) -> dict[str, str | None]:
    """Return an entry of the table."""
    return {"outblas": kernels.release, "kernels": kernels.sha}
