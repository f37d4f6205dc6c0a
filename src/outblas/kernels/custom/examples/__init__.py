"""Free kernels that are shown to readers and language models."""
