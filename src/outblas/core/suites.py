"""The named sets of problems, the tables made of them, and stratified samples."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from outblas.core.errors import UsageError, unknown_name
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu, regime

#: Suites that the published library and its tables have.
PUBLISHED_SUITES = ("grid1000", "llm")
#: Suites of linear layers: each weight with every M of :data:`LLM_M`.
LAYER_SUITES = ("llm", "llm_tp")
#: Valid names for :func:`suite`.
SUITES = (*PUBLISHED_SUITES, "llm_tp", "engine")
#: FLOP from which on a product reaches the power limit, so that mode ``block`` times it.
BLOCK_FLOP = 1e11
GRID_EXTENTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288, 16384)

#: Model -> (N = out features, K = in features) of its distinct linear layers, from the model's config.json. QKV and
#: gate/up are fused, as inference engines run them.
LLM_LAYERS: dict[str, tuple[tuple[int, int], ...]] = {
    # hidden 4096, 32 heads, 8 KV heads of 128, intermediate 14336
    "llama3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    # hidden 8192, 64 heads, 8 KV heads of 128, intermediate 28672
    "llama3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    # hidden 3584, 28 heads, 4 KV heads of 128, intermediate 18944
    "qwen2.5-7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    # hidden 8192, 64 heads, 8 KV heads of 128, intermediate 29568
    "qwen2.5-72b": ((10240, 8192), (8192, 8192), (59136, 8192), (8192, 29568)),
    # hidden 7168, MLA (q_a 1536, kv_a 576, q_b 24576, kv_b 32768, o 7168x16384), dense
    # intermediate 18432, expert intermediate 2048
    "deepseek-v3": (
        (2112, 7168),
        (24576, 1536),
        (32768, 512),
        (7168, 16384),
        (36864, 7168),
        (7168, 18432),
        (4096, 7168),
        (7168, 2048),
    ),
}
#: Dense model -> (N, K) of its qkv, attention-output, gate/up and down weights on one GPU. Each has 8 KV heads of 128,
#: so that up to 8 GPUs hold whole heads.
TP_MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama3-70b": LLM_LAYERS["llama3-70b"],
    "qwen2.5-72b": LLM_LAYERS["qwen2.5-72b"],
    # Mistral-Large-Instruct-2407's config.json: hidden 12288, 96 heads, 8 KV heads of 128, intermediate 28672
    "mistral-large-2": ((14336, 12288), (12288, 12288), (57344, 12288), (12288, 28672)),
}
#: Numbers of GPUs that share each weight.
TP_DEGREES = (2, 4, 8)
LLM_M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Dense model -> (N, K) of its qkv, attention-output, gate/up, down and output-head weights on one GPU, from its
#: config.json; in order of use.
ENGINE_MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama3-8b": (*LLM_LAYERS["llama3-8b"], (128256, 4096)),
    "qwen2.5-7b": (*LLM_LAYERS["qwen2.5-7b"], (152064, 3584)),
    # hidden 4096, 32 heads, 8 KV heads of 128, intermediate 14336
    "mistral-7b": (*LLM_LAYERS["llama3-8b"], (32768, 4096)),
    # hidden 4096, 32 heads, 8 KV heads of 128, intermediate 12288
    "qwen3-8b": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)),
    "llama3-70b": (*LLM_LAYERS["llama3-70b"], (128256, 8192)),
    # hidden 5120, 40 heads, 10 KV heads of 128, intermediate 17920
    "phi-4": ((7680, 5120), (5120, 5120), (35840, 5120), (5120, 17920), (100352, 5120)),
}
#: Models of :data:`ENGINE_MODELS` on one GPU and on two, in order of use. 70 billion parameters need two.
ENGINE_RUNS = (
    ("llama3-8b", 1), ("qwen2.5-7b", 1), ("mistral-7b", 1), ("qwen3-8b", 1), ("llama3-8b", 2), ("qwen2.5-7b", 2),
    ("llama3-70b", 2), ("phi-4", 1), ("qwen3-8b", 2), ("phi-4", 2),
)  # fmt: skip
#: Sequences of a step at most: vLLM's ``max_num_seqs`` by default.
ENGINE_SEQUENCES = 256


def suite(name: str, layout: str = "TN", dtype: str = "fp16", acc: str = "fp32") -> list[Problem]:
    """Return the problems of a named suite as a new list, in a fixed order.

    ``grid1000`` has 1,000 problems: M, N and K each from the ten :data:`GRID_EXTENTS` (64 to 16384). K runs fastest,
    then N, then M. ``llm`` has 330: each of the 22 distinct (N, K) of :data:`LLM_LAYERS` with the 15 M of :data:`LLM_M`
    (1 to 16384). ``llm_tp`` has 435: the 29 distinct (N, K) of :func:`tensor_parallel_weights`, with the same M.
    ``engine`` has the (N, K) of :func:`engine_weights`, each with the M of :func:`capture_sizes`; output heads have
    those of at most :data:`ENGINE_SEQUENCES`. M runs fastest in all three.

    Args:
        name: one of :data:`SUITES`, in lower case.

    Raises:
        UsageError: an unknown suite.
        ProblemError: an unsupported layout, dtype or accumulator.
    """
    if name == "grid1000":
        shapes = list(product(GRID_EXTENTS, GRID_EXTENTS, GRID_EXTENTS))
    elif name in LAYER_SUITES:
        weights = [nk for model in LLM_LAYERS.values() for nk in model] if name == "llm" else tensor_parallel_weights()
        shapes = [(m, n, k) for (n, k) in dict.fromkeys(weights) for m in LLM_M]
    elif name == "engine":
        most = {True: ENGINE_SEQUENCES, False: 2 * ENGINE_SEQUENCES}
        weights_and_heads = engine_weights().items()
        shapes = [(m, n, k) for (n, k), head in weights_and_heads for m in capture_sizes() if m <= most[head]]
    else:
        raise unknown_name("suite", name, SUITES, "pass one of them as --suite")
    return [Problem(m, n, k, layout, dtype, acc) for m, n, k in shapes]  # type: ignore[arg-type]


def tensor_parallel_weights() -> list[tuple[int, int]]:
    """Return (N, K) of the part of each weight of :data:`TP_MODELS` that one of :data:`TP_DEGREES` GPUs holds.

    The weights qkv and gate/up are split by columns of the output: N / degree. The weights of the attention output and
    down are split by rows: K / degree. Source of the rule: Megatron-LM (arXiv 1909.08053, section 3). vLLM and SGLang
    use it. Weights of several models or degrees stand more than once.
    """
    found: list[tuple[int, int]] = []
    for layer in TP_MODELS.values():
        for degree in TP_DEGREES:
            qkv, attention_output, gate_up, down = _split(layer, degree)
            found += [qkv, gate_up, attention_output, down]
    return found


def _split(layer: Sequence[tuple[int, int]], degree: int) -> list[tuple[int, int]]:
    """Return the part of a layer's qkv, attention-output, gate/up and down weights that one of some GPUs holds."""
    by_columns = (True, False, True, False)
    return [
        (n // degree, k) if columns else (n, k // degree) for (n, k), columns in zip(layer, by_columns, strict=True)
    ]


def engine_weights() -> dict[tuple[int, int], bool]:
    """Return (N, K) -> whether it is an output head, for the distinct weights of :data:`ENGINE_RUNS` on one GPU.

    The output head is split by columns of the output, the others as by :func:`tensor_parallel_weights`.
    """
    found: dict[tuple[int, int], bool] = {}
    for model, degree in ENGINE_RUNS:
        *layer, head = ENGINE_MODELS[model]
        found |= dict.fromkeys(_split(layer, degree), False) | {(head[0] // degree, head[1]): True}
    return found


def engine_gates() -> frozenset[tuple[int, int]]:
    """Return (N, K) of the merged gate/up weights of :func:`engine_weights`; the rows of gate come first."""
    return frozenset(_split(ENGINE_MODELS[model][:4], degree)[2] for model, degree in ENGINE_RUNS)


def capture_sizes(most_sequences: int = ENGINE_SEQUENCES) -> list[int]:
    """Return the numbers of rows for which vLLM captures graphs by default, in rising order.

    They are 1, 2 and 4, multiples of 8 below 256, and multiples of 16 from there on. The largest is twice the number of
    sequences, at most 512. Source: ``VllmConfig._set_cudagraph_sizes`` of vLLM 0.26.0.

    Args:
        most_sequences: ``max_num_seqs`` of the engine.
    """
    most = min(2 * most_sequences, 512)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)) if size <= most]


