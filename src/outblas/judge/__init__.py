"""Is a kernel right, and how fast: gates of the proof, the clock, operands, reference results and baselines."""
