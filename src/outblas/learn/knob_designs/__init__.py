"""Designs of the search over knobs: which actions choose a kernel."""
