"""Training a language model to write kernels: supervised, then GRPO, paid by an evaluator (docs/llm/train.md)."""
