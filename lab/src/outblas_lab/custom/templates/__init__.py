"""CUTLASS and CuTe texts with placeholders, and the records that fill them (docs/judge/free-kernels.md)."""
