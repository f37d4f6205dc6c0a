"""Comparison of agents on held-out problems of a recording."""
