"""Kernels that also compute the operations after a product."""
