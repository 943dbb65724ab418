"""The built-in engine: continuous batching of any Hugging Face causal language model on CPU or one GPU.

``engine`` takes requests and owns the thread; ``scheduler`` chooses the sequences of each step and runs it; ``batch`` lays their tokens
out, ``model`` computes logits with ``kv_cache``, and ``sampling`` draws tokens.
"""
