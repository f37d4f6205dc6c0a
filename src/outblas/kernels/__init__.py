"""Kernel families with their knobs, the rules for legal configs, and the cost model."""
