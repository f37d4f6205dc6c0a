"""Every environment variable that OutBLAS reads: the one list, from which their page is generated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """The description of an environment variable; all fields are texts for people, and it reads nothing.

    Attributes:
        name: ``OUTBLAS_...``, e.g. ``OUTBLAS_PDL``.
        values: the values that it takes, in words, e.g. ``1`` or ``a file or a folder; empty for none``.
        default: the behaviour if it is not set, e.g. ``off``.
        meaning: one or two sentences on its effect.
        read: when it is read, e.g. ``at each call``.
    """

    name: str
    values: str
    default: str
    meaning: str
    read: str


VARIABLES = (
    Variable(
        "OUTBLAS_DISABLE",
        "1",
        "not set",
        "`outblas.enable()` and `outblas.use()` change nothing and warn once.",
        "at `enable()`",
    ),
    Variable(
        "OUTBLAS_LIBRARY",
        "a file or a folder; empty for none",
        "`~/.local/share/outblas/libraries`",
        "The user's tuned libraries, which go before the packaged one.",
        "when a device is first used, and by `outblas tune`",
    ),
    Variable(
        "OUTBLAS_ANY_SHAPE",
        "0",
        "on",
        "0 leaves every problem that no library lists to torch.",
        "when a device is first used",
    ),
    Variable(
        "OUTBLAS_LEARN",
        "1",
        "off",
        "`outblas.enable()` learns products of no library while the program runs.",
        "at `enable()`",
    ),
    Variable(
        "OUTBLAS_LEARN_SECONDS",
        "a number, 0 or more",
        "10",
        "The GPU seconds that learning may take in a process, unless `enable(learn_seconds=)` says otherwise.",
        "at `enable()`",
    ),
    Variable(
        "OUTBLAS_PDL",
        "1",
        "off",
        "Allows programmatic dependent launch in every call that does not say otherwise.",
        "at each call",
    ),
    Variable(
        "OUTBLAS_WEIGHTS",
        "1",
        "off",
        "Promises for every such call of `outblas.matmul` that `b` is constant. Implies PDL.",
        "at each call",
    ),
    Variable(
        "OUTBLAS_WORKLOAD",
        "`stream`, `single` or `cold`",
        "`stream`",
        "How the products of the process follow each other; `outblas.use_workload()` goes before it.",
        "when the first product is decided",
    ),
    Variable(
        "OUTBLAS_FUSED",
        "1 or 0",
        "in CUDA graphs",
        "1 lets a kernel of OutBLAS add the bias of `outblas.linear` and `nn.Linear` in every call, 0 in none. "
        "0 also keeps gates of compiled graphs apart from their products.",
        "at each call, and when code is compiled",
    ),
    Variable(
        "OUTBLAS_VLLM",
        "1",
        "off",
        "Switches OutBLAS on in every process of vLLM that uses a GPU.",
        "when vLLM loads its plugins",
    ),
    Variable(
        "OUTBLAS_SGLANG",
        "1",
        "off",
        "Switches OutBLAS on in every process of SGLang that uses a GPU.",
        "when SGLang loads its plugins",
    ),
    Variable(
        "OUTBLAS_NATIVE",
        "0",
        "on",
        "0 leaves the C extension unused, so that every call runs Python.",
        "at import of the dispatch",
    ),
    Variable(
        "OUTBLAS_CUBINS",
        "0",
        "on",
        "0 leaves the shipped cubins unused, so that NVRTC compiles each kernel.",
        "when a kernel is first loaded",
    ),
    Variable(
        "OUTBLAS_CACHE_DIR",
        "a folder",
        "`$XDG_CACHE_HOME/outblas`, else `~/.cache/outblas`",
        "The compile cache, and learned models made on this machine.",
        "when a kernel is compiled",
    ),
    Variable(
        "OUTBLAS_POLICY",
        "a file of `outblas train`",
        "the packaged policy of the GPU",
        "The policy of agent `ppo`; the regressor in it, of agent `regressor`.",
        "when the agent is made",
    ),
    Variable(
        "OUTBLAS_RECORDING",
        "a name or a folder",
        "the packaged recording",
        "The recording that agents `recorded` and `transfer` read.",
        "when the agent is made",
    ),
    Variable(
        "OUTBLAS_LLM_MODEL",
        "a model's name",
        "not set",
        "The model of agent `llm`, which needs it.",
        "when the agent is made",
    ),
    Variable(
        "OUTBLAS_LLM_BUDGET",
        "e.g. `200 requests,3 USD`",
        "the agent's own limit",
        "The most that agent `llm` may spend.",
        "when the agent is made",
    ),
    Variable(
        "OUTBLAS_COMMIT",
        "a commit",
        "asked of git",
        "The commit that result files name, for a tree without git.",
        "when a result is written",
    ),
)
