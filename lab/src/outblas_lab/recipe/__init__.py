"""The published reward beside the gated one: training, choices and their comparison, on a recording."""
