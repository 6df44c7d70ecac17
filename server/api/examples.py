"""Example bodies in the API's documentation; each works unchanged with any model (score: decoder-only)."""

from __future__ import annotations

from typing import Any


def example(summary: str, **value: Any) -> dict[str, Any]:
    """An example body with its title."""
    return {"summary": summary, "value": value}


_HELLO = [{"role": "user", "content": "What is an octavo?"}]

COMPLETIONS: dict[str, Any] = {
    "simple": example("Continue a text", prompt="Once upon a time", max_tokens=32),
    "sampled": example(
        "Two answers, drawn reproducibly",
        prompt="Once upon a time",
        n=2,
        temperature=0.8,
        top_p=0.95,
        seed=7,
        stop=["\n\n"],
    ),
    "beams": example("Beam search", prompt="Once upon a time", n=2, num_beams=4, length_penalty=1.0),
    "stream": example(
        "A stream with its usage at the end",
        prompt="Once upon a time",
        stream=True,
        stream_options={"include_usage": True},
    ),
    "structured": example(
        "A text in a given format",
        prompt="The colour is",
        structured_outputs={"choice": ["red", "green", "blue"]},
        num_beams=3,
    ),
    "score": example(
        "Log-probabilities of given texts", prompt=["A cat sat.", "Cat a sat."], echo=True, logprobs=1, max_tokens=0
    ),
}
RENDER = {name: example for name, example in COMPLETIONS.items() if name != "score"}  # it generates nothing
_BOOK = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "pages": {"type": "integer", "maximum": 999}},
    "required": ["title", "pages"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "simple": example("A question", messages=_HELLO, max_completion_tokens=32),
    "instructed": example(
        "With instructions, as a stream", messages=[{"role": "developer", "content": "Be brief."}, *_HELLO], stream=True
    ),
    "structured": example(
        "JSON that matches a schema",
        messages=[{"role": "user", "content": "Name a book."}],
        response_format={"type": "json_schema", "json_schema": {"name": "book", "schema": _BOOK, "strict": True}},
    ),
    "logprobs": example(
        "With the most probable alternatives", messages=_HELLO, max_completion_tokens=8, logprobs=True, top_logprobs=3
    ),
}
_ITEM = {"type": "message", "role": "user", "content": "Hello!"}

CONVERSATION: dict[str, Any] = {
    "items": example("With a first message", items=[_ITEM], metadata={"topic": "greetings"})
}

CONVERSATION_UPDATE: dict[str, Any] = {"metadata": example("New metadata", metadata={"topic": "weather"})}

CONVERSATION_ITEMS: dict[str, Any] = {"message": example("A message", items=[_ITEM])}

RESPONSES: dict[str, Any] = {
    "simple": example("A question", input="What is an octavo?", max_output_tokens=32),
    "instructed": example("With instructions, as a stream", instructions="Be brief.", input=_HELLO, stream=True),
    "items": example(
        "A conversation as items",
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello to you."}]},
            *_HELLO,
        ],
        max_output_tokens=32,
    ),
}
MESSAGES: dict[str, Any] = {
    "simple": example("A question", max_tokens=32, messages=_HELLO),
    "instructed": example(
        "With a system prompt, as a stream", max_tokens=32, system="Be brief.", messages=_HELLO, stream=True
    ),
}
COUNT_TOKENS: dict[str, Any] = {"simple": example("A conversation", messages=_HELLO)}
EMBEDDINGS: dict[str, Any] = {
    "simple": example("A text's vector", input="The food was delicious."),
    "several": example("Several texts, in base64", input=["A cat sat.", "A dog ran."], encoding_format="base64"),
    "cut": example(
        "Fewer features, and long texts are cut",
        input="The food was delicious.",
        dimensions=2,
        truncate_prompt_tokens=-1,
    ),
}
POOLING: dict[str, Any] = {
    "simple": example("The output of the model's head for two texts", input=["A cat sat.", "It rains."]),
    "half": example("Base64, half precision", input="A cat sat.", encoding_format="base64", embed_dtype="float16"),
}
# Each works on a model that supports the endpoint (fill-mask: with BERT's mask token).
_QUERY = "How many leaves does a sheet folded three times have?"
_DOCUMENTS = [
    "A folio is a sheet that is folded once.",
    "A sheet folded three times makes an octavo: eight leaves, sixteen pages.",
    "The harbour lies north of the town.",
]

