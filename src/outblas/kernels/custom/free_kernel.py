"""A free kernel: a CUDA C++ text that keeps the entry contract, with a name that its spelling does not change."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from outblas.core.errors import ContractError

if TYPE_CHECKING:
    from outblas.kernels.custom.contract import LaunchBlock

#: Texts of more than this are refused, bytes.
MAX_TEXT_BYTES = 256 * 1024
FAMILY = "free"


@dataclass(frozen=True, eq=False)
class FreeKernel:
    """A candidate beside the template families; equal names, equal kernels.

    Attributes:
        text: CUDA C++ with one launch block. Made by :meth:`parse`, which says what is wrong with it.
    """

    family: ClassVar[str] = FAMILY
    #: Launch options of the template families: a free kernel is launched plainly, behind its predecessor.
    pdl: ClassVar[bool] = False
    early: ClassVar[bool] = False
    even: ClassVar[bool] = False
    text: str

    @classmethod
    def parse(cls, text: str) -> FreeKernel:
        """The kernel of a text.

        Raises:
            ContractError: the text is empty, too long or no text; its launch block is missing or says what cannot be.
        """
        if not isinstance(text, str) or not text.strip():
            raise ContractError("the kernel is empty", "CUDA C++ with a launch block", "write one")
        if "\0" in text:
            raise ContractError("the kernel holds a NUL", "CUDA C++ as text", "remove it")
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise ContractError("the kernel holds half of a surrogate pair", "valid Unicode", "remove it") from error
        if size > MAX_TEXT_BYTES:
            raise ContractError(f"the kernel has {size} bytes", f"at most {MAX_TEXT_BYTES}", "write a shorter one")
        kernel = cls(text)
        _ = kernel.name  # reads the launch block, too
        return kernel

    @functools.cached_property
    def launch(self) -> LaunchBlock:
        """The launch block, parsed. Raises ContractError."""
        from outblas.kernels.custom.contract import read_launch

        return read_launch(self.text)

    @functools.cached_property
    def name(self) -> str:
        """``free_`` and 16 hex digits of the SHA-256 of :func:`normalised`."""
        return f"free_{hashlib.sha256(normalised(self.text).encode()).hexdigest()[:16]}"

    def to_json(self) -> dict[str, Any]:
        """``{"family": "free", "text": ...}``."""
        return {"family": self.family, "text": self.text}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FreeKernel) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def normalised(text: str) -> str:
    """The launch block as canonical JSON, then the text without comments and needless white space.

    The text counts as it is where compilers may not agree on what a comment is, and where it asks for its own spelling.

    Raises:
        ContractError: as :meth:`FreeKernel.parse` for the launch block.
    """
    from outblas.kernels.custom.contract import LAUNCH_MARK, read_launch
    from outblas.kernels.custom.cuda_text import canonical, depends_on_spelling, is_ambiguous

    as_it_is = is_ambiguous(text) or depends_on_spelling(text)
    return f"/* {LAUNCH_MARK} {read_launch(text).canonical()} */\n{text if as_it_is else canonical(text)}"
