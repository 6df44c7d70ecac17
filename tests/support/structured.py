"""A tiny random model whose tokenizer can write JSON, and llguidance by itself as the reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.interface.structured import StructuredOutputsParams
from engine.text.grammars import grammar_text, limits_of
from engine.text.processor import Tokenizer, load_tokenizer
from support.checkpoints import Checkpoint, Shape, _model, _randomize

TEXTS = [
    json.dumps({"name": "the house of pages", "age": 41, "tags": ["red", "blue", "green"], "open": True}),
    json.dumps({"name": "a reader", "age": 7, "tags": [], "open": False, "note": None}, indent=2),
    "The reader turned the pages of the house, and then the others. Naïve 日本 readers, too: 12:30, 4.5e10.",
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["reader", "writer"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
EXTRA = 13  # ids that the model has and the tokenizer does not know


def byte_level(folder: Path) -> Any:
    """A byte-level BPE tokenizer that is trained on the texts."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "</s>", "<|call|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=390, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(TEXTS * 4, trainer)
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="</s>")
    hf.save_pretrained(folder)
    return hf


def make_json_checkpoint(folder: Path, seed: int = 5) -> Checkpoint:
    """The checkpoint, with the tokenizer beside it."""
    hf = byte_level(folder)
    shape = Shape("llama", heads=4, kv_heads=2, vocab=len(hf) + EXTRA, eos=(hf.eos_token_id,), seed=seed)
    torch.manual_seed(seed)
    model = _model(shape)
    _randomize(model, shape)
    model.generation_config = transformers.GenerationConfig(eos_token_id=hf.eos_token_id, pad_token_id=0)
    model.save_pretrained(folder)
    return Checkpoint("json", folder, model.eval(), shape.vocab, shape.eos)


def tokenizer_of(path: Path) -> Tokenizer:
    """A folder's tokenizer, as Octavo loads it."""
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


class Oracle:
    """llguidance over the tokenizer's own file, without anything of ours but the text of the grammar."""

    def __init__(self, hf: Any, vocab: int, eos: Sequence[int]):
        import llguidance
        from llguidance.hf import from_tokenizer

        self._library, self.vocab, self.eos = llguidance, vocab, list(eos)
        self._tokens = from_tokenizer(hf, n_vocab=vocab, eos_token=self.eos)

    def first(self, params: StructuredOutputsParams) -> Any:
        """A matcher in its first state."""
        limits = limits_of(self._library, params)
        matcher = self._library.LLMatcher(self._tokens, grammar_text(params), limits=limits, log_level=0)
        assert not matcher.get_error()
        return matcher

    def allowed(self, matcher: Any) -> list[int]:
        """Tokens that may come next."""
        if matcher.is_stopped():
            return self.eos
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(mask, bitorder="little")[: self.vocab]).tolist()

    def prefix_function(self, params: StructuredOutputsParams, num_prompt: int) -> Callable[[int, Any], list[int]]:
        """`prefix_allowed_tokens_fn` of `transformers`."""
        first = self.first(params)

        def allowed(_: int, tokens: Any) -> list[int]:
            matcher = first.deep_copy()
            output = [token for token in tokens.tolist()[num_prompt:] if token not in self.eos]
            assert matcher.consume_tokens(output)
            return self.allowed(matcher)

        return allowed
