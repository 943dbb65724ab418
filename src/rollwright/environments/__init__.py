"""Environments for agents: retrieval over a corpus, a shop, Gymnasium in text, task folders, MCP servers."""
