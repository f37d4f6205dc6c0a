"""Free kernels that are right, to begin from and to test with: the texts, and their names (docs/judge/templates.md)."""
