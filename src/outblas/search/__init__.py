"""Search: agents, tuning, comparisons of agents, and the bridge to Kernel Tuner."""
