"""Suite ``moe``: products and layers of five published mixtures of experts, from one token to 16,384."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outblas.core.problem import ELEMENT_BYTES
from outblas.core.roofline import Gpu
from outblas.kernels.grouped.grouped_problem import GroupedProblem

Routing = Literal["uniform", "zipf"]
TOKENS = (1, 8, 64, 512, 4096, 16384)


@dataclass(frozen=True)
class MoeModel:
    """The experts of a model, as its config.json has them.

    Attributes:
        hidden: width of a token.
        width: width of an expert between its two products, on one GPU.
        experts: number of experts among which tokens choose.
        top: experts of a token.
        bias: the experts' layers have biases.
    """

    hidden: int
    width: int
    experts: int
    top: int
    bias: bool = False


MODELS = {
    "qwen3-30b-a3b": MoeModel(2048, 768, 128, 8),
    "mixtral-8x7b": MoeModel(4096, 14336, 8, 2),
    "gpt-oss-20b": MoeModel(2880, 2880, 32, 4, bias=True),
    "deepseek-v2-lite": MoeModel(2048, 1408, 64, 6),
    "deepseek-v3-tp8": MoeModel(7168, 2048 // 8, 256, 8),  # 256 experts, each a shard of an eighth
}


@dataclass(frozen=True)
class MoeProblem:
    """A product of the suite.

    Attributes:
        model: key of :data:`MODELS`.
        part: ``gate_up`` or ``down``.
        tokens: tokens before routing; A has ``top`` rows for each.
        routing: how tokens choose experts (:func:`rows_of_groups`).
    """

    model: str
    part: Literal["gate_up", "down"]
    tokens: int
    routing: Routing

    @property
    def key(self) -> str:
        """Its name, e.g. ``mixtral-8x7b_down_64_zipf``."""
        return f"{self.model}_{self.part}_{self.tokens}_{self.routing}"

    @property
    def problem(self) -> GroupedProblem:
        """The product alone, in bf16: gate and up together, without SiLU."""
        m = MODELS[self.model]
        n, k = (2 * m.width, m.hidden) if self.part == "gate_up" else (m.hidden, m.width)
        return GroupedProblem(m.experts, n, k, bias=m.bias)


def moe_suite() -> tuple[MoeProblem, ...]:
    """Return the 60 problems. The two parts of a model take turns in their routing, and so do numbers of tokens."""
    return tuple(
        MoeProblem(model, part, tokens, ("uniform", "zipf")[(place + index) % 2])  # type: ignore[arg-type]
        for model in MODELS
        for place, part in enumerate(("gate_up", "down"))
        for index, tokens in enumerate(TOKENS)
    )


@dataclass(frozen=True)
class MoeLayer:
    """A whole layer of experts: both products, the activation between them, and the sum over each token's experts.

    Attributes:
        model: key of :data:`MODELS`. Its biases are left out.
        tokens: tokens before routing.
        routing: how tokens choose experts (:func:`experts_of_tokens`).
    """

    model: str
    tokens: int
    routing: Routing

    @property
    def key(self) -> str:
        """Its name, e.g. ``mixtral-8x7b_64_zipf``."""
        return f"{self.model}_{self.tokens}_{self.routing}"


def moe_layers() -> tuple[MoeLayer, ...]:
    """Return the 30 layers. Models take turns in their routing, and so do numbers of tokens."""
    return tuple(
        MoeLayer(model, tokens, ("uniform", "zipf")[(place + index) % 2])  # type: ignore[arg-type]
        for place, model in enumerate(MODELS)
        for index, tokens in enumerate(TOKENS)
    )


def experts_of_tokens(model: MoeModel, tokens: int, routing: Routing, seed: int) -> list[list[int]]:
    """Return the ``top`` different experts of each token, drawn by a seed.

    Args:
        routing: ``uniform``: all experts are equally likely. ``zipf``: the expert of rank r in a random order is drawn
            with weight 1 / r.
    """
    draw = random.Random(seed)
    order = draw.sample(range(model.experts), model.experts)
    weights = [1.0 if routing == "uniform" else 1.0 / (order[expert] + 1) for expert in range(model.experts)]
    found = []
    for _ in range(tokens):
        # The largest of u^(1/w) are a draw without replacement by these weights (Efraimidis and Spirakis, 2006).
        keys = [draw.random() ** (1.0 / weight) for weight in weights]
        found.append(sorted(range(model.experts), key=keys.__getitem__)[-model.top :])
    return found


def rows_of_groups(model: MoeModel, tokens: int, routing: Routing, seed: int) -> list[int]:
    """Return the rows of each group if the tokens are those of :func:`experts_of_tokens`."""
    rows = [0] * model.experts
    for experts in experts_of_tokens(model, tokens, routing, seed):
        for expert in experts:
            rows[expert] += 1
    return rows


def floor_us(problem: GroupedProblem, rows: Sequence[int], gpu: Gpu) -> float:
    """Return a lower bound of the time in microseconds: of all FLOP at the GPU's peak, or of all bytes from HBM.

    Args:
        rows: rows of each group. A weight that no row needs is not read.
    """
    total, hit = sum(rows), sum(count > 0 for count in rows)
    elements = total * (problem.k + problem.columns) + hit * problem.n * problem.k
    flop_us = 2e-6 * total * problem.n * problem.k / gpu.tflops
    return max(flop_us, elements * ELEMENT_BYTES / (gpu.hbm_tbs * 1e6))
