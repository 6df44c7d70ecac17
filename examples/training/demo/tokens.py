"""The tokenizer, byte-level BPE trained on a corpus, and rows of tokens for training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from demo.corpus import BOS, SPECIAL, Piece, documents

Rows = tuple[NDArray[np.int64], NDArray[np.bool_]]  # ids and what of them is learnt, both [rows, length + 1]


def train_tokenizer(texts: Iterable[str], vocab: int, special: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: any text can be encoded.

    Args:
        texts: what the merges come from.
        vocab: tokens, those of `special` and the 256 bytes among them.
        special: names of the special tokens; the first gets id 0.
    """
    tokenizer = Tokenizer(models.BPE())
    # Words with their leading space, digits one by one, punctuation and white space on their own.
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def add_template(tokenizer: Tokenizer, single: str, special: Sequence[str]) -> None:
    """What stands around every text, such as "<s> $A"."""
    pairs = [(token, tokenizer.token_to_id(token)) for token in special]
    template = processors.TemplateProcessing(
        single=single, pair=f"{single} {single.replace('$A', '$B')}", special_tokens=pairs
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def chat_tokenizer(vocab: int, count: int) -> Tokenizer:
    """The chat model's, from the first `count` documents of training."""
    texts = (piece.text for pieces in documents(0, count) for piece in pieces)
    tokenizer = train_tokenizer(texts, vocab, SPECIAL)
    add_template(tokenizer, f"{BOS} $A", [BOS])
    return tokenizer


def token_id(tokenizer: Tokenizer, name: str) -> int:
    """The id of a special token.

    Raises:
        KeyError: it is not in the vocabulary.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary[name]


def encode(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> tuple[list[int], list[bool]]:
    """The tokens of a document, and which of them are learnt."""
    ids: list[int] = []
    learnt: list[bool] = []
    for piece in pieces:
        new = tokenizer.encode(piece.text, add_special_tokens=False).ids
        ids += new
        learnt += [piece.learnt] * len(new)
    return ids, learnt


def pack(tokenizer: Tokenizer, found: Iterator[list[Piece]], rows: int, length: int) -> Rows:
    """Documents end to end, in rows of length + 1 tokens; a row's last document is cut."""
    ids = np.zeros((rows, length + 1), np.int64)
    learnt = np.zeros((rows, length + 1), np.bool_)
    for row in range(rows):
        filled = 0
        while filled <= length:
            more, marks = encode(tokenizer, next(found))
            more, marks = more[: length + 1 - filled], marks[: length + 1 - filled]
            ids[row, filled : filled + len(more)], learnt[row, filled : filled + len(more)] = more, marks
            filled += len(more)
    return ids, learnt
