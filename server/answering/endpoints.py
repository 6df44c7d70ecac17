"""Reasons why a model cannot serve an endpoint. They are here if several files share them. The file of an endpoint
declares its reason (`server.routes.task_router`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine import EngineInfo, Task
from engine.text.processor import Tokenizer

NO_TOKENIZER = "it has no tokenizer, so it cannot read texts"
_HEADS = {
    "classify": "its head classifies texts",
    "token_classify": "its head classifies tokens",
    "answer": "its head finds answers to questions",
    "entities": "its head finds entities by labels",
}

# The reason why a model cannot serve an endpoint; None if it can.
Reason = Callable[[EngineInfo, Tokenizer | None], str | None]


def lacks_completions(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    """The reason why a model does not continue texts."""
    if info.writes_of_images:
        return "it reads an image; send that to /v1/chat/completions"
    return _lacks_writing(info)


def _lacks_writing(info: EngineInfo) -> str | None:
    if info.speech is not None:
        return "it is a speech model, which reads sound"
    if "generate" in info.tasks:
        return None
    if info.encoder_only:
        return f"it is an encoder-only model, which reads {_reads(info)} and does not generate text"
    return f"{kind_of(info)}, and it does not generate text"


def lacks_generation(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    """The reason why a model does not continue token ids."""
    if (reason := lacks_completions(info, tokenizer)) is not None:
        return reason
    return None if info.max_encoder_len is None else "it is an encoder-decoder model; send /v1/completions"


def lacks_decisions(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    """The reason why a model cannot continue conversations without images."""
    return lacks_completions(info, tokenizer) or lacks_chat(info, tokenizer)


def lacks_chat(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    """The reason why a model cannot continue conversations."""
    if (reason := _lacks_writing(info)) is not None:
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


def lacks_task(task: Task, lacks: str) -> Reason:
    """The reason of an endpoint of one task that reads texts. `lacks`: the end of the sentence "it does not ..." about
    a model without that task."""

    def reason(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
        if task not in info.tasks:
            return f"{kind_of(info)}, and it does not {lacks}"
        return None if tokenizer is not None else NO_TOKENIZER

    return reason


def kind_of(info: EngineInfo) -> str:
    """The kind of the model, as the beginning of a message."""
    for task, words in _HEADS.items():
        if task in info.tasks:
            return words if info.vocab_size else f"its head classifies {_reads(info)}"
    if info.max_encoder_len is not None:
        return "it is an encoder-decoder model"
    if "generate" in info.tasks:
        return "it is a language model"
    return "it is a masked language model" if "fill_mask" in info.tasks else "it is a model without a head"


def _reads(info: EngineInfo) -> str:
    kinds = ["texts"] if info.vocab_size else []
    return " and ".join(kinds if info.signal is None else [*kinds, "images"])


def served_endpoints(reasons: Mapping[str, Reason], info: EngineInfo, tokenizer: Tokenizer | None) -> list[str]:
    """Paths of the endpoints that the model can serve, without /tokenize and endpoints about the service."""
    return [path for path, reason in reasons.items() if reason(info, tokenizer) is None]
