"""The actor, critic and reference: optimisation, micro-batches, parallelism, publishing weights, checkpoints."""
