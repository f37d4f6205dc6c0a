"""Compiled kernels: the compiler, the driver, memory and launches."""
