"""Checks of a config against its surroundings before anything runs: names of code, files and models."""
