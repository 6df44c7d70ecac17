"""The chat model: its sizes, its batches, its measurements, its folder."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo import corpus
from demo.corpus import ASSISTANT, BOS, EOS, SYSTEM, USER, documents
from demo.export import write_folder
from demo.llama import Llama, Shape, to_config, to_transformers
from demo.loop import Batch, Recipe, cross_entropy
from demo.tokens import chat_tokenizer, pack, token_id

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set begins = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{%- if tools -%}
{{- '<|system|>' + begins + (' ' if begins else '') + 'Tools:' -}}
{%- for tool in tools -%}
{%- set parameters = tool['function']['parameters'] or {} -%}
{{- ' ' + tool['function']['name'] + '(' + (parameters['properties'] or {}) | join(', ') + ')' -}}
{%- endfor -%}
{{- '.' + eos_token -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- '<|user|><tool_response>' + message['content'] + '</tool_response>' + eos_token -}}
{%- elif message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('The demo model knows the roles system, user, assistant and tool, got ' + message['role']) -}}
{%- elif not (tools and loop.first and message['role'] == 'system') -%}
{{- '<|' + message['role'] + '|>' + message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
TEMPERATURE = 0.7  # of answers for which none is asked: at 1 a tiny model loses its thread too often
PER_ROW = 40  # numbers of documents set aside for a row of a step: more than ever fit into one
FRESH = 1_000_000_000  # documents from this number on are not trained on: known names and pairs, new texts


@dataclasses.dataclass(frozen=True)
class ChatSettings:
    """Sizes of the tokenizer and the model, and the training.

    Attributes:
        shape: of the model; its `vocab` is the tokenizer's too.
        tokenizer_documents: how many of the corpus' documents the merges come from.
        held_out_rows: rows of held-out documents that are measured.
        recipe: of the training.
    """

    shape: Shape
    tokenizer_documents: int
    held_out_rows: int
    recipe: Recipe


FULL = ChatSettings(
    shape=Shape(vocab=1536, hidden=192, layers=5, heads=6, kv_heads=2, ffn=512, context=512),
    tokenizer_documents=20_000,
    held_out_rows=24,
    recipe=Recipe(
        steps=8500,
        rows=8,
        length=256,
        peak_rate=2.5e-3,
        smoothed=0.2,
        evaluations=150,
        second=2500,
        third=5000,
        third_rate=1e-3,
        fourth=6000,
        fourth_rate=1e-3,
    ),
)
TINY = ChatSettings(  # for the tests: all of the way, in seconds
    shape=Shape(vocab=400, hidden=32, layers=2, heads=4, kv_heads=2, ffn=64, context=512),
    tokenizer_documents=200,
    held_out_rows=2,
    recipe=Recipe(
        steps=12,
        rows=2,
        length=64,
        warmup=3,
        evaluations=6,
        second=6,
        third=9,
        third_rate=1e-3,
        fourth=11,
        fourth_rate=1e-3,
    ),
)


class ChatTask:
    """The training task of the chat model."""

    def __init__(self, settings: ChatSettings, device: str = "cpu"):
        self.settings, self.device = settings, device
        self.tokenizer: Tokenizer = chat_tokenizer(settings.shape.vocab, settings.tokenizer_documents)
        torch.manual_seed(settings.recipe.seed)
        self.model = Llama(settings.shape).to(device)
        self._held_out = self._rows(0, settings.held_out_rows, held_out=True)
        self._fresh = self._rows(FRESH, settings.held_out_rows)

    @property
    def shape(self) -> dict[str, float]:
        """Sizes, for the card."""
        return dataclasses.asdict(self.settings.shape)

    def digest(self, count: int) -> str:
        """SHA-256 of the first documents of training."""
        return corpus.digest(count)

    def batch(self, step: int) -> Batch:
        """Rows of step `step`: documents that no other step has."""
        rows = self.settings.recipe.rows
        recipe = self.settings.recipe
        part = 1 + sum(0 < begin <= step for begin in (recipe.second, recipe.third, recipe.fourth))
        return self._rows(step * rows * PER_ROW, rows, part=part)

    def _rows(self, first: int, rows: int, *, held_out: bool = False, part: int = 1) -> Batch:
        found = documents(first, rows * PER_ROW, held_out=held_out, part=part)
        ids, learnt = pack(self.tokenizer, found, rows, self.settings.recipe.length)
        return torch.from_numpy(ids), torch.from_numpy(learnt)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and targets of the learnt tokens."""
        ids, learnt = batch
        chosen = learnt[:, 1:]
        return self.model(ids[:, :-1], chosen), ids[:, 1:][chosen]

    def evaluate(self) -> dict[str, float]:
        """Perplexity a token, on documents of held-out names and pairs, and on new documents of known ones."""
        return {"held_out": self._perplexity(self._held_out), "fresh": self._perplexity(self._fresh)}

    def _perplexity(self, batch: Batch) -> float:
        ids, learnt = (part.to(self.device) for part in batch)
        return math.exp(cross_entropy(*self.forward((ids, learnt))).item())

    def export(self, folder: Path, *, dtype: str = "bfloat16") -> None:
        """Write the folder as transformers saves it; every machine computes it in float32, whatever it is stored in."""
        bos, eos = token_id(self.tokenizer, BOS), token_id(self.tokenizer, EOS)
        write_folder(
            folder,
            weights=to_transformers(self.model),
            dtype=dtype,
            config=to_config(self.settings.shape, bos, eos, "float32"),
            generation={
                "bos_token_id": bos,
                "eos_token_id": eos,
                "pad_token_id": eos,
                "do_sample": True,
                "temperature": TEMPERATURE,
            },
            tokenizer=self.tokenizer,
            tokenizer_config={
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
                "clean_up_tokenization_spaces": False,
                "model_max_length": self.settings.shape.context,
            },
        )
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
