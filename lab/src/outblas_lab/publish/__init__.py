"""HTML reports, published tables and pictures, and exported kernels."""
