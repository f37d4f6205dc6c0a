"""Types of arguments: for model_steps.py, whole_models.py and moe_model.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def numbers(text: str) -> list[int]:
    """Type of an argument: positive numbers, or none."""
    found = [int(part) for part in text.split(",") if part]
    if min(found, default=1) < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected positive numbers")
    return found


def at_least(least: int) -> Any:
    """Type of an argument: a number that is not too small."""

    def parse(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}; expected {least} or more")
        return int(text)

    return parse


def words(known: Sequence[str]) -> Any:
    """Type of an argument: some of these words."""

    def parse(text: str) -> list[str]:
        chosen = [part for part in text.split(",") if part]
        unknown = sorted(set(chosen) - set(known))
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}; choose of {', '.join(known)}")
        return chosen

    return parse
