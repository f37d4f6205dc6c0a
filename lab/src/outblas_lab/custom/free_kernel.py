"""A free kernel: CUDA C++ text that meets the entry contract. Its name does not depend on comments and white space."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from outblas.core.errors import ContractError

if TYPE_CHECKING:
    from outblas_lab.custom.contract import LaunchBlock

#: Maximum size of a text, bytes.
MAX_TEXT_BYTES = 256 * 1024
FAMILY = "free"


@dataclass(frozen=True, eq=False)
class FreeKernel:
    """A candidate outside the template families. Kernels of equal names are equal.

    Make one by :meth:`parse`; the constructor itself checks nothing. ``launch`` and ``name`` are attributes, not
    methods. ``family`` is ``free``, and ``pdl``, ``early`` and ``even`` are False.
    """

    family: ClassVar[str] = FAMILY
    #: A free kernel has no launch options: it starts after its predecessor.
    pdl: ClassVar[bool] = False
    early: ClassVar[bool] = False
    even: ClassVar[bool] = False
    text: str

    @classmethod
    def parse(cls, text: str) -> FreeKernel:
        """Return the kernel of a text, which it keeps as written.

        Raises:
            ContractError: the text is no string, blank, longer than 262144 bytes, or no valid Unicode. Or it holds a
                NUL, or its launch block is missing or invalid.
        """
        if not isinstance(text, str) or not text.strip():
            raise ContractError("the kernel is empty", "CUDA C++ with a launch block", "write a kernel")
        if "\0" in text:
            raise ContractError("the kernel contains a NUL character", "CUDA C++ text", "remove it")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ContractError("the kernel contains an unpaired surrogate", "valid Unicode", "remove it") from error
        if size > MAX_TEXT_BYTES:
            raise ContractError(f"the kernel has {size} bytes", f"at most {MAX_TEXT_BYTES}", "shorten it")
        kernel = cls(text)
        _ = kernel.name  # parses the launch block
        return kernel

    @functools.cached_property
    def launch(self) -> LaunchBlock:
        """Return the parsed launch block.

        Raises:
            ContractError: the block is missing or invalid.
        """
        from outblas_lab.custom.contract import read_launch

        return read_launch(self.text)

    @functools.cached_property
    def name(self) -> str:
        """Return ``free_`` and the first 16 hex digits of the SHA-256 of :func:`normalised`.

        Comments and white space do not change it, unless :func:`normalised` keeps them.

        Raises:
            ContractError: the launch block is missing or invalid.
        """
        return f"free_{hashlib.sha256(normalised(self.text).encode()).hexdigest()[:16]}"

    def to_json(self) -> dict[str, Any]:
        """Return ``{"family": "free", "text": ...}`` with the text as written."""
        return {"family": self.family, "text": self.text}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FreeKernel) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def normalised(text: str) -> str:
    """Return the launch block as canonical JSON, then the text without comments and needless white space.

    The first line is ``/* outblas-launch {...} */`` with all defaults written out. The text follows on the next line,
    as :func:`outblas_lab.custom.cuda_text.canonical` spells it. The text is kept as written, comments included, if
    compilers may disagree on its comments, or if it depends on its own spelling.

    Raises:
        ContractError: the launch block is missing or invalid.
    """
    from outblas_lab.custom.contract import LAUNCH_MARK, read_launch
    from outblas_lab.custom.cuda_text import canonical, depends_on_spelling, is_ambiguous

    as_it_is = is_ambiguous(text) or depends_on_spelling(text)
    return f"/* {LAUNCH_MARK} {read_launch(text).canonical()} */\n{text if as_it_is else canonical(text)}"
