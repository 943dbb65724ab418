"""The built-in engine: continuous batching of any Hugging Face causal language model on CPU or one GPU.

A step reads schedule -> run -> postprocess: ``scheduler`` says which sequences are prefilled, ``forward_batch`` lays their
tokens out, ``model_runner`` computes logits against ``kv_cache``, ``sampler`` draws tokens, ``engine`` hands results over.
"""
