"""Build the library of all published tables: the run, its steps, the searches, the directory of one build."""
