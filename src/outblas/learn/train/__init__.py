"""Fit and train what the package ships: the catalogue, the ranking model, kernels for any shape."""
