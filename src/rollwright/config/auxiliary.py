"""Models that help a run and are not trained: judges, simulated users, tools that are models."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AuxiliaryModelConfig:
    """One model: a server of our own beside the run (``model_path``), or any URL of the OpenAI protocol (``base_url``)."""

    model_path: str = field(
        default="", metadata={"help": "Directory or Hugging Face name; served beside the run and ended with it."}
    )
    base_url: str = field(default="", metadata={"help": "URL of a server that runs already, such as https://host/v1."})
    model: str = field(default="", metadata={"help": "Name that requests to base_url give; empty: the first that it lists."})
    api_key: str | None = field(default=None, metadata={"help": "Key for base_url. ${oc.env:NAME} keeps it out of the file."})
    timeout: float = field(default=600.0, metadata={"help": "Seconds that one request may take.", "gt": 0.0})
    max_retries: int = field(default=2, metadata={"help": "Times a failed request is sent again.", "ge": 0})
    device: str = field(default="auto", metadata={"help": "Device of the server that is started."})
    dtype: str = field(
        default="auto",
        metadata={"help": "Its compute type.", "choices": ["auto", "float32", "bfloat16", "float16"]},
    )
    context_length: int | None = field(
        default=None, metadata={"help": "Its prompt and new tokens together; None: the model's.", "ge": 2}
    )
    max_running_requests: int = field(default=64, metadata={"help": "Sequences that it decodes together.", "ge": 1})
    kv_cache_bytes: int | None = field(default=None, metadata={"help": "Memory of its cache.", "ge": 1})
    threads: int | None = field(default=None, metadata={"help": "Its compute threads; None: one for each core.", "ge": 1})
    setup_timeout: float = field(default=300.0, metadata={"help": "Seconds that the run waits for its health.", "gt": 0.0})
