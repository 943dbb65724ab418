"""A small real encoder with random weights, saved as a Hugging Face directory."""

from pathlib import Path

WORDS = "red blue green mug cup handle river king town old new where is the a of made born query passage : ?".split()  # noqa: SIM905 - a line each would be 22 lines


def save_tiny_encoder(folder: Path, seed: int = 0, hidden: int = 32) -> Path:
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {"hidden_size": hidden, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(
        BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **shape), add_pooling_layer=False
    ).save_pretrained(folder)
    return folder
