"""Grouped products, as in mixtures of experts: rows of A are sorted by group, and each group has its own weight."""
