"""Image classification: the likeliest classes of each picture, and how probable they are.

    octavo serve google/vit-base-patch16-224
    python examples/classify_images.py photos/*.jpg

Another server's URL can be given as `--url URL` in front. No library is needed.
"""

from __future__ import annotations

import base64
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


def classify(image: bytes, top_k: int = 3) -> list[dict[str, Any]]:
    """The best classes of a file's bytes, best first; the server knows JPEG, PNG, WebP, GIF and BMP."""
    body = {"input": {"image": base64.b64encode(image).decode()}, "top_k": top_k}
    request = Request(f"{url}/v1/classify", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        scores: list[dict[str, Any]] = json.load(answer)["data"][0]["scores"]
    return scores


for name in arguments:  # one by one: a body may have 16 MiB
    print(f"--- {name}")
    try:
        for found in classify(Path(name).read_bytes()):
            print(f"{found['score']:7.2%}  {found['label']}")
    except HTTPError as error:  # no picture, or one that is too large: the server says what is wrong
        print(json.load(error)["error"]["message"])
