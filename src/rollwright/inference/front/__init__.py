"""The OpenAI front: an HTTP server before any engine, at which agents of any framework are recorded."""
