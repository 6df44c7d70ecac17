"""Example bodies in the API's documentation; each works unchanged with any model (score: decoder-only)."""

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
    "structured": {
        "summary": "A text in a given format",
        "value": {
            "prompt": "The colour is",
            "structured_outputs": {"choice": ["red", "green", "blue"]},
            "num_beams": 3,
        },
    },
    "score": {
        "summary": "Log-probabilities of given texts",
        "value": {"prompt": ["A cat sat.", "Cat a sat."], "echo": True, "logprobs": 1, "max_tokens": 0},
    },
}
RENDER = {name: example for name, example in COMPLETIONS.items() if name != "score"}  # it generates nothing
_BOOK = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "pages": {"type": "integer", "maximum": 999}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "simple": {"summary": "A question", "value": {"messages": _HELLO, "max_completion_tokens": 32}},
    "instructed": {
        "summary": "With instructions, as a stream",
        "value": {"messages": [{"role": "developer", "content": "Be brief."}, *_HELLO], "stream": True},
    },
    "structured": {
        "summary": "JSON that matches a schema",
        "value": {
            "messages": [{"role": "user", "content": "Name a book."}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "book", "schema": _BOOK, "strict": True},
            },
        },
    },
    "logprobs": {
        "summary": "With the most probable alternatives",
        "value": {"messages": _HELLO, "max_completion_tokens": 8, "logprobs": True, "top_logprobs": 3},
    },
}
_ITEM = {"type": "message", "role": "user", "content": "Hello!"}

CONVERSATION: dict[str, Any] = {
    "items": {"summary": "With a first message", "value": {"items": [_ITEM], "metadata": {"topic": "greetings"}}},
}

CONVERSATION_UPDATE: dict[str, Any] = {
    "metadata": {"summary": "New metadata", "value": {"metadata": {"topic": "weather"}}},
}

CONVERSATION_ITEMS: dict[str, Any] = {
    "message": {"summary": "A message", "value": {"items": [_ITEM]}},
}

RESPONSES: dict[str, Any] = {
    "simple": {"summary": "A question", "value": {"input": "What is an octavo?", "max_output_tokens": 32}},
    "instructed": {
        "summary": "With instructions, as a stream",
        "value": {"instructions": "Be brief.", "input": _HELLO, "stream": True},
    },
    "items": {
        "summary": "A conversation as items",
        "value": {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello to you."}]},
                *_HELLO,
            ],
            "max_output_tokens": 32,
        },
    },
}
MESSAGES: dict[str, Any] = {
    "simple": {"summary": "A question", "value": {"max_tokens": 32, "messages": _HELLO}},
    "instructed": {
        "summary": "With a system prompt, as a stream",
        "value": {"max_tokens": 32, "system": "Be brief.", "messages": _HELLO, "stream": True},
    },
}
COUNT_TOKENS: dict[str, Any] = {"simple": {"summary": "A conversation", "value": {"messages": _HELLO}}}
EMBEDDINGS: dict[str, Any] = {
    "simple": {"summary": "A text's vector", "value": {"input": "The food was delicious."}},
    "several": {
        "summary": "Several texts, in base64",
        "value": {"input": ["A cat sat.", "A dog ran."], "encoding_format": "base64"},
    },
    "cut": {
        "summary": "Fewer features, and long texts are cut",
        "value": {"input": "The food was delicious.", "dimensions": 2, "truncate_prompt_tokens": -1},
    },
}
POOLING: dict[str, Any] = {
    "simple": {
        "summary": "The output of the model's head for two texts",
        "value": {"input": ["A cat sat.", "It rains."]},
    },
    "half": {
        "summary": "Base64, half precision",
        "value": {"input": "A cat sat.", "encoding_format": "base64", "embed_dtype": "float16"},
    },
}
# Each works on a model that supports the endpoint (fill-mask: with BERT's mask token).
_QUERY = "How many leaves does a sheet folded three times have?"
_DOCUMENTS = [
    "A folio is a sheet that is folded once.",
    "A sheet folded three times makes an octavo: eight leaves, sixteen pages.",
    "The harbour lies north of the town.",
]

