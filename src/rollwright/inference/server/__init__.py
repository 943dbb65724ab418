"""The built-in engine as an HTTP server that speaks SGLang's native protocol and the OpenAI protocol."""
