"""Jina v2 as its authors define it (arXiv:2310.19923), for the models that transformers has no class for.

Everything but positions and feed-forward networks is BERT's, so it is transformers' there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)


def alibi(heads: int, length: int) -> Tensor:
    """[1, heads, length, length]: how far apart two tokens are, times the negative slope of a head.

    Of n heads, n a power of two, head i (from 1) has the slope 2^(-8 i / n); of others the power of two below has its
    slopes, and the rest those of twice as many at odd places.
    """
    power = 1
    while power * 2 <= heads:
        power *= 2
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-8 * (i + 1) / (2 * power)) for i in range(2 * power)][0::2][: heads - power]
    places = torch.arange(length)
    return -torch.tensor(slopes)[:, None, None] * (places[:, None] - places).abs()[None].float()


class NoPositions(nn.Module):
    """Adds nothing."""

    def forward(self, positions: Tensor) -> float:
        return 0.0


class GatedNetwork(nn.Module):
    """norm(wo(act(gate(x)) * up(x)) + x), where one matrix makes gate and up."""

    def __init__(self, config: Any):
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.act = {"geglu": nn.functional.gelu, "reglu": nn.functional.relu}[config.feed_forward_type]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gated_layers(x).chunk(2, dim=-1)
        normed: Tensor = self.layernorm(self.wo(self.act(gate) * up) + x)
        return normed


class Layer(nn.Module):
    """BERT's attention, then the gated network."""

    def __init__(self, attention: nn.Module, config: Any):
        super().__init__()
        self.attention = attention
        self.mlp = GatedNetwork(config)
        self.heads = config.num_attention_heads

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attended, _ = self.attention(hidden_states, alibi(self.heads, hidden_states.shape[1]))
        found: Tensor = self.mlp(attended)
        return found


class JinaBertModel(BertModel):
    """The encoder, with BERT's pooler."""

    def __init__(self, config: Any, add_pooling_layer: bool = True):
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        self.embeddings.position_embeddings = NoPositions()
        layers = (Layer(layer.attention, config) for layer in self.encoder.layer)
        self.encoder.layer = nn.ModuleList(layers)


class JinaBertForMaskedLM(BertForMaskedLM):
    def __init__(self, config: Any):
        super().__init__(config)
        self.bert = JinaBertModel(config, add_pooling_layer=False)
        self.post_init()


class JinaBertForSequenceClassification(BertForSequenceClassification):
    def __init__(self, config: Any):
        super().__init__(config)
        self.bert = JinaBertModel(config)


class JinaBertForTokenClassification(BertForTokenClassification):
    def __init__(self, config: Any):
        super().__init__(config)
        self.bert = JinaBertModel(config, add_pooling_layer=False)
