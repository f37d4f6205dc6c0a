"""The tools of ``outblas mcp``: a coding agent compiles, proves, times and keeps kernels within a budget."""
