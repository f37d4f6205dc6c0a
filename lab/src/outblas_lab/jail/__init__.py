"""Kernels that nobody trusts: read, built, looked at, proved and timed behind bars (docs/judge/free-kernels.md)."""