SCORE: dict[str, Any] = {
    "one_to_many": example("One text against several", text_1=_QUERY, text_2=_DOCUMENTS),
    "pairs": example(
        "Pair by pair", text_1=["A cat sat.", "It rains."], text_2=["There sat a cat.", "The sun is out."]
    ),
    "queries": example("Newer names, and raw scores", queries=_QUERY, documents=_DOCUMENTS, use_activation=False),
}
RERANK: dict[str, Any] = {
    "simple": example("The two best", query=_QUERY, documents=_DOCUMENTS, top_n=2),
    "objects": example(
        "Documents as objects, results without texts",
        query=_QUERY,
        documents=[{"text": text} for text in _DOCUMENTS],
        return_documents=False,
    ),
}
TOKENIZE: dict[str, Any] = {
    "prompt": example("A text", prompt="Once upon a time"),
    "messages": example("A conversation", messages=_HELLO),
}
DETOKENIZE: dict[str, Any] = {"ids": example("Token ids", tokens=[1, 2, 3])}
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
    "simple": example("A question", messages=_HELLO, stream=False, options={"num_predict": 32}),
    "stream": example("A stream", messages=_HELLO, options={"temperature": 0.2, "seed": 7}),
    "structured": example(
        "JSON of a schema", messages=[{"role": "user", "content": "Name a book."}], format=_BOOK, stream=False
    ),
}
OLLAMA_GENERATE: dict[str, Any] = {
    "simple": example("A question", prompt="What is an octavo?", stream=False),
    "raw": example("Continue a text", prompt="Once upon a time", raw=True, options={"num_predict": 32}, stream=False),
}
OLLAMA_EMBED: dict[str, Any] = {
    "several": example("Two texts", input=["A sheet is folded.", "An octavo has eight leaves."])
}
BATCH: dict[str, Any] = {
    "day": example(
        "The requests of a file", input_file_id="file-abc", endpoint="/v1/chat/completions", completion_window="24h"
    )
}
OLLAMA_NAME: dict[str, Any] = {"served": example("The served model", model="default")}
OLLAMA_EMBEDDINGS: dict[str, Any] = {"one": example("A text", prompt="A sheet is folded.")}


def _events(description: str, example: str) -> dict[str, Any]:
    fields = {"event": {"type": "string"}, "data": {"type": "string", "description": description}}
    schema = {"type": "object", "properties": fields, "required": ["event", "data"]}
    return {"text/event-stream": {"itemSchema": schema, "example": example}}


RESPONSE_STREAM = _events(
    "A typed event as JSON, with its sequence_number.",
    'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "An", ...}\n\n',
)
MESSAGE_STREAM = _events(
    "A typed event as JSON.", 'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0, ...}\n\n'
)
EXPOSITION: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}, "example": "octavo_engine_up 1.0\n"}}
_DAMAGE = "The package arrived with a broken screen."
DECISIONS: dict[str, Any] = {
    "three": example(
        "A predicate, a choice and a score",
        input=_DAMAGE,
        questions=[
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
    )
}
SYSTEM_ONE: dict[str, Any] = {
    "choice": example(
        "A choice",
        state={"message": _DAMAGE},
        questions={
            "team": {
                "type": "choice",
                "instructions": "Which team should handle this?",
                "criteria": {"returns": None, "billing": "invoices and payments"},
            }
        },
    )
}
GENERATE: dict[str, Any] = {
    "simple": example("Continue token ids", token_ids=[5, 6, 7], sampling_params={"max_tokens": 8, "temperature": 0})
}
