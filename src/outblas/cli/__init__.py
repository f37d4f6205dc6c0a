"""The ``outblas`` command: arguments in, tables out; one file per command."""
