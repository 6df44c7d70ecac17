"""The endpoints that the served model supports, and the errors for all others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from engine import EngineInfo, Task
from engine.pooled import comparison_of, is_cross_encoder
from engine.text.processor import Tokenizer
from server.answering.infilling import Infilling
from server.answering.sound import find_log_mel
from server.context import Service
from server.errors import ApiError

_NO_TOKENIZER = "it has no tokenizer, so it cannot read texts"
_READS_SOUND = "it is a speech model, which reads sound"
_HEADS = {
    "classify": "its head classifies texts",
    "token_classify": "its head classifies tokens",
    "answer": "its head finds answers to questions",
    "entities": "its head finds entities by labels",
}

# Tasks whose results are vectors or matrices; the first one that a model supports is its default.
MATRIX_TASKS: tuple[Task, ...] = ("embed", "classify", "token_classify", "token_embed", "sparse_embed")

# The reason why a model cannot serve an endpoint; None if it can.
_Reason = Callable[[EngineInfo, Tokenizer | None], str | None]


def _completions(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if info.writes_of_images:
        return "it reads an image, which /v1/chat/completions takes"
    return _writes(info)


def _writes(info: EngineInfo) -> str | None:
    if info.speech is not None:
        return _READS_SOUND
    if "generate" in info.tasks:
        return None
    if info.encoder_only:
        return f"it is an encoder-only model, which reads {_reads(info)} and does not generate text"
    return f"{_kind(info)}, and it does not generate text"


def _generate(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if (reason := _completions(info, tokenizer)) is not None:
        return reason
    return None if info.max_encoder_len is None else "it is an encoder-decoder model; send /v1/completions"


def _infill(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if (reason := _generate(info, tokenizer)) is not None:
        return reason
    return (
        None if Infilling.of(tokenizer) is not None else "its tokenizer has no tokens to fill in the middle of a text"
    )


def _decides(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    return _completions(info, tokenizer) or _chat(info, tokenizer)


def _chat(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if (reason := _writes(info)) is not None:
        return reason
    if info.max_encoder_len is not None and not info.writes_of_images:
        return "it is an encoder-decoder model and does not support conversations"
    if tokenizer is None:
        return "it has no tokenizer, so it cannot read messages"
    if info.writes_of_images:
        return None
    return (
        None if tokenizer.chat_template is not None else "its tokenizer has no chat template (--chat-template sets one)"
    )


def _embeddings(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if "embed" in info.tasks:
        return None
    kind = "it is a retrieval model" if comparison_of(info) is not None else _kind(info)
    return f"{kind}, and it returns no vectors for whole texts"


def _pooling(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if set(MATRIX_TASKS) & set(info.tasks):
        return None
    return f"{_kind(info)}, and it returns neither vectors nor classes"


def _score(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if comparison_of(info) is None and not is_cross_encoder(info):
        if "classify" in info.tasks:
            return f"it has {len(info.labels)} classes, but scoring pairs needs a model with one class, or vectors"
        return f"{_kind(info)}, but scoring pairs needs a classifier with one class, or vectors"
    return None if tokenizer is not None else _NO_TOKENIZER


def _classify(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    return None if {"classify", "token_classify"} & set(info.tasks) else f"{_kind(info)}, and it has no classes"


def _reads_texts(task: Task, lacks: str) -> _Reason:
    """The reason for an endpoint of one task, which reads texts; `lacks`: what a model without the task does not do."""

    def reason(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
        if task not in info.tasks:
            return f"{_kind(info)}, and it does not {lacks}"
        return None if tokenizer is not None else _NO_TOKENIZER

    return reason


def _translate(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if info.max_encoder_len is None:
        return f"{_kind(info)}, and it does not know languages by code"
    if tokenizer is None:
        return _NO_TOKENIZER
    known = tokenizer.languages.ids or tokenizer.languages.pair
    return None if known else "its tokenizer names no languages"


def _transcriptions(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if info.speech is None:
        return f"{_kind(info)}, and it does not accept audio"
    found = find_log_mel(info.model_path)
    if isinstance(found, str):
        return found
    return None if tokenizer is not None else "it has no tokenizer, so it cannot write texts"


def _translations(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if (reason := _transcriptions(info, tokenizer)) is not None:
        return reason
    assert info.speech is not None
    return None if "translate" in info.speech.tasks else "its generation_config.json does not name the task translate"


ENDPOINTS: dict[str, _Reason] = {
    "/v1/completions": _completions,
    "/v1/chat/completions": _chat,
    "/v1/decisions": _decides,
    "/v1/systemone": _decides,
    "/inference/v1/generate": _generate,
    "/infill": _infill,
    "/v1/responses": _chat,
    "/v1/messages": _chat,
    "/v1/embeddings": _embeddings,
    "/pooling": _pooling,
    "/v1/score": _score,
    "/v1/rerank": _score,
    "/v1/classify": _classify,
    "/v1/answer": _reads_texts("answer", "find answers in texts"),
    "/v1/entities": _reads_texts("entities", "find entities by label"),
    "/v1/fill-mask": _reads_texts("fill_mask", "predict masked tokens"),
    "/translate": _translate,
    "/v1/audio/transcriptions": _transcriptions,
    "/v1/audio/translations": _translations,
}


def served_endpoints(info: EngineInfo, tokenizer: Tokenizer | None) -> list[str]:
    """Paths of the endpoints that the model can serve, without /tokenize and endpoints about the service."""
    return [path for path, reason in ENDPOINTS.items() if reason(info, tokenizer) is None]


def require(service: Service, endpoint: str) -> None:
    """Refuse a request to an endpoint that the model cannot serve. `endpoint`: a path of `ENDPOINTS`. Raises ApiError:
    400, code unsupported_endpoint; gives the reason and the supported endpoints."""
    info, tokenizer = service.client.info, service.tokenizer
    reason = ENDPOINTS[endpoint](info, tokenizer)
    if reason is not None:
        served = ", ".join(served_endpoints(info, tokenizer)) or "none of this kind"
        message = f"{service.model_id} cannot serve {endpoint}: {reason}. Endpoints that it serves: {served}."
        if service.models is not None:
            able = ", ".join(service.models.able(endpoint)) or "none"
            message += f" Loaded models that serve {endpoint}: {able}."
        raise ApiError(400, message, param="model", code="unsupported_endpoint")


class _Body(Protocol):
    model: str | None

    def refuse_unsupported(self) -> None: ...


def begin(service: Service, body: _Body, endpoint: str) -> float:
    """Refuse a request that the model or the endpoint cannot serve; returns its arrival, `time.monotonic()` seconds."""
    arrival = time.monotonic()
    service.check_model(body.model)
    require(service, endpoint)
    body.refuse_unsupported()
    return arrival


def _reads(info: EngineInfo) -> str:
    kinds = ["texts"] if info.vocab_size else []
    return " and ".join(kinds if info.signal is None else [*kinds, "images"])


def _kind(info: EngineInfo) -> str:
    for task, words in _HEADS.items():
        if task in info.tasks:
            return words if info.vocab_size else f"its head classifies {_reads(info)}"
    if info.max_encoder_len is not None:
        return "it is an encoder-decoder model"
    if "generate" in info.tasks:
        return "it is a language model"
    return "it is a masked language model" if "fill_mask" in info.tasks else "it is a model without a head"
