"""Bodies that the API's documentation shows; each works as it stands, whatever the model (score: decoder-only)."""

from __future__ import annotations

from typing import Any

_HELLO = [{"role": "user", "content": "What is an octavo?"}]

COMPLETIONS: dict[str, Any] = {
    "simple": {"summary": "Continue a text", "value": {"prompt": "Once upon a time", "max_tokens": 32}},
    "sampled": {
        "summary": "Two answers, drawn reproducibly",
        "value": {"prompt": "Once upon a time", "n": 2, "temperature": 0.8, "top_p": 0.95, "seed": 7, "stop": ["\n\n"]},
    },
    "beams": {
        "summary": "Beam search",
        "value": {"prompt": "Once upon a time", "n": 2, "num_beams": 4, "length_penalty": 1.0},
    },
    "stream": {
        "summary": "A stream with its usage at the end",
        "value": {"prompt": "Once upon a time", "stream": True, "stream_options": {"include_usage": True}},
    },
    "score": {
        "summary": "Log-probabilities of given texts",
        "value": {"prompt": ["A cat sat.", "Cat a sat."], "echo": True, "logprobs": 1, "max_tokens": 0},
    },
}
CHAT: dict[str, Any] = {
    "simple": {"summary": "A question", "value": {"messages": _HELLO, "max_completion_tokens": 32}},
    "instructed": {
        "summary": "With instructions, as a stream",
        "value": {"messages": [{"role": "developer", "content": "Be brief."}, *_HELLO], "stream": True},
    },
    "logprobs": {
        "summary": "With the most probable alternatives",
        "value": {"messages": _HELLO, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 3},
    },
}
EMBEDDINGS: dict[str, Any] = {
    "simple": {"summary": "A text's vector", "value": {"input": "The food was delicious."}},
    "several": {
        "summary": "Several texts, in base64",
        "value": {"input": ["A cat sat.", "A dog ran."], "encoding_format": "base64"},
    },
    "cut": {
        "summary": "The first features, and long texts cut",
        "value": {"input": "The food was delicious.", "dimensions": 2, "truncate_prompt_tokens": -1},
    },
}
TOKENIZE: dict[str, Any] = {
    "prompt": {"summary": "A text", "value": {"prompt": "Once upon a time"}},
    "messages": {"summary": "A conversation", "value": {"messages": _HELLO}},
}
DETOKENIZE: dict[str, Any] = {"ids": {"summary": "Token ids", "value": {"tokens": [1, 2, 3]}}}
_CHUNK = {"type": "string", "description": "A chunk as JSON, with one choice; [DONE] in the last event."}
EVENT_STREAM: dict[str, Any] = {
    "text/event-stream": {
        "itemSchema": {"type": "object", "properties": {"data": _CHUNK}, "required": ["data"]},
        "example": 'data: {"choices": [{"index": 0, ...}], ...}\n\ndata: [DONE]\n\n',
    }
}
EXPOSITION: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}, "example": "octavo_engine_up 1.0\n"}}
