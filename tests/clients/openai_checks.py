"""What programs do with the OpenAI client, in a process of its own: URL of the service as the argument.

Prints what was checked and the client's version as JSON; an assertion that fails ends it with a traceback.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "octavo-demo"
HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: Any = {"model": MODEL, "temperature": 0}


def check_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL)
    assert (card.id, card.object) == (MODEL, "model")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("org/other")
    assert (unknown.value.code, unknown.value.status_code) == ("model_not_found", 404)


def check_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt=["One", "Two"], n=2, best_of=2, max_tokens=6, logprobs=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text != ""
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 6
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    echoed = client.completions.create(**GREEDY, prompt=[[5, 6, 7]], echo=True, logprobs=0, max_tokens=1)
    assert echoed.choices[0].logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs is not None
    assert echoed.choices[0].logprobs.token_logprobs[0] is None
    seeded = [client.completions.create(model=MODEL, prompt="One", seed=3, max_tokens=9).choices[0] for _ in "ab"]
    assert seeded[0].text == seeded[1].text
    stop = seeded[0].text[2:4]
    stopped = client.completions.create(model=MODEL, prompt="One", seed=3, max_tokens=9, stop=[stop, "never"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == seeded[0].text.partition(stop)[0]


def check_completion_streams(client: openai.OpenAI) -> None:
    fields: Any = {**GREEDY, "prompt": "One", "max_tokens": 12}
    text = client.completions.create(**fields).choices[0].text
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    with client.completions.create(**{**fields, "max_tokens": 400}, stream=True) as stream:
        next(iter(stream))  # and leave


def check_embeddings(client: openai.OpenAI) -> None:
    texts = ["One", "Two and more", "One"]
    several = client.embeddings.create(model=MODEL, input=texts)  # asks for base64, and reads it
    assert (several.object, several.model) == ("list", MODEL)
    assert [item.index for item in several.data] == [0, 1, 2]
    vectors = [item.embedding for item in several.data]
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-5 for vector in vectors)
    assert vectors[0] == vectors[2] != vectors[1]
    assert several.usage.prompt_tokens == several.usage.total_tokens > 3
    alone = client.embeddings.create(model=MODEL, input="One", encoding_format="float").data[0].embedding
    assert max(abs(a - b) for a, b in zip(alone, vectors[0], strict=True)) < 1e-6
    short = client.embeddings.create(model=MODEL, input="One", dimensions=8).data[0].embedding
    assert len(short) == 8
    assert abs(sum(x * x for x in short) - 1) < 1e-5
    ids = client.embeddings.create(model=MODEL, input=[[5, 6, 7], [8]])
    assert ids.usage.prompt_tokens == 4
    assert client.embeddings.create(model=MODEL, input=[5, 6, 7]).data[0].embedding == pytest.approx(
        ids.data[0].embedding, abs=1e-6
    )
    many = client.embeddings.create(model=MODEL, input=[f"text {number}" for number in range(2048)])
    assert [item.index for item in many.data] == list(range(2048))
    cut: Any = {"truncate_prompt_tokens": 4}
    raw = client.embeddings.with_raw_response.create(model=MODEL, input="word " * 900, extra_body=cut, user="me")
    assert "x-octavo-ignored-fields" not in raw.headers
    assert raw.parse().usage.prompt_tokens == 4
    refused: list[tuple[Any, str]] = [
        ({"input": ""}, "input"),
        ({"input": ["word " * 900]}, "input"),
        ({"input": [[10**6]]}, "input"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
    ]
    for fields, param in refused:
        with pytest.raises(openai.BadRequestError, match=param) as problem:
            client.embeddings.create(**{"model": MODEL, **fields})
        assert problem.value.param == param
    (card,) = client.models.list()
    assert "/v1/embeddings" in card.model_dump()["endpoints"]


def check_chat(client: openai.OpenAI) -> None:
    fields: Any = {**GREEDY, "messages": HELLO, "max_completion_tokens": 10}
    (choice,) = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2).choices
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert all(len(item.top_logprobs) == 2 for item in choice.logprobs.content)
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
    assert deltas[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in deltas) == choice.message.content
    assert [part.finish_reason for part in deltas if part.finish_reason] == [choice.finish_reason]
    assert choice.message.content
    stop = choice.message.content[6:8]  # the helper takes an answer that was cut off for an error
    with client.chat.completions.stream(**fields, stop=stop) as events:
        said = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert said == final.choices[0].message.content == choice.message.content.partition(stop)[0]
    history = [*HELLO, choice.message, {"role": "user", "content": [{"type": "text", "text": "And?"}]}]
    assert client.chat.completions.create(**{**fields, "messages": history}).choices[0].message.content


def check_responses(client: openai.OpenAI) -> None:
    fields: Any = {**GREEDY, "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 10}
    whole = client.responses.create(**fields, include=["message.output_text.logprobs"], top_logprobs=2)
    (item,) = whole.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert whole.output_text == part.text != ""
    assert part.logprobs is not None
    assert all(len(entry.top_logprobs or ()) == 2 for entry in part.logprobs)
    assert whole.usage is not None
    assert len(part.logprobs) == whole.usage.output_tokens
    assert whole.store is False  # type: ignore[attr-defined]
    events = list(client.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", f"response.{whole.status}")
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == whole.output_text
    stop = whole.output_text[6:8]  # the helper takes an answer that was cut off for an error
    with client.responses.stream(**fields, extra_body={"stop": stop}) as stream:
        assert stream.get_final_response().output_text == whole.output_text.partition(stop)[0]
    history: Any = [*HELLO, *whole.output, {"role": "user", "content": "And?"}]
    assert client.responses.create(**{**fields, "input": history}).output_text
    refused: list[tuple[Any, str]] = [
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"previous_response_id": whole.id}, "previous_response_id"),
        ({"input": "word " * 600}, "input"),
    ]
    for other, param in refused:
        with pytest.raises(openai.BadRequestError) as problem:
            client.responses.create(**{**fields, **other})
        assert problem.value.param == param
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="--response-store is not set"):
            call(whole.id)


class Book(BaseModel):
    """What an answer must look like."""

    title: str = Field(min_length=1, max_length=12, pattern="^[A-Za-z ]+$")
    kind: Literal["novel", "poem"]
    pages: int = Field(ge=1, le=999)


class Calculate(BaseModel):
    """A function that the bundled model can call."""

    expression: str


NOTHING = {"name": "nothing", "schema": {"not": {}}}
SUM: Any = [{"role": "user", "content": "What is 12 * 34?"}]


def check_parsed_answers(client: openai.OpenAI) -> None:
    asked: Any = {**GREEDY, "messages": HELLO, "response_format": Book, "max_tokens": 120}
    assert isinstance(client.chat.completions.parse(**asked).choices[0].message.parsed, Book)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed is not None
    wanted: Any = {**GREEDY, "input": "Hello", "text_format": Book, "max_output_tokens": 120}
    assert isinstance(client.responses.parse(**wanted).output_parsed, Book)
    with client.responses.stream(**wanted) as events:
        assert isinstance(events.get_final_response().output_parsed, Book)


def check_tools(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Calculate, name="calculate")]
    asked: Any = {**GREEDY, "tools": tools, "max_completion_tokens": 100}
    for more in ({}, {"response_format": Book}, {"tool_choice": "required"}):
        (choice,) = client.chat.completions.parse(**asked, messages=SUM, **more).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert call.function.parsed_arguments == Calculate(expression="12 * 34")
        result = {"role": "tool", "tool_call_id": call.id, "content": "408"}
        last = client.chat.completions.create(**asked, messages=[*SUM, choice.message, result])
        assert last.choices[0].message.content == "12 * 34 = 408."
    flat: Any = [{"type": "function", "name": "calculate", "strict": True, "parameters": Calculate.model_json_schema()}]
    flat[0]["parameters"]["additionalProperties"] = False
    first = client.responses.create(**GREEDY, input=SUM, tools=flat)
    called = first.output[-1]
    assert called.type == "function_call"
    assert json.loads(called.arguments) == {"expression": "12 * 34"}
    results = [{"type": "function_call_output", "call_id": called.call_id, "output": "408"}]
    assert client.responses.create(**GREEDY, input=[*SUM, *first.output, *results], tools=flat).output_text


def check_lowered_length(client: openai.OpenAI) -> None:
    """A limit above the context is lowered to what fits, with a notice in a header."""
    raw = client.chat.completions.with_raw_response.create(**GREEDY, messages=HELLO, max_tokens=100_000, stop=["e"])
    assert raw.headers["x-octavo-ignored-fields"] == "max_tokens"
    assert raw.parse().choices[0].finish_reason == "stop"
    response = client.responses.with_raw_response.create(**GREEDY, input="One", max_output_tokens=100_000)
    assert response.headers["x-octavo-ignored-fields"] == "max_output_tokens"
    assert response.parse().output_text


def check_errors(client: openai.OpenAI) -> None:
    refused: list[tuple[Any, str]] = [
        ({"temperature": -1}, "temperature"),
        ({"n": 1000}, "n"),
        ({"functions": [{"name": "f", "parameters": {}}]}, "functions"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ]
    for fields, param in refused:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as problem:
                client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "stream": stream, **fields})
            assert (problem.value.param or "").startswith(param)
            assert problem.value.code
            assert problem.value.type == "invalid_request_error"
    calls: list[Any] = [
        lambda: client.completions.create(model="gpt-9", prompt="a"),
        lambda: client.embeddings.create(model="text-embedding-3-small", input="a"),
        lambda: client.moderations.create(input="a"),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError) as missing:
            call()
        assert missing.value.code in ("model_not_found", "unknown_route")


def check_headers_and_timeouts(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, max_tokens=2, user="me", extra_body={"frobnicate": 1}
    )
    assert raw.headers["x-octavo-ignored-fields"] == "frobnicate"
    assert raw.parse().choices[0].message.content
    with client.completions.with_streaming_response.create(model=MODEL, prompt="a", max_tokens=2) as answer:
        assert answer.headers["content-type"] == "application/json"
        assert b"choices" in answer.read()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.001).completions.create(
            model=MODEL, prompt="a", max_tokens=400, n=32, extra_body={"ignore_eos": True}
        )


def check_async(client: openai.OpenAI) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as other:
            stream = await other.chat.completions.create(**GREEDY, messages=HELLO, max_tokens=5, stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            whole = await other.chat.completions.create(**GREEDY, messages=HELLO, max_tokens=5)
            assert "".join(parts) == whole.choices[0].message.content
            assert [model.id async for model in other.models.list()] == [MODEL]
            vectors = await asyncio.gather(
                *(other.embeddings.create(model=MODEL, input=text) for text in ("One", "Two"))
            )
            assert vectors[0].data[0].embedding != vectors[1].data[0].embedding

    asyncio.run(run())


def check_what_vllm_adds(client: openai.OpenAI) -> None:
    beams = client.completions.create(
        model=MODEL, prompt="a", n=2, max_tokens=5, extra_body={"use_beam_search": True, "return_token_ids": True}
    )
    first, second = beams.choices
    assert first.text != second.text
    assert len(first.model_dump()["token_ids"]) == 5


def main() -> None:
    checked = []
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=240) as client:
        for name, check in sorted(globals().items()):
            if name.startswith("check_"):
                check(client)
                checked.append(name)
    print(json.dumps({"openai": openai.__version__, "checked": checked}))


if __name__ == "__main__":
    main()
