"""Commands on recordings: data sets, scores of agent files, and the published recipe."""
