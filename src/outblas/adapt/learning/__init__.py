"""Learn while a program runs: prove and time kernels for products of no library, in slices beside its work."""
