"""The loops. Each reads top to bottom like the pseudo-code of its algorithm."""
