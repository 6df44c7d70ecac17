"""A model's folder, as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor


def write_folder(
    folder: Path,
    *,
    weights: dict[str, Tensor],
    dtype: str,
    config: dict[str, object],
    generation: dict[str, object],
    tokenizer: Tokenizer,
    tokenizer_config: dict[str, object],
) -> None:
    """Write all but the card.

    Args:
        folder: made if it is not there.
        weights: under transformers' names.
        dtype: that they are stored in, such as "bfloat16".
        config: config.json.
        generation: generation_config.json.
        tokenizer: tokenizer.json.
        tokenizer_config: tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.to(getattr(torch, dtype)).contiguous() for name, weight in weights.items()}
    save_file(stored, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner may read
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        write_json(folder / name, content)


def write_json(path: Path, content: object) -> None:
    """Two spaces, and a line's end at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
