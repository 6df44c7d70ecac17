"""Example bodies in the API's documentation; each works unchanged with any model (score: decoder-only)."""

from __future__ import annotations

from typing import Any


def _case(summary: str, **value: Any) -> dict[str, Any]:
    return {"summary": summary, "value": value}


_HELLO = [{"role": "user", "content": "What is an octavo?"}]

COMPLETIONS: dict[str, Any] = {
    "simple": _case("Continue a text", prompt="Once upon a time", max_tokens=32),
    "sampled": _case(
        "Two answers, drawn reproducibly",
        prompt="Once upon a time",
        n=2,
        temperature=0.8,
        top_p=0.95,
        seed=7,
        stop=["\n\n"],
    ),
    "beams": _case("Beam search", prompt="Once upon a time", n=2, num_beams=4, length_penalty=1.0),
    "stream": _case(
        "A stream with its usage at the end",
        prompt="Once upon a time",
        stream=True,
        stream_options={"include_usage": True},
    ),
    "structured": _case(
        "A text in a given format",
        prompt="The colour is",
        structured_outputs={"choice": ["red", "green", "blue"]},
        num_beams=3,
    ),
    "score": _case(
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
    "simple": _case("A question", messages=_HELLO, max_completion_tokens=32),
    "instructed": _case(
        "With instructions, as a stream", messages=[{"role": "developer", "content": "Be brief."}, *_HELLO], stream=True
    ),
    "structured": _case(
        "JSON that matches a schema",
        messages=[{"role": "user", "content": "Name a book."}],
        response_format={"type": "json_schema", "json_schema": {"name": "book", "schema": _BOOK, "strict": True}},
    ),
    "logprobs": _case(
        "With the most probable alternatives", messages=_HELLO, max_completion_tokens=8, logprobs=True, top_logprobs=3
    ),
}
_ITEM = {"type": "message", "role": "user", "content": "Hello!"}

CONVERSATION: dict[str, Any] = {"items": _case("With a first message", items=[_ITEM], metadata={"topic": "greetings"})}

CONVERSATION_UPDATE: dict[str, Any] = {"metadata": _case("New metadata", metadata={"topic": "weather"})}

CONVERSATION_ITEMS: dict[str, Any] = {"message": _case("A message", items=[_ITEM])}

RESPONSES: dict[str, Any] = {
    "simple": _case("A question", input="What is an octavo?", max_output_tokens=32),
    "instructed": _case("With instructions, as a stream", instructions="Be brief.", input=_HELLO, stream=True),
    "items": _case(
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
    "simple": _case("A question", max_tokens=32, messages=_HELLO),
    "instructed": _case(
        "With a system prompt, as a stream", max_tokens=32, system="Be brief.", messages=_HELLO, stream=True
    ),
}
COUNT_TOKENS: dict[str, Any] = {"simple": _case("A conversation", messages=_HELLO)}
EMBEDDINGS: dict[str, Any] = {
    "simple": _case("A text's vector", input="The food was delicious."),
    "several": _case("Several texts, in base64", input=["A cat sat.", "A dog ran."], encoding_format="base64"),
    "cut": _case(
        "Fewer features, and long texts are cut",
        input="The food was delicious.",
        dimensions=2,
        truncate_prompt_tokens=-1,
    ),
}
POOLING: dict[str, Any] = {
    "simple": _case("The output of the model's head for two texts", input=["A cat sat.", "It rains."]),
    "half": _case("Base64, half precision", input="A cat sat.", encoding_format="base64", embed_dtype="float16"),
}
# Each works on a model that supports the endpoint (fill-mask: with BERT's mask token).
_QUERY = "How many leaves does a sheet folded three times have?"
_DOCUMENTS = [
    "A folio is a sheet that is folded once.",
    "A sheet folded three times makes an octavo: eight leaves, sixteen pages.",
    "The harbour lies north of the town.",
]

SCORE: dict[str, Any] = {
    "one_to_many": _case("One text against several", text_1=_QUERY, text_2=_DOCUMENTS),
    "pairs": _case("Pair by pair", text_1=["A cat sat.", "It rains."], text_2=["There sat a cat.", "The sun is out."]),
    "queries": _case("Newer names, and raw scores", queries=_QUERY, documents=_DOCUMENTS, use_activation=False),
}
RERANK: dict[str, Any] = {
    "simple": _case("The two best", query=_QUERY, documents=_DOCUMENTS, top_n=2),
    "objects": _case(
        "Documents as objects, results without texts",
        query=_QUERY,
        documents=[{"text": text} for text in _DOCUMENTS],
        return_documents=False,
    ),
}
CLASSIFY: dict[str, Any] = {
    "simple": _case("Two texts", input=["What a fine day!", "The train was late again."]),
    "pair": _case(
        "Two texts that are read together",
        input={"text": "A cat sat on the mat.", "text_pair": "An animal was sitting."},
    ),
    "entities": _case("Models that classify tokens: entities", input="Anna Bergen lives in Oslo."),
}
ANSWER: dict[str, Any] = {
    "simple": _case("One question", question="Where does Anna live?", context="Anna Bergen lives in Oslo.", top_k=2),
    "several": _case(
        "Several questions about one text",
        question=["Where does Anna live?", "Who lives in Oslo?"],
        context="Anna Bergen lives in Oslo.",
        handle_impossible_answer=True,
    ),
}
ENTITIES: dict[str, Any] = {
    "simple": _case("One text", input="Anna Bergen lives in Oslo.", labels=["person", "city"], threshold=0.4),
    "several": _case(
        "Several texts, nested entities",
        input=["Anna lives in Oslo.", "The choir of Bergen is late."],
        labels=["person", "city", "group of people"],
        flat_ner=False,
        multi_label=True,
    ),
}
FILL_MASK: dict[str, Any] = {
    "simple": _case("One mask", input="Paris is the [MASK] of France.", top_k=3),
    "several": _case("Several masks", input=["The [MASK] sat on the [MASK].", "It is [MASK]."]),
}
TRANSLATE: dict[str, Any] = {
    "simple": _case("A text", q="The ship is in the harbour.", source="en", target="de"),
    "several": _case(
        "Several texts, with another translation of each",
        q=["Good morning.", "It rains."],
        source="en",
        target="de",
        alternatives=1,
    ),
}
TOKENIZE: dict[str, Any] = {
    "prompt": _case("A text", prompt="Once upon a time"),
    "messages": _case("A conversation", messages=_HELLO),
}
DETOKENIZE: dict[str, Any] = {"ids": _case("Token ids", tokens=[1, 2, 3])}
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
    "simple": _case("A question", messages=_HELLO, stream=False, options={"num_predict": 32}),
    "stream": _case("A stream", messages=_HELLO, options={"temperature": 0.2, "seed": 7}),
    "structured": _case(
        "JSON of a schema", messages=[{"role": "user", "content": "Name a book."}], format=_BOOK, stream=False
    ),
}
OLLAMA_GENERATE: dict[str, Any] = {
    "simple": _case("A question", prompt="What is an octavo?", stream=False),
    "raw": _case("Continue a text", prompt="Once upon a time", raw=True, options={"num_predict": 32}, stream=False),
}
OLLAMA_EMBED: dict[str, Any] = {
    "several": _case("Two texts", input=["A sheet is folded.", "An octavo has eight leaves."])
}
BATCH: dict[str, Any] = {
    "day": _case(
        "The requests of a file", input_file_id="file-abc", endpoint="/v1/chat/completions", completion_window="24h"
    )
}
OLLAMA_NAME: dict[str, Any] = {"served": _case("The served model", model="default")}
OLLAMA_EMBEDDINGS: dict[str, Any] = {"one": _case("A text", prompt="A sheet is folded.")}


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
    "three": _case(
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
    "choice": _case(
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
    "simple": _case("Continue token ids", token_ids=[5, 6, 7], sampling_params={"max_tokens": 8, "temperature": 0})
}
INFILL: dict[str, Any] = {
    "simple": _case(
        "The body of a function",
        input_prefix="def add(a, b):\n    ",
        input_suffix="\n\nprint(add(1, 2))\n",
        n_predict=16,
    )
}
