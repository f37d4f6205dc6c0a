"""Search agents: one file and one line in ``AGENTS`` (registry.py) each."""
