"""Tiny models of several architectures, and an independent reference for what an engine must compute."""

from __future__ import annotations

import torch
import transformers as hf

VOCABULARY = 96


def tiny_model(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes):
    """A random model with weights large enough that distributions are far from uniform."""
    common = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        head_dim=8,
    )
    configs = {
        "llama": lambda: hf.LlamaConfig(**common, tie_word_embeddings=False),
        "mistral": lambda: hf.MistralConfig(**common, sliding_window=None),
        "qwen2": lambda: hf.Qwen2Config(**{k: v for k, v in common.items() if k != "head_dim"}, tie_word_embeddings=True),
        "qwen3": lambda: hf.Qwen3Config(**common, tie_word_embeddings=True),
        "gpt2": lambda: hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=256,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        "gpt_neox": lambda: hf.GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        "gemma2": lambda: hf.Gemma2Config(**common, sliding_window=256, query_pre_attn_scalar=8),
    }
    config = configs[architecture]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif "norm" in name or "ln_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def reference_logprobs(model, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of ``output`` after ``prompt`` by the model's own forward without a cache."""
    logits = model(torch.tensor([prompt + output])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs[torch.arange(len(prompt) - 1, len(prompt) + len(output) - 1), output]


def step(engine, count: int = 1) -> None:
    """Run ``count`` steps of a paused engine in this thread, so that a test decides what happens between them."""
    from rollwright.inference.backends.builtin.requests import resolve

    for _ in range(count):
        with engine._state:
            engine._take_inbox()
        finished = []
        engine._stepper.step(finished)
        resolve(finished)


def byte_tokenizer():
    """A byte-level tokenizer: characters beyond ASCII take several tokens, and a few merges join characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{symbol: index + 1 for index, symbol in enumerate(alphabet)}}
    merges = [("a", "b"), ("ab", "c"), ("\u0120", "a")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
