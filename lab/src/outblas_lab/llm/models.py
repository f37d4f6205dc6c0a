"""The models of a run: names, shares of the questions, prices."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from outblas.core.errors import UsageError
from outblas_lab.llm.budget import Price


@dataclass(frozen=True)
class Model:
    """A language model. Example: ``Model("qwen", price=Price(1.0, 2.0))``.

    Attributes:
        weight: its share of the questions, relative to the other models'; above 0.
        price: its price; 0 for both kinds of tokens if it is not given.
    """

    name: str
    weight: float = 1.0
    price: Price = Price()


def parse_models(text: str, prices: Sequence[str]) -> list[Model]:
    """Return the models that the command line names, in order.

    Example: ``parse_models("a=2,b", ["1,2", "b=3,4"])`` is ``[Model("a", 2.0, Price(1.0, 2.0)), Model("b", 1.0,
    Price(3.0, 4.0))]``.

    Args:
        text: ``NAME[=WEIGHT],...``; a weight is 1 unless it is given. If the text after the last ``=`` is no number,
            it belongs to the name. Blanks around a name and a weight do not count.
        prices: texts ``IN,OUT`` (for every model without its own) or ``NAME=IN,OUT``, US dollars per million tokens.
            The last price of a name counts.

    Raises:
        UsageError: a name is empty or given twice, or a weight is not finite or not above 0. Or a price is no pair of
            numbers, or of no model.
    """
    by_name: dict[str, Price] = {}
    for one in prices:
        name, _, figures = one.rpartition("=")
        match = re.fullmatch(r"(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)", figures.strip())
        if match is None:
            wrong = f"--price {one!r} is invalid"
            raise UsageError(wrong, "IN,OUT or NAME=IN,OUT in USD per million tokens", "pass e.g. 0.5,1.5")
        by_name[name] = Price(float(match[1]), float(match[2]))
    models = []
    for part in text.split(","):
        name, weight = _name_and_weight(part)
        if not name:
            raise UsageError(f"--model {text!r} has an empty name", "comma-separated names", "remove the extra comma")
        if not 0 < weight < math.inf:
            wrong = f"--model {part.strip()!r} has an invalid weight"
            raise UsageError(wrong, "a weight above 0", "correct the weight")
        models.append(Model(name, weight, by_name.get(name, by_name.get("", Price()))))
    names = [m.name for m in models]
    if len(set(names)) != len(names):
        wrong, do = f"--model {text!r} names a model twice", "pass NAME=WEIGHT to weight a model"
        raise UsageError(wrong, "each model once", do)
    if odd := sorted(set(by_name) - {"", *names}):
        wrong, known = f"--price names the unknown model {odd[0]!r}", " or ".join(names)
        raise UsageError(wrong, f"a price for {known}", "correct the name")
    return models


def _name_and_weight(part: str) -> tuple[str, float]:
    """Return the name of ``NAME[=WEIGHT]`` and its weight; what follows ``=`` is a name's end if it is no number."""
    name, is_given, weight = part.rpartition("=")
    if is_given:
        try:
            return name.strip(), float(weight)
        except ValueError:
            pass
    return part.strip(), 1.0