@dataclass(frozen=True)
class Table:
    """A suite in one layout, dtype and accumulator. A table is tuned, timed and published as a whole.

    ``str(table)`` is ``SUITE:LAYOUT:DTYPE:ACC``, e.g. ``"grid1000:TN:fp16:fp32"``. The constructor checks nothing;
    :meth:`parse` and :meth:`problems` do.

    Attributes:
        suite: one of :data:`SUITES`.
    """

    suite: str
    layout: str
    dtype: str
    acc: str

    @classmethod
    def parse(cls, text: str) -> Table:
        """Return the table of a text ``SUITE:LAYOUT:DTYPE:ACC``, in upper or lower case.

        Example: ``LLM:tn:FP16:fp32`` gives ``Table("llm", "TN", "fp16", "fp32")``. All four parts must be there.

        Raises:
            UsageError: not four parts, or an unknown suite.
            ProblemError: an unsupported layout, dtype or accumulator.
        """
        parts = text.split(":")
        if len(parts) != 4:
            raise UsageError(f"invalid table {text!r}", "SUITE:LAYOUT:DTYPE:ACC", "pass e.g. grid1000:TN:fp16:fp32")
        table = cls(parts[0].lower(), parts[1].upper(), parts[2].lower(), parts[3].lower())
        table.problems()
        return table

    def __str__(self) -> str:
        return ":".join((self.suite, self.layout, self.dtype, self.acc))

    @property
    def stem(self) -> str:
        """Return the start of the table's file names, e.g. ``grid1000_tn_fp16_fp32``."""
        return "_".join((self.suite, self.layout, self.dtype, self.acc)).lower()

    def problems(self) -> list[Problem]:
        """Return the table's problems in the order of :func:`suite`, which names their numbers.

        Raises:
            UsageError: an unknown suite.
            ProblemError: an unsupported layout, dtype or accumulator.
        """
        return suite(self.suite, self.layout, self.dtype, self.acc)


