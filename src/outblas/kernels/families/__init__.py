"""The kernel families: knobs, rules, geometry and cost of each, and the registry of them."""
