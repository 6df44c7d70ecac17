"""Tiny random checkpoints of any encoder-only family that transformers has, made from its config alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import TextClassificationPipeline

from engine import TokenInput
from support import jina_bert
from support.checkpoints import random_prompt
from support.family_shape import fill_randomly

# Tokens of the inputs whose hidden states are compared, all in one batch.
LENGTHS = (37, 1, 300, 14, 2, 113, 64, 5, 200)
MAX_POSITIONS = 330


@dataclass(frozen=True)
class EncoderShape:
    """One configuration of a family.

    Attributes:
        architecture: the class in transformers, or in `support.jina_bert`, as config.json names it.
        settings: keywords of its config, all but vocab_size.
        vocab: ids of inputs are any below it, those of special tokens included.
        finish: changes the saved folder, for checkpoints in an older form, say.
        global_tokens: ids to transformers' global_attention_mask, for models that have one.
        prepare: makes the reference, the whole model or its encoder, ready for an input, and gives what else it is to
            be told.
    """

    architecture: str
    settings: Mapping[str, Any] = field(hash=False)
    vocab: int = 61
    seed: int = 0
    finish: Callable[[Path], None] | None = None
    global_tokens: Callable[[Sequence[int]], Sequence[int]] | None = None
    prepare: Callable[[Any, TokenInput], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class EncoderCheckpoint:
    """A folder that the engine loads, and the reference model with the same weights."""

    shape: EncoderShape
    path: Path
    model: Any

    @property
    def token_types(self) -> int:
        """Segments that the model tells apart."""
        return getattr(self.model.config, "type_vocab_size", 0)

    @property
    def page(self) -> int:
        """Edges of boxes are below it; 0 for models that read none."""
        return getattr(self.model.config, "max_2d_position_embeddings", 0)

    def inputs(self) -> list[TokenInput]:
        """Random ids of the whole vocabulary, one input for each length; tokens of every other one are of random
        segments, where the model has several, and two of three have boxes, where it reads them."""
        inputs = []
        for number, length in enumerate(LENGTHS):
            types = None
            if self.token_types > 1 and number % 2 == 0:
                numbers = random.Random(length)
                types = [numbers.randrange(self.token_types) for _ in range(length)]
            ids = random_prompt(self.shape.vocab, 1000 + length, length)
            boxes = random_boxes(self.page, length) if self.page and number % 3 else None
            inputs.append(TokenInput(ids, token_type_ids=types, bbox=boxes))
        return inputs

    def hidden(self, input: TokenInput) -> Tensor:
        """The last layer's hidden states, [tokens, features]."""
        states: Tensor = self._run(self.model.base_model, input).last_hidden_state[0]
        return states

    def logits(self, input: TokenInput) -> Tensor:
        """What the head gives: [labels], [tokens, labels], [tokens, vocabulary] or, of answers' ends, [tokens, 2]."""
        output = self._run(self.model, input)
        if "start_logits" in output:
            return torch.stack((output.start_logits[0], output.end_logits[0]), -1)
        logits: Tensor = output.prediction_logits[0] if "prediction_logits" in output else output.logits[0]
        return logits

    def _run(self, model: Any, input: TokenInput) -> Any:
        if self.shape.prepare is not None:
            return run(model, input, **self.shape.prepare(model, input))
        chosen = self.shape.global_tokens
        if chosen is None:
            return run(model, input)
        return run(model, input, global_attention_mask=torch.tensor([list(chosen(input.token_ids))]))

    def scores(self, input: TokenInput) -> Tensor:
        """What transformers' pipeline makes of the logits of a whole input, [labels]."""
        pipeline: Any = SimpleNamespace(model=self.model)
        output: Any = {"logits": self.logits(input)[None]}
        found: Any = TextClassificationPipeline.postprocess(pipeline, output, top_k=None, _legacy=True)
        return torch.tensor([label["score"] for label in found])


def class_of(architecture: str) -> Any:
    """The reference's class: of transformers, or defined beside the tests where it has none."""
    return getattr(jina_bert, architecture, None) or getattr(transformers, architecture)


def make_encoder_checkpoint(shape: EncoderShape, folder: Path) -> EncoderCheckpoint:
    """Build the checkpoint and save it.

    Every parameter is random, so that a part which is left out shows: norms, biases, and rows of padding ids.
    """
    model_class = class_of(shape.architecture)
    config = model_class.config_class(vocab_size=shape.vocab, **shape.settings)
    model = model_class(config)
    model.set_attn_implementation("eager")
    fill_randomly(model.eval(), shape.seed)
    model.save_pretrained(folder)
    if shape.finish is not None:
        shape.finish(folder)
    return EncoderCheckpoint(shape, folder, model)


@torch.no_grad()
def run(model: Any, input: TokenInput, **more: Tensor) -> Any:
    """One forward pass of the reference over one input."""
    ids = torch.tensor([list(input.token_ids)])
    types: Mapping[str, Tensor] = {}
    if input.token_type_ids is not None:
        types = {"token_type_ids": torch.tensor([list(input.token_type_ids)])}
    if input.bbox is not None:
        more["bbox"] = torch.tensor([list(map(list, input.bbox))])
    return model(ids, attention_mask=torch.ones_like(ids), **{**types, **more})


def random_boxes(size: int, count: int) -> list[list[int]]:
    """So many boxes with edges below `size`, among them one at each end."""
    numbers = random.Random(count)
    edges = [[sorted(numbers.randrange(size) for _ in range(2)) for _ in range(2)] for _ in range(count)]
    boxes = [[left, upper, right, lower] for (left, right), (upper, lower) in edges]
    return [[0, 0, size - 1, size - 1], *boxes][:count]


def first_tokens(input: TokenInput, count: int) -> Sequence[int]:
    """Positions of some of an input's tokens, the last first."""
    return [*range(len(input.token_ids))][::-1][:count]
