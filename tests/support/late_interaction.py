"""ColBERT's checkpoints as its own library and as PyLate save them, and how these two read texts: in batches that are
padded for transformers' model, with a mask of attention."""

from __future__ import annotations

import copy
import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.sentence import TRANSFORMER, Module, dense, pipeline_folder
from support.text_encoders import TextEncoder, make_text_encoder

IDENTITY = "torch.nn.modules.linear.Identity"
ROWS = 168  # of the table of tokens: room for markers
Side = Literal["query", "document"]


@dataclass(frozen=True)
class Late:
    """A checkpoint, and the reference for it.

    Attributes:
        matrix: makes vectors of hidden states, [features, hidden].
        settings: what its library saved of how texts are read; None: nothing.
    """

    encoder: TextEncoder
    matrix: Tensor
    is_pylate: bool
    settings: dict[str, Any] | None = field(default=None)

    @property
    def path(self) -> Path:
        return self.encoder.path

    @torch.no_grad()
    def plain(self, ids: list[int]) -> Tensor:
        """Vectors of tokens that are read like any text, [tokens, features]."""
        found = self.encoder.model(torch.tensor([ids])).last_hidden_state[0] @ self.matrix.T
        return F.normalize(found, dim=-1)

    def vectors(self, texts: list[str], side: Side) -> list[Tensor]:
        """Of each text those that count, [tokens, features]; all texts are one batch."""
        return (self._pylate if self.is_pylate else self._stanford)(texts, side == "query")

    def score(self, query: str, document: str) -> float:
        (one,), (other,) = self.vectors([query], "query"), self.vectors([document], "document")
        return float((one @ other.T).max(1).values.sum())

    @torch.no_grad()
    def _hidden(self, ids: Tensor, attention: Tensor) -> Tensor:
        states: Tensor = self.encoder.model(input_ids=ids, attention_mask=attention).last_hidden_state
        return states @ self.matrix.T

    def _pylate(self, texts: list[str], is_query: bool) -> list[Tensor]:
        """As `preprocess` and `encode` of PyLate's models/colbert.py."""
        given = {name: value for name, value in (self.settings or {}).items() if value is not None}
        tokenizer = copy.deepcopy(self.encoder.tokenizer)
        tokenizer.pad_token = tokenizer.mask_token
        expands, name = given.get("do_query_expansion", True), "query" if is_query else "document"
        prefix = given.get(f"{name}_prefix", "[Q] " if is_query else "[D] ")
        length = given.get(f"{name}_length", 32 if is_query else 180)
        padding = "max_length" if is_query and expands else True
        read = tokenizer(texts, padding=padding, truncation=True, max_length=length - bool(prefix), return_tensors="pt")
        ids, attention = read["input_ids"], read["attention_mask"]
        if prefix:
            marks = torch.full((len(texts), 1), tokenizer.convert_tokens_to_ids(prefix))
            ids = torch.cat([ids[:, :1], marks, ids[:, 1:]], dim=1)
            attention = torch.cat([attention[:, :1], torch.ones_like(marks), attention[:, 1:]], dim=1)
        if is_query and expands and given.get("attend_to_expansion_tokens", False):
            attention.fill_(1)
        counts = attention.bool()
        if is_query and expands:
            counts = torch.ones_like(counts)
        if not is_query:
            words = given.get("skiplist_words", list(string.punctuation))
            skipped = torch.tensor([tokenizer.convert_tokens_to_ids(word) for word in words], dtype=torch.int64)
            counts &= ~torch.isin(ids, skipped)
        found = self._hidden(ids, attention)
        return [F.normalize(states[kept], dim=-1) for states, kept in zip(found, counts, strict=True)]

    def _stanford(self, texts: list[str], is_query: bool) -> list[Tensor]:
        """As `QueryTokenizer.tensorize`, `DocTokenizer.tensorize` and `ColBERT.query`, `doc` and `mask`."""
        given, tokenizer = self.settings or {}, copy.deepcopy(self.encoder.tokenizer)
        length = given.get("query_maxlen", 32) if is_query else given.get("doc_maxlen", 220)
        read = tokenizer(
            [". " + text for text in texts],  # a token for the marker
            padding="max_length" if is_query else "longest",
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        ids, attention = read["input_ids"], read["attention_mask"]
        mark = given.get("query_token_id", "[unused0]") if is_query else given.get("doc_token_id", "[unused1]")
        ids[:, 1] = tokenizer.convert_tokens_to_ids(mark)
        skipped: set[int] = set()
        if is_query:
            ids[ids == tokenizer.pad_token_id] = tokenizer.mask_token_id
            if given.get("attend_to_mask_tokens", False):
                attention[ids == tokenizer.mask_token_id] = 1
        elif given.get("mask_punctuation", True):
            skipped = {tokenizer.encode(symbol, add_special_tokens=False)[0] for symbol in string.punctuation}
        found = F.normalize(self._hidden(ids, attention), dim=-1)
        kept = [[x not in skipped and x != tokenizer.pad_token_id for x in row] for row in ids.tolist()]
        return [states[which] for states, which in zip(found, kept, strict=True)]


def stanford(folder: Path, settings: dict[str, Any] | None = None) -> Late:
    """As ColBERT's own library saves it: the matrix is among the weights, its size nowhere else."""
    found = make_text_encoder("headless", folder, vocab_size=ROWS)
    _add(found, ["[unused0]", "[unused1]", "[unused2]"], folder)
    matrix = torch.randn(12, 32, generator=torch.Generator().manual_seed(6))
    weights = {f"bert.{name}": weight for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights | {"linear.weight": matrix}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    if settings is not None:
        (folder / "artifact.metadata").write_text(json.dumps(settings))
    return Late(found, matrix, False, settings.get("config", settings) if settings else settings)


def pylate(folder: Path, settings: dict[str, Any], *, limits: dict[str, Any] | None = None) -> Late:
    """As PyLate saves it, with markers among the tokenizer's tokens.

    Args:
        limits: sentence_bert_config.json.
    """
    plain = folder.parent / f"{folder.name}-plain"
    return pylate_of(folder, make_text_encoder("headless", plain, vocab_size=ROWS), settings, limits=limits)


def pylate_of(
    folder: Path, encoder: TextEncoder, settings: dict[str, Any], *, limits: dict[str, Any] | None = None
) -> Late:
    """The same of another encoder."""
    _add(encoder, ["[Q] ", "[D] "], encoder.path)
    part = dense(32, 12, IDENTITY, bias=False)
    modules = [Module("pylate.models.Dense.Dense", part.config, part.tensors)]
    pipeline_folder(folder, encoder.path, modules, kind=TRANSFORMER, settings=settings, limits=limits)
    tokenizer = encoder.tokenizer
    return Late(TextEncoder(folder, encoder.model, tokenizer), part.tensors["linear.weight"], True, settings)


def _add(encoder: TextEncoder, tokens: list[str], folder: Path) -> None:
    encoder.tokenizer.add_tokens(tokens)
    encoder.tokenizer.save_pretrained(folder)
    assert len(encoder.tokenizer) <= ROWS
