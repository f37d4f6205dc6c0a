"""Search intervals of M: the kernels that serve a weight for every M of a range."""
