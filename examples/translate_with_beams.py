"""Beam search with an encoder-decoder: a translation, greedy and with beams, and how probable each is as a whole.

    octavo serve --demo seq2seq
    python examples/translate_with_beams.py

The bundled model translates a small invented language, in which "luma" is "Later" in 40 sentences of 100, and "After
a while", "After some time" or "After that" in 20 each. So "After" is the most probable first word, and greedy search
takes it; yet the sentence with "Later" is more probable as a whole, and beam search finds it.

Another server's URL can be given as the argument, and a text after it. The client comes with `pip install openai`.
"""

from __future__ import annotations

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
TEXT = sys.argv[2] if len(sys.argv) > 2 else "luma li vulpa li libran trovet."
LONGER = sys.argv[2] if len(sys.argv) > 2 else "li vulpa li libran trovet e li pika avi kantet."
client = OpenAI(base_url=f"{URL}/v1", api_key="unused")
MODEL = client.models.list().data[0].id


def translate(title: str, n: int = 1, **fields: object) -> None:
    """Print the `n` best translations; the prompt is what the encoder reads."""
    answer = client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=32, n=n, temperature=0, logprobs=0, extra_body=fields
    )
    print(f"--- {title}")
    for choice in answer.choices:
        total = sum(choice.logprobs.token_logprobs)
        print(f"log-probability {total:7.3f}  {choice.text}")


def stream(num_beams: int) -> None:
    """Send the text that all live beams share as soon as it is certain."""
    print(f"--- {num_beams} beams, as they agree: {LONGER}")
    events = client.completions.create(
        model=MODEL,
        prompt=LONGER,
        max_tokens=32,
        stream=True,
        extra_body={"num_beams": num_beams, "length_penalty": 0.0},
    )
    print("".join(f"[{event.choices[0].text}]" for event in events if event.choices and event.choices[0].text))


print(TEXT)
translate("greedy", num_beams=1)
translate("4 beams", n=4, num_beams=4, length_penalty=0.0)
stream(num_beams=4)
