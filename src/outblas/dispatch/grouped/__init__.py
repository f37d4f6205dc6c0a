"""Products of groups of rows, each by a weight of its own: mixtures of experts."""
