"""Octavo's engine: transformer inference with a paged KV cache and continuous batching."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from engine.audio.transcribing import Thresholds, Transcription
from engine.config import ADAPTER_NAME, DEFAULT_NUM_SEQS, EngineConfig, parse_bytes
from engine.errors import (
    AdapterError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    NotDownloadedError,
    OctavoError,
    RequestFailedError,
    UnsupportedModelError,
)
from engine.host.cgroups import available_memory
from engine.host.cpus import compute_in_one_thread
from engine.interface.adapters import AdapterInfo
from engine.interface.cache_map import CacheMap, LiveRequest
from engine.interface.dry import MAX_BREAKER_LENGTH, MAX_BREAKERS
from engine.interface.generation import (
    CHAT_ROOM,
    DEFAULT_MAX_TOKENS,
    chat_max_tokens,
    room_for_answer,
    tokens_to_keep_free,
)
from engine.interface.inputs import decoder_tokens
from engine.interface.kv_events import default_topic
from engine.interface.outputs import (
    BeamMoves,
    ChoiceDelta,
    CompletionOutput,
    EngineInfo,
    EngineStats,
    Logprob,
    Pooled,
    PoolingMode,
    RequestDelta,
    RequestOutput,
    Task,
    TokenLogprobs,
)
from engine.interface.pooling import DEFAULT_TOP_K, MAX_TOP_K, resolve_pooling
from engine.interface.reasoning import ReasoningBudget
from engine.interface.request import (
    BIAS_RANGE,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_STRINGS,
    NUMBER_RANGES,
    AudioInput,
    PixelInput,
    PoolingParams,
    SamplingParams,
    Seq2SeqInput,
    TokenInput,
)
from engine.interface.sampling_table import FILTERS
from engine.interface.structured import StructuredOutputsParams
from engine.interface.values import MAX_LISTED_IDS, NumberRange
from engine.interface.vision import PlacedImage, VisionInfo
from engine.offline.adapters import LoRARequest
from engine.pooled import (
    ClassificationOutput,
    EmbeddingOutput,
    FillMaskOutput,
    LabelScore,
    MaskedToken,
    ScoreOutput,
    Span,
    TokenClassificationOutput,
)

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.execution.gpu_choice import GpuFacts
    from engine.execution.whole_prompts import FlashFacts
    from engine.inspection import (
        CacheFacts,
        ModelFacts,
        TorchFacts,
        inspect_device,
        inspect_flash,
        inspect_gpu,
        inspect_kv_disk,
        inspect_model,
        inspect_quantization_cache,
        inspect_socket_folder,
        inspect_threads,
        inspect_torch,
    )
    from engine.model.folders import find_here, lacks_chat_template
    from engine.model.quantised_writing import quantise_checkpoint
    from engine.offline.beams import BeamSearchParams
    from engine.offline.llm import LLM
    from engine.text.chat_templates import read_template

__all__ = [
    "ADAPTER_NAME", "BIAS_RANGE", "CHAT_ROOM", "DEFAULT_MAX_TOKENS", "DEFAULT_NUM_SEQS", "DEFAULT_TOP_K", "FILTERS",
    "LLM", "MAX_BREAKERS", "MAX_BREAKER_LENGTH", "MAX_LISTED_IDS", "MAX_LOGPROBS", "MAX_LOGPROB_TOKEN_IDS",
    "MAX_PRIORITY", "MAX_STOP_STRINGS", "MAX_TOP_K", "NUMBER_RANGES", "AdapterError", "AdapterInfo", "AudioInput",
    "BeamMoves", "BeamSearchParams", "CacheFacts", "CacheMap", "ChoiceDelta", "ClassificationOutput",
    "CompletionOutput", "ConfigError", "EmbeddingOutput", "Engine", "EngineConfig", "EngineDeadError", "EngineInfo",
    "EngineStats", "FillMaskOutput", "FlashFacts", "GpuFacts", "InvalidRequestError", "LabelScore", "LiveRequest",
    "LoRARequest", "Logprob", "MaskedToken", "ModelFacts", "ModelLoadError", "NotDownloadedError", "NumberRange",
    "OctavoError", "PixelInput", "PlacedImage", "Pooled", "PoolingMode", "PoolingParams", "ReasoningBudget",
    "RequestDelta", "RequestFailedError", "RequestOutput", "SamplingParams", "ScoreOutput", "Seq2SeqInput", "Span",
    "StructuredOutputsParams", "Task", "Thresholds", "TokenClassificationOutput", "TokenInput", "TokenLogprobs",
    "TorchFacts", "Transcription", "UnsupportedModelError", "VisionInfo", "available_memory", "chat_max_tokens",
    "compute_in_one_thread", "decoder_tokens", "default_topic", "find_here", "inspect_device", "inspect_flash",
    "inspect_gpu",
    "inspect_kv_disk", "inspect_model", "inspect_quantization_cache", "inspect_socket_folder", "inspect_threads",
    "inspect_torch", "lacks_chat_template", "parse_bytes", "quantise_checkpoint", "read_template",
    "resolve_pooling", "room_for_answer", "tokens_to_keep_free",
]  # fmt: skip


_LAZY = {
    name: module
    for module, names in {
        ".offline.beams": "BeamSearchParams",
        ".inspection": "CacheFacts ModelFacts TorchFacts inspect_device inspect_flash inspect_gpu inspect_kv_disk "
        "inspect_model inspect_quantization_cache inspect_socket_folder inspect_threads inspect_torch",
        ".execution.whole_prompts": "FlashFacts",
        ".execution.gpu_choice": "GpuFacts",
        ".engine": "Engine",
        ".offline.llm": "LLM",
        ".model.folders": "find_here lacks_chat_template",
        ".model.quantised_writing": "quantise_checkpoint",
        ".text.chat_templates": "read_template",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> object:
    """Import the parts that load torch only when they are first used: a client of an engine in another process needs
    none."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
