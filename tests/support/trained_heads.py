"""Checkpoints with trained heads, and the heads in plain torch.

transformers has no such modules. The reference for multi-token prediction follows the published layout
(arXiv:2412.19437, 2.2): norms of the embedding and of the hidden state, one matrix over both, one more layer of the
model's own kind, and a norm before the output matrix. The layer itself is that of transformers. The reference for
EAGLE-3 (arXiv:2503.01840) follows the names and shapes of the published checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from support.family_shape import FamilyShape, build_reference


@dataclass(frozen=True)
class Predicting:
    """A checkpoint, its model in transformers with the extra layer as the last one, and the layer's other weights."""

    path: Path
    model: Any
    norms: dict[str, nn.Module]
    joining: Tensor
    apart: bool  # whether the layer's weights have names of their own, and its norm is part of it (Qwen3-Next)

    @property
    def method(self) -> dict[str, Any]:
        """The settings of speculative decoding."""
        return {"method": "mtp"}

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens after these, of which the model itself would compute all but the last."""
        known, stack = list(tokens), self.model.model
        layers, norm = list(stack.layers), stack.norm
        try:
            stack.layers = nn.ModuleList(layers[:-1])
            hidden = self._run(stack, stack.embed_tokens(torch.tensor([known[:-1]])))
            stack.layers, stack.norm = nn.ModuleList(layers[-1:]), nn.Identity()
            for _ in range(count):
                vectors = self.norms["enorm"](stack.embed_tokens(torch.tensor([known[1:]])))
                x = torch.cat((vectors, self.norms["hnorm"](hidden)), dim=-1) @ self.joining.T
                out = self._run(stack, x)
                normed = self.norms["shared_head.norm"](out)
                scores = self.model.lm_head(normed[0, -1])
                best = scores.topk(2).values
                assert best[0] - best[1] > 1e-4
                known.append(int(scores.argmax()))
                hidden = torch.cat((hidden, (normed if self.apart else out)[:, -1:]), dim=1)
        finally:
            stack.layers, stack.norm = nn.ModuleList(layers), norm
        return known[len(tokens) :]

    def _run(self, stack: Any, vectors: Tensor) -> Tensor:
        count = len(stack.layers)
        config, own = stack.config, stack.config.num_hidden_layers
        config.num_hidden_layers = count
        try:
            found: Tensor = stack(inputs_embeds=vectors, use_cache=False).last_hidden_state
        finally:
            config.num_hidden_layers = own
        return found


def make_predicting(
    shape: FamilyShape, folder: Path, change: Callable[[Any, dict[str, nn.Module], Tensor], None] | None = None
) -> Predicting:
    """Build the checkpoint and save it. `change` alters the model, the norms and the joining matrix first."""
    layers = shape.settings["num_hidden_layers"]
    apart, types = "layer_types" in shape.settings, shape.settings.get("layer_types", [])
    longer = {"num_hidden_layers": layers + 1} | ({"layer_types": [*types, "full_attention"]} if apart else {})
    model = build_reference(replace(shape, settings={**shape.settings, **longer}))
    width, generator = shape.settings["hidden_size"], torch.Generator().manual_seed(shape.seed + 1)
    norms: dict[str, nn.Module] = {}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        norms[name] = type(model.model.norm)(width, model.config.rms_norm_eps)
        norms[name].weight.data = 1 + 0.3 * torch.randn(width, generator=generator)
    joining = torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5
    if change is not None:
        with torch.no_grad():
            change(model, norms, joining)
    model.save_pretrained(folder)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    stem = f"model.layers.{layers}"
    own = {f"{stem}.{name}.weight": norm.weight.data for name, norm in norms.items()}
    own |= {f"{stem}.eh_proj.weight": joining, f"{stem}.embed_tokens.weight": model.model.embed_tokens.weight.data}
    own[f"{stem}.shared_head.head.weight"] = model.lm_head.weight.data
    stored = load_file(file)
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": layers} | ({"layer_types": types} if apart else {"num_nextn_predict_layers": 1})
    if apart:
        stored = {name.replace(stem, "mtp.layers.0"): one for name, one in stored.items()}
        names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
        own = {f"mtp.{name}.weight": norms[known].weight.data for name, known in names.items()}
        own["mtp.fc.weight"] = joining
    save_file(stored | {name: one.clone() for name, one in own.items()}, file, {"format": "pt"})
    config_file.write_text(json.dumps(config), encoding="utf-8")
    return Predicting(folder, model, norms, joining, apart)


@dataclass(frozen=True)
class Eagle3:
    """A model's checkpoint, its model in transformers, and the weights of an EAGLE-3 head for it in another folder."""

    path: Path
    model: Any
    head: Path
    weights: dict[str, Tensor]

    @property
    def method(self) -> dict[str, Any]:
        """The settings of speculative decoding."""
        return {"method": "eagle3", "model": str(self.head)}

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens after these, of which the model itself would compute all but the last."""
        known, weights, layers = list(tokens), self.weights, self.model.config.num_hidden_layers
        states = self.model(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
        three = torch.cat([states[layer][0] for layer in (2, layers // 2, layers - 3)], dim=-1)
        x = three @ weights["fc.weight"].T
        for _ in range(count):
            vectors = self.model.model.embed_tokens(torch.tensor(known[1:]))
            out = self._layer(vectors, x)
            scores = self._norm("norm", out[-1]) @ weights["lm_head.weight"].T
            best = scores.topk(2).values
            assert best[0] - best[1] > 1e-4
            own = int(scores.argmax())
            known.append(own + int(weights["d2t"][own]))
            x = torch.cat((x, out[-1:]))
        return known[len(tokens) :]

    def _layer(self, vectors: Tensor, x: Tensor) -> Tensor:
        config, weights, length = self.model.config, self.weights, len(x)
        both = torch.cat((self._norm("midlayer.input_layernorm", vectors), self._norm("midlayer.hidden_norm", x)), -1)
        q, k, v = (
            (both @ weights[f"midlayer.self_attn.{name}_proj.weight"].T)
            .view(length, -1, config.head_dim)
            .transpose(0, 1)
            for name in "qkv"
        )
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(length)[None])
        q, k = (one[0] for one in apply_rotary_pos_emb(q[None], k[None], cos, sin))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attended.transpose(0, 1).reshape(length, -1) @ weights["midlayer.self_attn.o_proj.weight"].T
        y = self._norm("midlayer.post_attention_layernorm", x)
        gate, up = (y @ weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (nn.functional.silu(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]


def make_eagle3(
    folder: Path, *, vocab: int, own_table: bool, change: Callable[[Any, dict[str, Tensor]], None] | None = None
) -> Eagle3:
    """Build both checkpoints and save them. `own_table`: the head stores a copy of the model's token table. `change`
    alters the model and the head's weights first."""
    width, heads, groups, size, layers = 64, 4, 2, 16, 7
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=size, max_position_embeddings=256, eos_token_id=7, bos_token_id=1,
        tie_word_embeddings=False, initializer_range=0.12,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    known = torch.randperm(vocab)[: vocab - 1].sort().values
    shapes = {
        "fc": (width, 3 * width),
        "lm_head": (len(known), width),
        "midlayer.self_attn.q_proj": (heads * size, 2 * width),
        "midlayer.self_attn.k_proj": (groups * size, 2 * width),
        "midlayer.self_attn.v_proj": (groups * size, 2 * width),
        "midlayer.self_attn.o_proj": (width, heads * size),
        "midlayer.mlp.gate_proj": (96, width),
        "midlayer.mlp.up_proj": (96, width),
        "midlayer.mlp.down_proj": (width, 96),
    }
    weights = {f"{name}.weight": torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    for name in (
        "norm",
        *(f"midlayer.{one}" for one in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    ):
        weights[f"{name}.weight"] = 1 + 0.3 * torch.randn(width)
    weights["d2t"] = known - torch.arange(len(known))
    weights["t2d"] = torch.isin(torch.arange(vocab), known)
    if own_table:
        weights["embed_tokens.weight"] = model.model.embed_tokens.weight.data.clone()
    if change is not None:
        with torch.no_grad():
            change(model, weights)
    path, head = folder / "model", folder / "head"
    model.save_pretrained(path)
    head.mkdir()
    save_file(weights, head / "model.safetensors", {"format": "pt"})
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    values |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(known)}
    (head / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return Eagle3(path, model, head, weights)
