"""Octavo's engine: transformer inference with a paged KV cache and continuous batching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OctavoError,
    RequestFailedError,
    UnsupportedModelError,
)
from engine.outputs import (
    ChoiceDelta,
    CompletionOutput,
    EngineInfo,
    EngineStats,
    Logprob,
    RequestDelta,
    RequestOutput,
    TokenLogprobs,
)
from engine.request import PixelInput, PoolingParams, SamplingParams, Seq2SeqInput, TokenInput

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.llm import LLM

__all__ = [
    "LLM",
    "ChoiceDelta",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineInfo",
    "EngineStats",
    "InvalidRequestError",
    "Logprob",
    "ModelLoadError",
    "OctavoError",
    "PixelInput",
    "PoolingParams",
    "RequestDelta",
    "RequestFailedError",
    "RequestOutput",
    "SamplingParams",
    "Seq2SeqInput",
    "TokenInput",
    "TokenLogprobs",
    "UnsupportedModelError",
]


def __getattr__(name: str) -> object:
    """`Engine` and `LLM` when first asked for: they bring torch, and a client of an engine elsewhere needs none."""
    if name == "Engine":
        from engine.engine import Engine

        return Engine
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
