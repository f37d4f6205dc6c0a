"""HTML reports, the summary of result files, and the data set of a recording."""
