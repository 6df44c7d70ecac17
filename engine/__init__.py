"""Octavo's engine: transformer inference with a paged KV cache and continuous batching."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OctavoError,
    RequestFailedError,
    UnsupportedModelError,
)
from engine.llm import LLM
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