SCORE: dict[str, Any] = {
    "one_to_many": {"summary": "One text against several", "value": {"text_1": _QUERY, "text_2": _DOCUMENTS}},
    "pairs": {
        "summary": "Pair by pair",
        "value": {"text_1": ["A cat sat.", "It rains."], "text_2": ["There sat a cat.", "The sun is out."]},
    },
    "queries": {
        "summary": "Newer names, and raw scores",
        "value": {"queries": _QUERY, "documents": _DOCUMENTS, "use_activation": False},
    },
}
RERANK: dict[str, Any] = {
    "simple": {"summary": "The two best", "value": {"query": _QUERY, "documents": _DOCUMENTS, "top_n": 2}},
    "objects": {
        "summary": "Documents as objects, results without texts",
        "value": {"query": _QUERY, "documents": [{"text": text} for text in _DOCUMENTS], "return_documents": False},
    },
}
CLASSIFY: dict[str, Any] = {
    "simple": {"summary": "Two texts", "value": {"input": ["What a fine day!", "The train was late again."]}},
    "pair": {
        "summary": "Two texts that are read together",
        "value": {"input": {"text": "A cat sat on the mat.", "text_pair": "An animal was sitting."}},
    },
    "entities": {
        "summary": "Models that classify tokens: entities",
        "value": {"input": "Anna Bergen lives in Oslo."},
    },
}
ANSWER: dict[str, Any] = {
    "simple": {
        "summary": "One question",
        "value": {"question": "Where does Anna live?", "context": "Anna Bergen lives in Oslo.", "top_k": 2},
    },
    "several": {
        "summary": "Several questions about one text",
        "value": {
            "question": ["Where does Anna live?", "Who lives in Oslo?"],
            "context": "Anna Bergen lives in Oslo.",
            "handle_impossible_answer": True,
        },
    },
}
ENTITIES: dict[str, Any] = {
    "simple": {
        "summary": "One text",
        "value": {"input": "Anna Bergen lives in Oslo.", "labels": ["person", "city"], "threshold": 0.4},
    },
    "several": {
        "summary": "Several texts, nested entities",
        "value": {
            "input": ["Anna lives in Oslo.", "The choir of Bergen is late."],
            "labels": ["person", "city", "group of people"],
            "flat_ner": False,
            "multi_label": True,
        },
    },
}
FILL_MASK: dict[str, Any] = {
    "simple": {"summary": "One mask", "value": {"input": "Paris is the [MASK] of France.", "top_k": 3}},
    "several": {"summary": "Several masks", "value": {"input": ["The [MASK] sat on the [MASK].", "It is [MASK]."]}},
}
TRANSLATE: dict[str, Any] = {
    "simple": {"summary": "A text", "value": {"q": "The ship is in the harbour.", "source": "en", "target": "de"}},
    "several": {
        "summary": "Several texts, with another translation of each",
        "value": {"q": ["Good morning.", "It rains."], "source": "en", "target": "de", "alternatives": 1},
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


LINES: dict[str, Any] = {
    "application/x-ndjson": {
        "itemSchema": {"type": "object"},
        "example": '{"model": "m", "message": {"role": "assistant", "content": "An"}, "done": false}\n',
    }
}
OLLAMA_CHAT: dict[str, Any] = {
    "simple": {"summary": "A question", "value": {"messages": _HELLO, "stream": False, "options": {"num_predict": 32}}},
    "stream": {"summary": "A stream", "value": {"messages": _HELLO, "options": {"temperature": 0.2, "seed": 7}}},
    "structured": {
        "summary": "JSON of a schema",
        "value": {"messages": [{"role": "user", "content": "Name a book."}], "format": _BOOK, "stream": False},
    },
}
OLLAMA_GENERATE: dict[str, Any] = {
    "simple": {"summary": "A question", "value": {"prompt": "What is an octavo?", "stream": False}},
    "raw": {
        "summary": "Continue a text",
        "value": {"prompt": "Once upon a time", "raw": True, "options": {"num_predict": 32}, "stream": False},
    },
}
OLLAMA_EMBED: dict[str, Any] = {
    "several": {"summary": "Two texts", "value": {"input": ["A sheet is folded.", "An octavo has eight leaves."]}},
}
BATCH: dict[str, Any] = {
    "day": {
        "summary": "The requests of a file",
        "value": {"input_file_id": "file-abc", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    },
}
OLLAMA_NAME: dict[str, Any] = {"served": {"summary": "The served model", "value": {"model": "default"}}}
OLLAMA_EMBEDDINGS: dict[str, Any] = {"one": {"summary": "A text", "value": {"prompt": "A sheet is folded."}}}


def _events(description: str, example: str) -> dict[str, Any]:
    fields = {"event": {"type": "string"}, "data": {"type": "string", "description": description}}
    schema = {"type": "object", "properties": fields, "required": ["event", "data"]}
    return {"text/event-stream": {"itemSchema": schema, "example": example}}


RESPONSE_STREAM = _events(
    "A typed event as JSON, with its sequence_number.",
    'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "An", ...}\n\n',
)
MESSAGE_STREAM = _events(
    "A typed event as JSON.",
    'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0, ...}\n\n',
)
EXPOSITION: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}, "example": "octavo_engine_up 1.0\n"}}
_DAMAGE = "The package arrived with a broken screen."
DECISIONS: dict[str, Any] = {
    "three": {
        "summary": "A predicate, a choice and a score",
        "value": {
            "input": _DAMAGE,
            "questions": [
                {"type": "predicate", "instructions": "The screen is broken."},
                {
                    "type": "choice",
                    "name": "department",
                    "instructions": "Which department should handle this?",
                    "choices": [{"value": "returns"}, {"value": "billing", "description": "invoices and payments"}],
                },
                {
                    "type": "score",
                    "instructions": "How bad is the damage?",
                    "levels": [{"label": "none"}, {"label": "light"}, {"label": "total"}],
                },
            ],
        },
    },
}
SYSTEM_ONE: dict[str, Any] = {
    "choice": {
        "summary": "A choice",
        "value": {
            "state": {"message": _DAMAGE},
            "questions": {
                "team": {
                    "type": "choice",
                    "instructions": "Which team should handle this?",
                    "criteria": {"returns": None, "billing": "invoices and payments"},
                }
            },
        },
    },
}
GENERATE: dict[str, Any] = {
    "simple": {
        "summary": "Continue token ids",
        "value": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8, "temperature": 0}},
    },
}
INFILL: dict[str, Any] = {
    "simple": {
        "summary": "The body of a function",
        "value": {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n\nprint(add(1, 2))\n", "n_predict": 16},
    },
}
