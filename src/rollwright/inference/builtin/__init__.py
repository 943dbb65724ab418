"""The built-in engine: continuous batching over a Hugging Face causal model, on CPU or one GPU."""
