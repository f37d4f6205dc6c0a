"""Search agents that tuning needs: one file and one line in ``OWN_AGENTS`` (agent_registry.py) each."""
