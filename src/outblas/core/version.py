"""The version of OutBLAS. The build reads it here, and files that OutBLAS writes record it."""

__version__ = "0.2.0"
