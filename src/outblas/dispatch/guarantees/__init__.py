"""Guarantees for a product's numbers: fp32 sums everywhere, or bits that do not depend on the batch."""
