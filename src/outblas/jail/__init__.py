"""Kernels that nobody trusts: read, built, looked at, proved and timed behind bars (docs/free_kernels.md)."""
