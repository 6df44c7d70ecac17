#!/usr/bin/env python3
"""Makes a tiny checkpoint of T5's shape, without a download, to show how an encoder-decoder model is served.

    .venv/bin/python tools/make_tiny_t5.py FOLDER

It is UNTRAINED: random weights, scaled so that different inputs have different answers, and a vocabulary of words, so
that an answer looks like text and means nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration, T5Tokenizer

SEED = 7
WORDS = (  # noqa: SIM905 (a list of a hundred strings would be no easier to read)
    "a all and at bell bird boat choir come day deep door each fair far fire for from garden go gold green hand "
    "harbour he high hill house in is it late light long loud moon morning night no of old on one over page poet "
    "quiet rain red river road sea she ship sing sings small snow song star stone summarize sun the tower "
    "translate tree under voice warm water we white wind winter with you young The He She English German to"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'-"


def make(folder: Path) -> None:
    """Write the folder."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [("▁" + word, -3.0 - rank / 100) for rank, word in enumerate(WORDS)]
    words = range(3, len(pieces))
    pieces += [("▁", -6.0), *((letter, -8.0 - rank / 100) for rank, letter in enumerate(LETTERS))]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, n_positions=512,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1.0 + 0.2 * noise)
            else:
                gain = 2.5 if "EncDecAttention" in name else 1.2
                parameter.copy_(0.4 * noise if "shared" in name else gain * noise * parameter.shape[1] ** -0.5)
        silent = torch.ones(len(tokenizer), dtype=torch.bool)
        silent[[1, *words]] = False
        model.lm_head.weight[silent] = 0.0  # it says words, and ends
        model.lm_head.weight[1] *= 1.6
    model.generation_config.no_repeat_ngram_size = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make a tiny, untrained checkpoint of T5's shape.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    make(folder)
    print(f"{folder}: T5's shape, tiny and UNTRAINED")


if __name__ == "__main__":
    main()
