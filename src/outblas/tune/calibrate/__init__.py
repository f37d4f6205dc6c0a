"""Measure the rates of a GPU for its record."""
