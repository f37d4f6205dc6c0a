"""Free kernels: CUDA C++ texts, by a language model or by hand, that keep an entry contract (docs/free_kernels.md)."""
