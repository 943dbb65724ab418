"""Reward functions, their registry, the wrapper that runs them apart under a time limit, and the Python sandbox."""
