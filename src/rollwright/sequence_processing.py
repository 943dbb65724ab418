"""Sequence generation and log-probabilities for notebooks and experiments."""
