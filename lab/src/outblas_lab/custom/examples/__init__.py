"""Correct free kernels as starting points and test cases: their texts and names (docs/judge/free-kernels.md)."""
