"""The kernel families: a file each with its knobs, rules, geometry and cost, and the registry that names them."""
