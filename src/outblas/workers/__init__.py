"""The worker of one GPU: a sandboxed process that compiles, proves and times candidates."""
