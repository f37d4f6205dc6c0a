"""Compile kernels, load them and launch them: compiler, driver, memory and launches."""
