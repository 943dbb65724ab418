"""The built-in engine: continuous batching of any Hugging Face causal language model on CPU or one GPU.

``engine`` accepts requests and owns the thread; ``scheduler`` chooses the sequences of each step and runs the step; ``batch`` lays out
their tokens, ``model`` computes logits with ``kv_cache``, and ``sampling`` draws tokens.
"""
