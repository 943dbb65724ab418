"""Environments for agents: retrieval over a corpus, and a shop."""
