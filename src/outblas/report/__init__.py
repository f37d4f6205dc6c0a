"""Self-contained HTML reports and the published summary, from recorded result files alone."""
