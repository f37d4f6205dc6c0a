"""Predictions: kernels for shapes that no library lists, and answers that were learned from measurements."""
