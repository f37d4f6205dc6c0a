"""One home per kernel family."""
