"""Inference engines: tokens in, tokens and log-probabilities out.

Contains the engine protocol, the built-in engine, clients of SGLang and vLLM, the inference server, its launcher, and weight updates.
"""
