"""The checks behind ``outblas doctor``, and the words for them."""
