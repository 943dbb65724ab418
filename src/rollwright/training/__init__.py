"""Turning batches into better weights: models, the scorer, micro-batches, the optimizer, FSDP, checkpoints and publishing."""
