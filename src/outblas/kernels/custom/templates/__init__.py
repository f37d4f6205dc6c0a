"""Texts of CUTLASS and CuTe kernels with places for their values."""
