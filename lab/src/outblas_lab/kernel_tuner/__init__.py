"""Tasks in Kernel Tuner's file formats and search spaces."""
