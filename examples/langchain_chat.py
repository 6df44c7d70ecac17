"""LangChain: its OpenAI classes with another base_url; a prompt template, a chain, a stream and a batch.

    octavo serve
    python examples/langchain_chat.py

LangChain comes with `pip install langchain-openai`. Another server's URL can be given as the argument.
"""

from __future__ import annotations

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
served = OpenAI(base_url=f"{URL}/v1", api_key="unused").models.list().data[0].id

model = ChatOpenAI(
    base_url=f"{URL}/v1",
    api_key="unused",  # or the key that the server wants
    model=served,
    temperature=0,
    max_tokens=48,
    # Whatever Octavo knows and OpenAI does not.
    extra_body={"repetition_penalty": 1.05},
)
chain = ChatPromptTemplate.from_messages([("user", "What is {thing}?")]) | model | StrOutputParser()

print("--- invoke")
print(chain.invoke({"thing": "a paged cache"}))

print("--- stream")
for piece in chain.stream({"thing": "beam search"}):
    print(piece, end="", flush=True)
print()

print("--- batch")  # at the same time: the server puts them into the same steps
for answer in chain.batch([{"thing": "a token"}, {"thing": "attention"}]):
    print(answer)
