"""Route products: ``outblas.matmul`` and its relatives, torch's operators, the native table and capture."""
