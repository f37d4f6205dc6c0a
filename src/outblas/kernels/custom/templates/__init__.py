"""Texts of CUTLASS and CuTe with named places, and the records that fill them (docs/judge/templates.md)."""
