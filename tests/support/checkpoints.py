"""Tiny random checkpoints, made here and scaled so that decisions are clear.

Every parameter is random, norms and biases included, so that a part which is left out shows. The head's
rows of the EOS ids are made longer: EOS then wins now and then, and answers end at different lengths.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

MAX_POSITIONS = 1536


@dataclass(frozen=True)
class Shape:
    """What a test checkpoint looks like.

    `eos` are its EOS ids, `settings` go to the config, `prompts` are seeds of prompts on which the
    reference decides clearly in every golden test (each test asserts that).
    """

    family: str
    heads: int
    kv_heads: int
    head_dim: int = 8
    layers: int = 2
    vocab: int = 307
    tied: bool = False
    eos: tuple[int, ...] = (7,)
    eos_gain: float = 1.8
    seed: int = 0
    prompts: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict, hash=False)


SHAPES = {
    "llama-grouped": Shape("llama", heads=4, kv_heads=2, eos=(7, 90, 201), prompts=(0, 1, 3, 4, 5)),
    "llama-full-tied": Shape(
        "llama", heads=8, kv_heads=8, tied=True, eos=(11,), eos_gain=2.4, seed=1, prompts=(13, 16, 9, 3, 6)
    ),
    "llama-one-kv-bias": Shape(
        "llama",
        heads=6,
        kv_heads=1,
        eos=(3, 150),
        seed=2,
        prompts=(0, 1, 3, 4, 6),
        settings={"attention_bias": True, "mlp_bias": True},
    ),
    "gpt2-tied": Shape(
        "gpt2", heads=4, kv_heads=4, tied=True, eos=(5, 60), eos_gain=2.0, seed=3, prompts=(2, 3, 6, 10, 21)
    ),
    "gpt2-untied": Shape(
        "gpt2",
        heads=3,
        kv_heads=3,
        head_dim=16,
        layers=3,
        vocab=211,
        eos=(9,),
        eos_gain=2.6,
        seed=4,
        prompts=(4, 7, 8, 9, 14),
        settings={"scale_attn_by_inverse_layer_idx": True, "n_inner": 72, "activation_function": "gelu"},
    ),
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder that the engine loads, and the reference model with the same weights."""

    name: str
    path: Path
    model: Any
    vocab: int
    eos: tuple[int, ...]

    def prompts(self) -> list[list[int]]:
        """Random prompts of different lengths."""
        return [random_prompt(self.vocab, seed) for seed in SHAPES[self.name].prompts]


def random_prompt(vocab: int, seed: int, length: int | None = None) -> list[int]:
    """Token ids that depend only on the arguments; 2 to 42 of them unless told."""
    length = 2 + seed * 7 % 41 if length is None else length
    numbers = random.Random(seed)
    return [numbers.randrange(vocab) for _ in range(length)]


def make_checkpoint(name: str, folder: Path) -> Checkpoint:
    """Build the checkpoint of that name and save it."""
    shape = SHAPES[name]
    model = _model(shape)
    _randomize(model, shape)
    eos: int | list[int] = list(shape.eos) if len(shape.eos) > 1 else shape.eos[0]
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=0)
    model.save_pretrained(folder)
    return Checkpoint(name, folder, model.eval(), shape.vocab, shape.eos)


def with_generation_config(source: Checkpoint, folder: Path, values: dict[str, Any]) -> Path:
    """The same weights in a new folder with another `generation_config.json`."""
    folder.mkdir(parents=True)
    for file in source.path.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def _model(shape: Shape) -> Any:
    hidden = shape.heads * shape.head_dim
    if shape.family == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=shape.vocab,
                hidden_size=hidden,
                intermediate_size=2 * hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                max_position_embeddings=MAX_POSITIONS,
                tie_word_embeddings=shape.tied,
                bos_token_id=1,
                eos_token_id=list(shape.eos),
                **shape.settings,
            )
        )
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=shape.vocab,
            n_embd=hidden,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_positions=MAX_POSITIONS,
            tie_word_embeddings=shape.tied,
            bos_token_id=1,
            eos_token_id=list(shape.eos),
            **shape.settings,
        )
    )


@torch.no_grad()
def _randomize(model: Any, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(shape.seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            is_norm_weight = name.endswith("weight")
            parameter.copy_(1.0 + 0.3 * noise if is_norm_weight else 0.3 * noise)
        elif "wpe" in name or "wte" in name or "embed" in name or "lm_head" in name:
            parameter.copy_(0.5 * noise)
        else:
            inputs = parameter.shape[0] if shape.family == "gpt2" else parameter.shape[1]
            parameter.copy_(noise * 1.2 * inputs**-0.5)
    model.get_output_embeddings().weight[list(shape.eos)] *= shape.eos_gain


def restore(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] = dict, **settings: Any) -> None:
    """Store a folder's tensors and config with changes."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | settings), encoding="utf-8")
