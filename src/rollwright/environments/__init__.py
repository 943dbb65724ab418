"""Environments for agents: retrieval over a corpus, a shop, Gymnasium and OpenEnv in text, task folders, MCP servers."""
