"""Random adapters of `transformers` models: the merged reference, and the same as the engine holds them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.model.adapters import Adapter, LowRank

# The engine's products, and the reference's matrices that each joins.
LLAMA = {
    "decoder.blocks.{}.attention.inner.qkv": [f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkv"],
    "decoder.blocks.{}.attention.inner.out": ["model.layers.{}.self_attn.o_proj"],
    "decoder.blocks.{}.ffn.inner.gate_up": ["model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"],
    "decoder.blocks.{}.ffn.inner.down": ["model.layers.{}.mlp.down_proj"],
}
_OF_BART = {
    "attention.inner.qkv": [f"self_attn.{name}_proj" for name in "qkv"],
    "attention.inner.out": ["self_attn.out_proj"],
    "ffn.inner.up": ["fc1"],
    "ffn.inner.down": ["fc2"],
}
_ACROSS = {
    "cross.inner.queries": ["encoder_attn.q_proj"],
    "cross.inner.kv": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "cross.inner.out": ["encoder_attn.out_proj"],
}
BART = {
    f"{stack}.blocks.{{}}.{ours}": [f"model.{stack}.layers.{{}}.{name}" for name in theirs]
    for stack, parts in (("encoder", _OF_BART), ("decoder", _OF_BART | _ACROSS))
    for ours, theirs in parts.items()
}
BERT = {
    "encoder.blocks.{}.attention.inner.qkv": [
        f"bert.encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value")
    ],
    "encoder.blocks.{}.attention.inner.out": ["bert.encoder.layer.{}.attention.output.dense"],
    "encoder.blocks.{}.ffn.inner.up": ["bert.encoder.layer.{}.intermediate.dense"],
    "encoder.blocks.{}.ffn.inner.down": ["bert.encoder.layer.{}.output.dense"],
}


def make_adapter(
    model: Any, products: dict[str, list[str]], seed: int, *, layers: int = 2, rank: int = 4, gain: float = 0.5
) -> tuple[Adapter, Any]:
    """A random adapter of all products of a reference model, and a copy of the model with the adapter merged."""
    generator = torch.Generator().manual_seed(seed)
    merged, found = copy.deepcopy(model), {}
    modules = dict(merged.named_modules())
    for ours, theirs in products.items():
        for layer in range(layers):
            parts = []
            for name in theirs:
                linear = modules[name.format(layer)]
                outputs, inputs = linear.weight.shape
                down = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
                up = torch.randn(outputs, rank, generator=generator) * gain * rank**-0.5
                linear.weight.data += up @ down
                parts.append((down, up))
            found[ours.format(layer)] = joined(parts)
    digest = hashlib.sha256(f"{seed} {rank} {gain}".encode()).digest()
    return Adapter(name=f"adapter-{seed}", path=f"adapters/{seed}", digest=digest, products=found), merged


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> LowRank:
    """The low-rank change of matrices that lie one below the other."""
    return LowRank(torch.cat([down for down, _ in parts]), torch.block_diag(*(up for _, up in parts)))
