"""Comparison of agents live on a GPU: they search unseen problems, and their choices are judged afterwards."""
