"""The nouns (problem, evaluation, GPU, rivals) and small tools; imports nothing else of ours."""
