"""Search agents: one file and one line in ``AGENTS`` (agent_table.py) each."""
