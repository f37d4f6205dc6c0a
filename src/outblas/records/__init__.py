"""All that is kept on disk: stores, recordings, libraries, result files and where they come from."""
