"""Training a language model to write kernels: supervised, then GRPO, paid by an evaluator (docs/train_llm.md)."""
