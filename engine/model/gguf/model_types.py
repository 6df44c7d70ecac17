"""The model types, in configs of transformers, of the base models that llama.cpp's architectures stand for."""

from __future__ import annotations

from collections.abc import Mapping

MODEL_TYPES: Mapping[str, tuple[str, ...]] = {
    "command-r": ("cohere",),
    "falcon-h1": ("falcon_h1",),
    "gemma": ("gemma",),
    "gemma-embedding": ("gemma3_text",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3", "gemma3_text"),
    "gemma3n": ("gemma3n", "gemma3n_text"),
    "gemma4": ("gemma4", "gemma4_text"),
    "gpt2": ("gpt2",),
    "granitehybrid": ("granitemoehybrid",),
    "jamba": ("jamba",),
    "lfm2": ("lfm2",),
    "lfm2moe": ("lfm2_moe",),
    "llama": ("llama", "mistral", "mistral3", "mixtral"),  # mistral3: of llama.cpp before its own architecture
    "mistral3": ("mistral", "mistral3", "ministral3"),
    "nemotron_h": ("nemotron_h",),
    "nemotron_h_moe": ("nemotron_h",),
    "phi2": ("phi",),
    "phi3": ("phi3",),
    "qwen2": ("qwen2",),
    "qwen2moe": ("qwen2_moe",),
    "qwen2vl": ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"),
    "qwen3": ("qwen3",),
    "qwen35": ("qwen3_5", "qwen3_5_text"),
    "qwen35moe": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "qwen3moe": ("qwen3_moe",),
    "qwen3vl": ("qwen3", "qwen3_vl_text"),
    "qwen3next": ("qwen3_next",),
    "stablelm": ("stablelm",),
}
