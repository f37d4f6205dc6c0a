"""Fit whole programs: change a model's layers, prepare their kernels, and try a program with and without them."""
