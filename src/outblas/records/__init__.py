"""What was measured, and the files that keep it."""
