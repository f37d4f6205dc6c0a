"""CUTLASS and CuTe texts with placeholders, and the records that fill them (docs/judge/templates.md)."""
