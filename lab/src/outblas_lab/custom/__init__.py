"""Free kernels: CUDA C++ texts by people or language models, with their contract, examples and templates."""
