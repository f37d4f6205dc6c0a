"""Memory and time of a GRPO training on several GPUs, computed from a model's shape. Nothing here is measured.

Formulas, with P parameters, L layers, width H and S tokens of a sequence (prompt and answer):

- Weights: LoRA keeps P in bf16, 2 bytes each. An adapter's parameter has 16 bytes: fp32, gradient, Adam's moments.
- Activations with gradient checkpointing: 2 S H bytes for each layer, and 34 S H bytes for one layer in full.
  That is of Korthikanti et al., arXiv:2205.05198, without attention scores, since fused attention stores none.
- Logits of a micro-batch: 4 bytes x answer tokens x vocabulary, held twice.
- KV cache: 2 (K and V) x 2 bytes x L x KV heads x head size for each token in flight.
- Generation: every token of an answer reads all weights once from HBM, on the GPUs that share them.
- Learning: 8 P FLOP a token. Forward, forward of the reference model, activations again, and backward are 2 P each.
  LoRA has no gradients of the base. The 2 P are of Kaplan et al., arXiv:2001.08361.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outblas.core.gpu_records import reference_gpu
from outblas.core.roofline import Gpu

#: Shares of the sustained rates that are assumed: of HBM in generation, and of the tensor cores in learning.
HBM_SHARE, TENSOR_SHARE = 0.6, 0.4
#: Matrices of a layer that have adapters; each counts as a square one of the model's width.
ADAPTED = 7
_GB = 1e9


@dataclass(frozen=True)
class ModelShape:
    """Shape of a dense language model, as its configuration says.

    Attributes:
        hidden: width.
        kv_heads: heads of keys and values.
        head: size of a head.
    """

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head: int
    vocabulary: int


#: Models of the recipe's table, from their published configurations.
QWEN_CODERS = (
    ModelShape("Qwen2.5-Coder-7B-Instruct", 7.62e9, 28, 3584, 4, 128, 152_064),
    ModelShape("Qwen2.5-Coder-14B-Instruct", 14.77e9, 48, 5120, 8, 128, 152_064),
    ModelShape("Qwen2.5-Coder-32B-Instruct", 32.76e9, 64, 5120, 8, 128, 152_064),
)


@dataclass(frozen=True)
class TrainingPlan:
    """Sizes of a step and shares of the GPUs.

    Attributes:
        train_gpus: GPUs that learn; each holds a whole model.
        serve_gpus: GPUs that generate; they share the weights.
        time_gpus: GPUs that prove and time.
        micro_batch: answers per pass of a GPU that learns.
        lora: rank of the adapters.
        kernel_s: seconds to compile, prove and time a kernel; assumed.
    """

    train_gpus: int = 4
    serve_gpus: int = 2
    time_gpus: int = 1
    group: int = 8
    prompts: int = 4
    micro_batch: int = 1
    prompt_tokens: int = 10_000
    answer_tokens: int = 4096
    lora: int = 32
    kernel_s: float = 5.0

    @property
    def answers(self) -> int:
        """Number of answers of a step."""
        return self.group * self.prompts


@dataclass(frozen=True)
class TrainingCost:
    """Computed cost of a training.

    Attributes:
        train_bytes: memory of a GPU that learns.
        serve_bytes: memory of a GPU that generates.
        generate_s: seconds of a step for generation.
        evaluate_s: seconds of a step for proofs and times.
        learn_s: seconds of a step for learning.
    """

    train_bytes: float
    serve_bytes: float
    generate_s: float
    evaluate_s: float
    learn_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step; its parts follow each other."""
        return self.generate_s + self.evaluate_s + self.learn_s


def training_cost(model: ModelShape, plan: TrainingPlan, gpu: Gpu) -> TrainingCost:
    """Return the computed memory and time of a training with LoRA, by the formulas of this module."""
    sequence = plan.prompt_tokens + plan.answer_tokens
    adapters = ADAPTED * model.layers * plan.lora * 2 * model.hidden
    activations = plan.micro_batch * sequence * model.hidden * (2 * model.layers + 34)
    logits = 2 * 4 * plan.micro_batch * plan.answer_tokens * model.vocabulary
    cache = 2 * 2 * model.layers * model.kv_heads * model.head * sequence * plan.answers
    weights = 2 * model.parameters
    reads_s = weights / plan.serve_gpus / (gpu.hbm_tbs * 1e12 * HBM_SHARE)
    flops = 8 * model.parameters * sequence * plan.answers
    return TrainingCost(
        weights + 16 * adapters + activations + logits,
        (weights + cache) / plan.serve_gpus,
        plan.answer_tokens * reads_s,
        plan.answers * plan.kernel_s / plan.time_gpus,
        flops / (plan.train_gpus * gpu.tflops * 1e12 * TENSOR_SHARE),
    )


def cost_table(
    models: Iterable[ModelShape] = QWEN_CODERS, plan: TrainingPlan | None = None, gpu: Gpu | None = None
) -> str:
    """Return a Markdown table of the computed cost of some models.

    Args:
        plan: sizes and shares; None: the defaults of :class:`TrainingPlan`.
        gpu: the GPU; None: the reference GPU.
    """
    plan, gpu = plan or TrainingPlan(), gpu or reference_gpu()
    lines = [
        "| model | GB to learn | GB to generate | generate s | prove, time s | learn s | step s | 1000 steps h |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model in models:
        cost = training_cost(model, plan, gpu)
        figures = (cost.train_bytes / _GB, cost.serve_bytes / _GB, cost.generate_s, cost.evaluate_s, cost.learn_s)
        cells = [f"{x:.0f}" for x in (*figures, cost.step_s)]
        lines.append(f"| {model.name} | {' | '.join(cells)} | {cost.step_s / 3.6:.0f} |")
    where = f"{gpu.name.upper()} ({gpu.memory_bytes / _GB:.0f} GB)"
    shares = f"{plan.train_gpus} GPUs learn, {plan.serve_gpus} generate and {plan.time_gpus} proves and times"
    said = f"Computed for {where}: {shares}. A step has {plan.answers} answers. Memory is of one GPU. **Not run.**"
    return "\n".join([*lines, "", said])
