"""Image search: which pictures go with a text. A model of both gives vectors that can be compared.

    octavo serve openai/clip-vit-base-patch32
    python examples/image_search.py "a red boat" photos/*.jpg

Another server's URL can be given as `--url URL` in front. No library is needed.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

arguments = sys.argv[1:]
url = "http://127.0.0.1:8000"
if arguments[:1] == ["--url"]:
    url, arguments = arguments[1], arguments[2:]
if len(arguments) < 2:
    sys.exit(__doc__)
text, files = arguments[0], [Path(name) for name in arguments[1:]]


def as_data_url(file: Path) -> str:
    """The file itself: the server fetches nothing."""
    kind = {".png": "png", ".webp": "webp", ".gif": "gif"}.get(file.suffix.lower(), "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"


def embed(inputs: list[dict[str, str]]) -> list[list[float]]:
    """A vector of norm 1 for each input."""
    body = json.dumps({"input": inputs}).encode()
    with urlopen(Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})) as answer:
        return [item["embedding"] for item in json.load(answer)["data"]]


(wanted,) = embed([{"text": text}])
scores = {}
for file in files:  # one by one: a body may have 16 MiB
    (found,) = embed([{"image": as_data_url(file)}])
    scores[file.name] = sum(a * b for a, b in zip(wanted, found, strict=True))
for name in sorted(scores, key=lambda name: -scores[name]):
    print(f"{scores[name]:+.3f}  {name}")
