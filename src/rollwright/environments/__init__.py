"""Environments of agents: the retrieval service, the shop and the encyclopedia."""
