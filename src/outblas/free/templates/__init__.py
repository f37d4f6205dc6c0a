"""Texts of CUTLASS and CuTe kernels with named places that :mod:`outblas.free.templates.fill` fills."""
