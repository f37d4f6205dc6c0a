"""Basic records (problem, config, evaluation, GPU, baselines) and small tools. Imports no other package of OutBLAS."""
