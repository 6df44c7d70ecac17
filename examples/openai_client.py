"""OpenAI's own client: a chat, a stream, several samples, and beam search through `extra_body`.

    octavo serve
    python examples/openai_client.py

The client comes with `pip install openai`. Another server's URL can be given as the argument.
"""

from __future__ import annotations

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{URL}/v1", api_key="unused")  # or the key that the server wants
MODEL = client.models.list().data[0].id
QUESTION = "What is a paged cache?"


def chat() -> None:
    """One question, one answer."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_completion_tokens=48,
        temperature=0,
    )
    print(answer.choices[0].message.content)
    print(f"({answer.usage.completion_tokens} tokens, ended by {answer.choices[0].finish_reason})")


def stream() -> None:
    """The same, word by word as they are made."""
    events = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_completion_tokens=48,
        temperature=0,
        stream=True,
    )
    for event in events:
        if event.choices:
            print(event.choices[0].delta.content or "", end="", flush=True)
    print()


def samples() -> None:
    """Three different beginnings of a story; the same three for the same seed."""
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=32, temperature=0.8, top_p=0.95, n=3, seed=7
    )
    for choice in answer.choices:
        print(f"{choice.index + 1}. Once upon a time{choice.text}")


def beams() -> None:
    """The four most probable continuations as a whole: what OpenAI's API has no field for goes into `extra_body`."""
    answer = client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=16,
        n=4,
        extra_body={"num_beams": 4, "length_penalty": 1.0, "early_stopping": True},
    )
    for choice in answer.choices:
        print(f"{choice.index + 1}. Once upon a time{choice.text}")


for example in (chat, stream, samples, beams):
    print(f"--- {example.__name__}")
    example()
