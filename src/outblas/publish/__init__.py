"""What leaves the house: HTML reports, published tables and pictures, exported kernels."""
