"""Checkpoints with a layer for multi-token prediction, and that layer in plain torch.

transformers has no such module. The reference follows the published layout (arXiv:2412.19437, 2.2): norms of the
embedding and of the hidden state, one matrix over both, one more layer of the model's own kind, and a norm before the
output matrix. The layer itself is that of transformers.
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
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from support.family_shape import FamilyShape, build_reference


@dataclass(frozen=True)
class Predicting:
    """A checkpoint, its model in transformers with the extra layer as the last one, and the layer's other weights."""

    path: Path
    model: Any
    norms: dict[str, nn.Module]
    joining: Tensor

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens after these, of which the model itself would compute all but the last."""
        known, stack = list(tokens), self.model.model
        layers, norm = list(stack.layers), stack.norm
        eps = norm.variance_epsilon
        try:
            stack.layers = nn.ModuleList(layers[:-1])
            hidden = self._run(stack, stack.embed_tokens(torch.tensor([known[:-1]])))
            stack.layers, stack.norm = nn.ModuleList(layers[-1:]), nn.Identity()
            stack.norm.variance_epsilon = eps
            for _ in range(count):
                vectors = self.norms["enorm"](stack.embed_tokens(torch.tensor([known[1:]])))
                x = torch.cat((vectors, self.norms["hnorm"](hidden)), dim=-1) @ self.joining.T
                out = self._run(stack, x)
                scores = self.model.lm_head(self.norms["shared_head.norm"](out[0, -1]))
                best = scores.topk(2).values
                assert best[0] - best[1] > 1e-4
                known.append(int(scores.argmax()))
                hidden = torch.cat((hidden, out[:, -1:]), dim=1)
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
    model = build_reference(replace(shape, settings={**shape.settings, "num_hidden_layers": layers + 1}))
    width, generator = shape.settings["hidden_size"], torch.Generator().manual_seed(shape.seed + 1)
    norms: dict[str, nn.Module] = {}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        norms[name] = LlamaRMSNorm(width, model.model.norm.variance_epsilon)
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
    save_file(load_file(file) | {name: one.clone() for name, one in own.items()}, file, {"format": "pt"})
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    config_file.write_text(json.dumps(config), encoding="utf-8")
    return Predicting(folder, model, norms, joining)