def block_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that mode ``block`` times: those of at least :data:`BLOCK_FLOP`, in their order."""
    return [problem for problem in problems if problem.flops >= BLOCK_FLOP]


def sample(problems: Sequence[Problem], count: int, seed: int = 0, *, gpu: Gpu) -> list[Problem]:
    """Draw ``count`` problems, stratified by regime, and return them in the order of ``problems``.

    Each regime gets its share of the draw, rounded by largest remainder. The draw depends only on the seed and on the
    shapes in each regime. So every layout, dtype and accumulator gets the same shapes.

    Args:
        count: number of problems to draw; all of them gives ``problems`` as a list.
        gpu: GPU that decides the regimes (:func:`outblas.core.roofline.regime`).

    Raises:
        UsageError: ``count`` is not between 1 and the number of problems.
    """
    if not 1 <= count <= len(problems):
        raise UsageError(f"--sample is {count}", f"1 to {len(problems)}", "pass another --sample")
    strata: dict[str, list[Problem]] = {}
    for problem in problems:
        strata.setdefault(regime(problem, gpu), []).append(problem)
    stratum_quotas = {name: count * len(members) / len(problems) for name, members in strata.items()}
    quota = {name: int(share) for name, share in stratum_quotas.items()}
    by_remainder = sorted(strata, key=lambda name: (quota[name] - stratum_quotas[name], name))
    for name in by_remainder[: count - sum(quota.values())]:
        quota[name] += 1
    drawn = {
        problem
        for name, members in strata.items()
        for problem in random.Random(f"{seed}/{name}").sample(members, quota[name])
    }
    return [problem for problem in problems if problem in drawn]
