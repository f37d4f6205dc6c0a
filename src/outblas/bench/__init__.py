"""Measuring in bulk: the live evaluator, the pool of GPUs, benches, recordings and single evaluations."""
