"""The built-in engine: continuous batching of any Hugging Face causal language model on CPU or one GPU.

A step reads schedule -> run -> sample -> postprocess (``step``): ``scheduler`` chooses the sequences, ``batch`` lays their
tokens out, ``model`` computes logits against ``cache``, ``step`` draws tokens, ``engine`` returns results to callers.
"""
