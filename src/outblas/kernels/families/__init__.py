"""The kernel families: one file each with knobs, rules, geometry and cost, and the registry of them."""
