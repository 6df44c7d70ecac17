"""What programs do with LangChain's OpenAI classes, in a process of its own: URL of the service as the argument.

Prints what was checked and the OpenAI client's version as JSON; an assertion that fails ends it with a traceback.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
import pytest
import tiktoken
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

MODEL = "octavo-demo"
LOOP = asyncio.Runner()  # one for all: LangChain keeps connections that belong to the loop they were made in


def chat(url: str, **fields: Any) -> ChatOpenAI:
    options = {"temperature": 0, "max_tokens": 8, **fields}
    return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240, **options)


def completion(url: str, **fields: Any) -> OpenAI:
    options = {"temperature": 0, "max_tokens": 8, **fields}
    return OpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240, **options)


def check_chat(url: str) -> None:
    said = chat(url).invoke([SystemMessage("Be brief."), HumanMessage("Hello")])
    assert said.content
    assert said.usage_metadata is not None
    assert said.usage_metadata["output_tokens"] <= 8
    assert said.usage_metadata["input_token_details"]["cache_read"] >= 0
    assert said.response_metadata["model_name"] == MODEL
    assert said.response_metadata["finish_reason"] in ("stop", "length")
    again = chat(url).invoke([HumanMessage("Hello"), AIMessage(said.content), HumanMessage("And?")])
    assert again.content
    parts = chat(url).invoke([HumanMessage(content=[{"type": "text", "text": "Hello"}])])
    assert parts.content == chat(url).invoke("Hello").content


def check_chat_streams(url: str) -> None:
    whole = chat(url).invoke("Hello").content
    chunks = list(chat(url, stream_usage=True).stream("Hello"))
    assert "".join(chunk.content for chunk in chunks) == whole
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata is not None
    assert total.usage_metadata["output_tokens"] <= 8
    assert total.response_metadata["finish_reason"] in ("stop", "length")

    async def run() -> str:
        return "".join([chunk.content async for chunk in chat(url).astream("Hello")])

    assert LOOP.run(run()) == whole


def check_chat_batches(url: str) -> None:
    model = chat(url)
    answers = model.batch(["One", "Two", "Three"])
    assert [answer.content for answer in answers] == [model.invoke(text).content for text in ("One", "Two", "Three")]
    result = chat(url, n=3, temperature=1, seed=5).generate([[HumanMessage("Hello")]])
    assert len(result.generations[0]) == 3

    async def run() -> Any:
        return await model.abatch(["One", "Two"])

    assert [answer.content for answer in LOOP.run(run())] == [answer.content for answer in answers[:2]]


def check_chat_options(url: str) -> None:
    whole = chat(url).invoke("Hello").content
    stop = whole[3:5]
    assert chat(url).bind(stop=[stop]).invoke("Hello").content == whole.partition(stop)[0]
    assert chat(url, stop_sequences=[stop]).invoke("Hello").content == whole.partition(stop)[0]
    scored = chat(url, logprobs=True, top_logprobs=2).invoke("Hello")
    content = scored.response_metadata["logprobs"]["content"]
    assert len(content[0]["top_logprobs"]) == 2
    extra = chat(url, extra_body={"top_k": 3, "ignore_eos": True}, frequency_penalty=0.5, presence_penalty=0.5)
    assert extra.invoke("Hello").usage_metadata["output_tokens"] == 8
    chain = ChatPromptTemplate.from_messages([("user", "Say {what}")]) | chat(url) | StrOutputParser()
    assert chain.invoke({"what": "it"})


def check_completions(url: str) -> None:
    model = completion(url)
    whole = model.invoke("Once upon a time")
    assert whole
    assert "".join(model.stream("Once upon a time")) == whole
    assert model.batch(["Once upon a time", "Two"])[0] == whole
    result = model.generate(["Once upon a time", "Two"])
    assert [part[0].text for part in result.generations] == [whole, model.invoke("Two")]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 16
    stop = whole[3:5]
    assert model.invoke("Once upon a time", stop=[stop]) == whole.partition(stop)[0]
    several = completion(url, n=2, best_of=3, temperature=1, logprobs=2, seed=1).generate(["One"])
    assert len(several.generations[0]) == 2
    info = several.generations[0][0].generation_info
    assert info is not None
    assert len(info["logprobs"]["tokens"]) <= 8

    async def run() -> tuple[str, str]:
        streamed = "".join([part async for part in model.astream("Once upon a time")])
        return await model.ainvoke("Once upon a time"), streamed

    assert LOOP.run(run()) == (whole, whole)


def embeddings(url: str, **fields: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240,
        **{"check_embedding_ctx_length": False, **fields},
    )  # fmt: skip


def near(one: list[float], other: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6


def check_embeddings(url: str) -> None:
    model = embeddings(url)
    texts = ["One", "Two and more", "One"]
    vectors = model.embed_documents(texts)
    assert vectors[0] == vectors[2] != vectors[1]
    assert near(model.embed_query("One"), vectors[0])
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-5 for vector in vectors)
    assert near(embeddings(url, model_kwargs={"encoding_format": "float"}).embed_query("One"), vectors[0])
    assert len(embeddings(url, dimensions=8).embed_query("One")) == 8
    many = model.embed_documents([f"text {number}" for number in range(1500)])  # in two requests, of 1000 at most
    assert len(many) == 1500
    assert near(many[1200], model.embed_query("text 1200"))

    async def run() -> tuple[list[float], list[list[float]]]:
        return await model.aembed_query("One"), await model.aembed_documents(texts)

    query, documents = LOOP.run(run())
    assert near(query, vectors[0])
    assert all(near(one, other) for one, other in zip(documents, vectors, strict=True))


def check_embeddings_as_token_ids(url: str) -> None:
    """By default texts are sent as the ids of OpenAI's tokenizer, which would be fetched: two of bytes stand for it."""
    model = embeddings(url, check_embedding_ctx_length=True)
    for first, fits in ((10, True), (10**6, False)):
        ranks = {bytes([byte]): first + byte for byte in range(256)}
        stand_in = tiktoken.Encoding("stand-in", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
        tiktoken.registry.ENCODINGS["cl100k_base"] = stand_in
        if fits:
            ids = [[first + byte for byte in text.encode()] for text in ("One", "Two")]
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
                wanted = [item.embedding for item in client.embeddings.create(model=MODEL, input=ids).data]
            found = model.embed_documents(["One", "Two"])
            assert all(near(one, other) for one, other in zip(found, wanted, strict=True))
        else:
            with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
                model.embed_query("One")


class Book(BaseModel):
    """A book."""

    title: str = Field(min_length=1, max_length=12, pattern="^[A-Za-z ]+$")
    kind: Literal["novel", "poem"]
    pages: int = Field(ge=1, le=999)


def check_structured_output(url: str) -> None:
    for method in ("function_calling", "json_schema"):
        model = chat(url, max_tokens=120, temperature=1, seed=1)
        assert isinstance(model.with_structured_output(Book, method=method).invoke("Name a book."), Book)
    # No schema holds in this mode, and the bundled model knows no JSON: what it writes is an object, or its beginning.
    model = chat(url, max_tokens=40, temperature=0)
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        model.with_structured_output(Book, method="json_mode").invoke("Name a book.")
    assert (cut.value.completion.choices[0].message.content or "").startswith("{")


def calculate(expression: str) -> str:
    """Calculates."""
    first, sign, second = expression.split()
    assert sign == "*"
    return str(int(first) * int(second))


def check_tools(url: str) -> None:
    for fields in ({}, {"use_responses_api": True}):
        model = chat(url, max_tokens=100, **fields).bind_tools([calculate])
        asked = [HumanMessage("What is 12 * 34?")]
        called = model.invoke(asked)
        (call,) = called.tool_calls
        assert (call["name"], call["args"]) == ("calculate", {"expression": "12 * 34"})
        result = ToolMessage(calculate(**call["args"]), tool_call_id=call["id"])
        assert "408" in model.invoke([*asked, called, result]).text
        total = None
        for chunk in model.stream(asked):
            total = chunk if total is None else total + chunk
        assert total is not None
        assert total.tool_calls[0]["args"] == {"expression": "12 * 34"}


def check_errors(url: str) -> None:
    refused: list[Any] = [
        (openai.BadRequestError, lambda: chat(url, temperature=-1).invoke("Hello")),
        (openai.BadRequestError, lambda: completion(url, temperature=-1).invoke("Hello")),
        (openai.BadRequestError, lambda: list(completion(url, temperature=-1).stream("Hello"))),
        (openai.NotFoundError, lambda: chat(url).bind(model="gpt-9").invoke("Hello")),
        (ContextOverflowError, lambda: chat(url).invoke("word " * 600)),
        (openai.BadRequestError, lambda: completion(url).invoke("word " * 600)),
        (openai.BadRequestError, lambda: embeddings(url).embed_query("word " * 900)),
        (openai.BadRequestError, lambda: embeddings(url, dimensions=10**6).embed_query("a")),
    ]
    for kind, call in refused:
        with pytest.raises(kind):
            call()


def main() -> None:
    checked = []
    for name, check in sorted(globals().items()):
        if name.startswith("check_"):
            check(sys.argv[1])
            checked.append(name)
    print(json.dumps({"openai": openai.__version__, "checked": checked}))


if __name__ == "__main__":
    main()
