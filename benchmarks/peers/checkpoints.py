"""The random checkpoint that all engines of one run are given, with a tokenizer that all of them can convert."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<unk>", "<s>", "</s>")
LETTERS = "etaoinsr"  # enough of them for any vocabulary, few enough for words that look like words

# LLaMA shape of SmolLM2-135M, and one that a test can afford.
SHAPES: dict[str, dict[str, Any]] = {
    "S": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}


def make_llama(folder: Path, shape: dict[str, Any]) -> None:
    """Save a random LLaMA in bfloat16, and its tokenizer.

    The same weights for the same shape. The generation config names no end token that a server could honour.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer(shape["vocab_size"]).save_pretrained(folder)


def tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of exactly that many ids, whose merges make every word that it has.

    Raises:
        ValueError: there is no room for the special tokens and the 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(SPECIAL) - len(alphabet)
    if room < 0:
        raise ValueError(f"a byte-level vocabulary needs {len(SPECIAL) + len(alphabet)} tokens, got {vocab_size}")
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    merges = list(itertools.islice(_merges(), room))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=SPECIAL[0]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def _merges() -> Any:
    """Pairs whose parts are letters or were made by an earlier pair: longer and longer words after a space."""
    words = ["Ġ"]
    while True:
        longer = []
        for word in words:
            for letter in LETTERS:
                yield word, letter
                longer.append(word + letter)
        words = longer
