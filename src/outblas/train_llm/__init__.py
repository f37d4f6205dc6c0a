"""Training a language model to write kernels: supervised, then GRPO with rewards from an evaluator (docs/train_llm.md)."""
