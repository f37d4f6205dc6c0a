"""One GPU's worker: a sandboxed process that compiles, proves and times candidates."""
