"""A long document: its summary, found by beam search, or the passages that answer questions about it.

    octavo serve allenai/led-large-16384-arxiv --max-num-batched-tokens 16384
    python examples/long_document.py report.txt

    octavo serve deepset/roberta-base-squad2
    python examples/long_document.py report.txt "Who wrote it?" "When was it written?"

The first model reads a document whole, up to 16,384 tokens. The second one reads it in windows of 384 tokens that
overlap, all of them in batches, so that it may be longer: up to 1,048,576 characters. Another server's URL can be given
as `--url URL` in front. No library is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

arguments = sys.argv[1:]
url = "http://127.0.0.1:8000"
if arguments[:1] == ["--url"]:
    url, arguments = arguments[1], arguments[2:]
if not arguments:
    sys.exit(__doc__)
text, questions = Path(arguments[0]).read_text(encoding="utf-8"), arguments[1:]


def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer; of a refusal, such as of a document that is too long, the server's reason is shown."""
    request = Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
    except HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])
    return found


def summarise() -> None:
    """The best of four beams; no three tokens come a second time in the same order."""
    answer = ask("/v1/completions", {"prompt": text, "num_beams": 4, "max_tokens": 256, "no_repeat_ngram_size": 3})
    usage = answer["usage"]
    print("--- summary")
    print(answer["choices"][0]["text"].strip())
    print(f"({usage['prompt_tokens']} tokens read, {usage['completion_tokens']} written)")


def answer_questions() -> None:
    """The best three passages for each question; that there is no answer is one, too."""
    body = {"question": questions, "context": text, "top_k": 3, "handle_impossible_answer": True}
    for question, found in zip(questions, ask("/v1/answer", body)["data"], strict=True):
        print(f"--- {question}")
        for passage in found["answers"]:
            start, end = passage["start"], passage["end"]
            around = " ".join(text[max(start - 30, 0) : end + 30].split())
            shown = f"{passage['answer']}  (characters {start} to {end}: ...{around}...)" if end else "no answer"
            print(f"{passage['score']:7.2%}  {shown}")


if questions:
    answer_questions()
else:
    summarise()
