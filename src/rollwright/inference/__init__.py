"""Tokens in, tokens and log-probabilities out: the engine protocol, the built-in engine, clients of SGLang and vLLM, the server, the launcher and receiving weights."""
