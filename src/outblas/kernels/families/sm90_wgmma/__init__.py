"""The kernel family ``sm90_wgmma_gemm``: its knobs, rules, launch, cost, and the kernels that are tried."""
