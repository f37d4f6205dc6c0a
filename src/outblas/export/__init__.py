"""A kernel of the library as files that need no OutBLAS: CUDA source, PTX, cubin, a C++ launcher, a folder for the
Hugging Face Hub. Reads what the rest has recorded and decides nothing."""
