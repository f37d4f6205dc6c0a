"""Tables and pictures of the README and the docs, generated from result files."""
