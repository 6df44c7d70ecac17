"""GLiNER (arXiv:2311.08526) written out plainly over a model of transformers, the oracle of ours, and tiny checkpoints
in the layout in which its library saves them.

Every span of every text is laid out, one after the other; nothing is shared, batched or left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from support.encoder_text import deberta

MARK, END = "<<ENT>>", "<<SEP>>"
ENCODER: dict[str, Any] = {
    "model_type": "deberta-v2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "position_buckets": 16,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}
SETTINGS: dict[str, Any] = {
    "model_type": "gliner_uni_encoder_span",
    "name": "span level gliner",
    "hidden_size": 24,
    "max_width": 4,
    "max_len": 40,
    "span_mode": "markerV0",
    "subtoken_pooling": "first",
    "words_splitter_type": "whitespace",
    "num_rnn_layers": 1,
    "dropout": 0.4,
    "lr_encoder": 1e-05,
    "ent_token": MARK,
    "sep_token": END,
}


def _network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 4 * outputs), nn.ReLU(), nn.Dropout(0.4), nn.Linear(4 * outputs, outputs))


class Reference(nn.Module):
    """The model; its parameters have the names of the library's files."""

    def __init__(self, encoder: Any, settings: dict[str, Any]):
        super().__init__()
        features = settings["hidden_size"]
        self.width, self.mark = settings["max_width"], settings["class_token_index"]
        self.token_rep_layer = nn.Module()
        self.token_rep_layer.bert_layer = nn.Module()
        self.token_rep_layer.bert_layer.model = transformers.AutoModel.from_config(encoder)
        if encoder.hidden_size != features:
            self.token_rep_layer.projection = nn.Linear(encoder.hidden_size, features)
        if settings["num_rnn_layers"]:
            self.rnn = nn.Module()
            layers = settings["num_rnn_layers"]
            self.rnn.lstm = nn.LSTM(features, features // 2, layers, batch_first=True, bidirectional=True)
        self.span_rep_layer = nn.Module()
        self.span_rep_layer.span_rep_layer = spans = nn.Module()
        spans.project_start, spans.project_end = _network(features, features), _network(features, features)
        spans.out_project = _network(2 * features, features)
        self.prompt_rep_layer = _network(features, features)

    @torch.no_grad()
    def probabilities(self, ids: Sequence[int], firsts: Sequence[int]) -> dict[tuple[int, int, int], float]:
        """By first word, last word and label.

        Args:
            firsts: where each word's first token is.
        """
        states = self.token_rep_layer.bert_layer.model(torch.tensor([ids])).last_hidden_state[0]
        if hasattr(self.token_rep_layer, "projection"):
            states = self.token_rep_layer.projection(states)
        labels = self.prompt_rep_layer(torch.stack([states[at] for at, token in enumerate(ids) if token == self.mark]))
        words = states[torch.tensor(firsts)]
        if hasattr(self, "rnn"):
            words = self.rnn.lstm(words[None])[0][0]
        spans = self.span_rep_layer.span_rep_layer
        found: dict[tuple[int, int, int], float] = {}
        for first in range(len(words)):
            for last in range(first, min(first + self.width, len(words))):
                ends = torch.cat((spans.project_start(words[first]), spans.project_end(words[last]))).relu()
                scores: Tensor = torch.sigmoid(labels @ spans.out_project(ends))
                found |= {(first, last, label): float(score) for label, score in enumerate(scores)}
        return found


@dataclass(frozen=True)
class GlinerFolder:
    """A folder that the engine loads, and the reference of it."""

    path: Path
    model: Reference
    tokenizer: Any

    def read(self, text: str, labels: Sequence[str]) -> tuple[list[int], list[int], list[re.Match[str]]]:
        """Tokens, where each word's first one is, and the words.

        The library counts a word of which the tokenizer makes nothing, but passes it over where it looks for tokens, so
        that it takes what follows for the wrong words. Here such a word is none.
        """
        words = list(re.finditer(r"\w+(?:[-_]\w+)*|\S", text))
        prompt = [part for label in labels for part in (MARK, label)] + [END]
        encoding = self.tokenizer(prompt + [word.group() for word in words], is_split_into_words=True)
        of_words = encoding.word_ids()
        read = [(of_words.index(n), word) for n, word in enumerate(words, len(prompt)) if n in of_words]
        return encoding["input_ids"], [first for first, _ in read], [word for _, word in read]

    def entities(
        self,
        text: str,
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        flat_ner: bool = True,
        multi_label: bool = False,
    ) -> list[dict[str, Any]]:
        """The entities of a text that is read at once: the likeliest spans first, without those that overlap them."""
        labels = list(dict.fromkeys(labels))
        ids, firsts, words = self.read(text, labels)
        if not words:
            return []
        scores = self.model.probabilities(ids, firsts)
        ranked = sorted((item for item in scores.items() if item[1] > threshold), key=lambda item: -item[1])
        kept: list[tuple[tuple[int, int, int], float]] = []
        for span, score in ranked:
            if not any(_excludes(span, other, flat_ner, multi_label) for other, _ in kept):
                kept.append((span, score))
        return [
            {
                "start": words[first].start(),
                "end": words[last].end(),
                "text": text[words[first].start() : words[last].end()],
                "label": labels[label],
                "score": score,
            }
            for (first, last, label), score in sorted(kept, key=lambda item: item[0][0])
        ]


def _excludes(one: tuple[int, int, int], other: tuple[int, int, int], flat: bool, several: bool) -> bool:
    """Two spans of words cannot both be entities."""
    if one[:2] == other[:2]:
        return not several
    apart = one[0] > other[1] or other[0] > one[1]
    within = (one[0] <= other[0] and other[1] <= one[1]) or (other[0] <= one[0] and one[1] <= other[1])
    return not apart and (flat or not within)


def make_gliner(
    folder: Path,
    *,
    tokenizer: Callable[[], Any] = deberta,
    encoder: dict[str, Any] = ENCODER,
    seed: int = 3,
    **changes: Any,
) -> GlinerFolder:
    """A checkpoint whose scores are spread over all of (0, 1).

    Args:
        encoder: its config.
        seed: of the weights; with another one there may be no score above a half.
        changes: to `SETTINGS`.
    """
    hf = tokenizer()
    hf.add_tokens(["[FLERT]", MARK, END], special_tokens=True)
    hf.save_pretrained(folder)
    settings = SETTINGS | {"class_token_index": hf.convert_tokens_to_ids(MARK), "vocab_size": len(hf)} | changes
    config = transformers.AutoConfig.for_model(**(encoder | {"vocab_size": len(hf)}))
    torch.manual_seed(seed)
    model = Reference(config, settings).eval()
    for name, weight in model.named_parameters():
        if "norm" not in name.lower():
            nn.init.normal_(weight, std=_spread(name, weight))
    settings["encoder_config"] = config.to_dict()
    (folder / "gliner_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return GlinerFolder(folder, model, hf)


def _spread(name: str, weight: Tensor) -> float:
    """Of words that differ in much, and spans whose scores do."""
    if "embedding" in name:
        return 1.0
    return 0.3 if weight.dim() < 2 else 1.4 * float(weight.shape[1]) ** -0.5
