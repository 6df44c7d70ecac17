"""Search in three ways with one model: by vectors of texts, by weights of their words, and by vectors of their words.

    octavo serve BAAI/bge-m3
    python examples/hybrid_search.py "When can a ship leave?"
    python examples/hybrid_search.py "When can a ship leave?" notes.txt

Documents are a few sentences that stand below, or the lines of a file. The first two ways find candidates, by a
document's rank in both (reciprocal rank fusion). The third one is dearer, and puts the candidates in order. Another
server's URL can be given as `--url URL` in front. No library is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

DOCUMENTS = [
    "At high tide the harbour is deep enough, and vessels put to sea.",
    "The ship was built in Bergen, of oak and pine.",
    "Bread is baked at night, so that it is fresh in the morning.",
    "A captain may leave the crew a day ashore.",
    "Trains to the north start every hour from the main station.",
    "The lighthouse has not been manned since it runs by itself.",
]
BEST = 3  # candidates

arguments = sys.argv[1:]
url = "http://127.0.0.1:8000"
if arguments[:1] == ["--url"]:
    url, arguments = arguments[1], arguments[2:]
if not arguments:
    sys.exit(__doc__)
query = arguments[0]
documents = DOCUMENTS
if len(arguments) > 1:
    documents = [line for line in Path(arguments[1]).read_text(encoding="utf-8").splitlines() if line.strip()]


def read(texts: list[str], *tasks: str) -> list[dict[str, Any]]:
    """The model's results for each text, by the names of the tasks, all in one call."""
    body = json.dumps({"task": tasks, "input": texts}).encode()
    try:
        with urlopen(Request(f"{url}/pooling", body, {"Content-Type": "application/json"})) as answer:
            return [item["data"] for item in json.load(answer)["data"]]
    except HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])


def dot(one: list[float], other: list[float]) -> float:
    """The cosine of vectors of norm 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def overlap(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """The product of two sparse vectors: words that both have, by their weights."""
    weights = {entry["index"]: entry["value"] for entry in other}
    return sum(entry["value"] * weights.get(entry["index"], 0.0) for entry in one)


def max_sim(one: list[list[float]], other: list[list[float]]) -> float:
    """How near each token of one comes to any of the other, on the average."""
    return sum(max(dot(a, b) for b in other) for a in one) / len(one)


def show(title: str, scores: dict[int, float]) -> list[int]:
    """Print documents by their scores, and return their numbers, best first."""
    ranked = sorted(scores, key=lambda number: -scores[number])
    print(f"--- {title}")
    for number in ranked[:BEST]:
        print(f"{scores[number]:7.4f}  {documents[number]}")
    return ranked


# An index would hold the documents' vectors; here they are made for each search.
(asked,) = read([query], "embed", "sparse_embed", "token_embed")
held = read(documents, "embed", "sparse_embed")
numbers = range(len(documents))
dense = show("dense", {n: dot(asked["embed"], held[n]["embed"]) for n in numbers})
sparse = show("sparse", {n: overlap(asked["sparse_embed"], held[n]["sparse_embed"]) for n in numbers})
fused = {n: 1 / (61 + dense.index(n)) + 1 / (61 + sparse.index(n)) for n in numbers}
candidates = show("both, by rank", fused)[:BEST]
tokens = read([documents[n] for n in candidates], "token_embed")
late = [max_sim(asked["token_embed"], one["token_embed"]) for one in tokens]
show("reranked by tokens", dict(zip(candidates, late, strict=True)))
