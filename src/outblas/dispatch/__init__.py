"""The way of a product: ``outblas.matmul`` and its kin, torch's operators, the native table and capture."""
