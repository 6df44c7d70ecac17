"""T5's and mT5's encoders alone: plain and gated, and a token table of its own beside the shared one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from support.encoder_shape import EncoderShape

BASE: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 40,
    "n_positions": 330,
}
GATED = BASE | {"feed_forward_proj": "gated-gelu", "num_heads": 3}


def with_decoder(folder: Path) -> None:
    """What is left of a decoder, and the token table under both of its names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    tensors["decoder.final_layer_norm.weight"] = tensors["encoder.final_layer_norm.weight"] * 2
    save_file(tensors, path, metadata={"format": "pt"})


SHAPES = {
    "t5-encoder": EncoderShape("T5EncoderModel", BASE),
    "t5-encoder-gated": EncoderShape("T5EncoderModel", GATED, seed=1, finish=with_decoder),
    "mt5-encoder": EncoderShape("MT5EncoderModel", GATED, seed=2),
}
