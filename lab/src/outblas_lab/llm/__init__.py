"""Kernels written by language models: a client, prompts, an archive of what was proven, and the loop over them."""
