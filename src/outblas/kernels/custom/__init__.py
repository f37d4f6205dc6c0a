"""Free kernels as nouns: CUDA C++ texts by people or language models, their contract, examples and templates."""
