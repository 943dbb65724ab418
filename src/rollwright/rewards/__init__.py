"""Reward functions, their registry, and the wrapper that runs them apart under a time limit."""
