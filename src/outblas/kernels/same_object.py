"""A key of caches that stands for one object, not for its content."""

from __future__ import annotations

from typing import Any


class SameObject:
    """A key for caches that is equal for the same object only, so that no content is compared or hashed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value
