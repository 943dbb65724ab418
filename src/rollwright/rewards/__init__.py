"""Reward functions, their registry, and the wrapper that runs them in isolation with a time limit."""
