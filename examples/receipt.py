"""Read the photo of a receipt into JSON that fits a schema, with a vision-language model.

    octavo serve llava-hf/llava-1.5-7b-hf
    python examples/receipt.py receipt.jpg

Another server's URL can be given as `--url URL` in front. No library is needed.
"""

from __future__ import annotations

import base64
import json
import mimetypes
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

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "price": {"type": "string", "pattern": r"^\d{1,5}\.\d\d$"},
    },
    "required": ["name", "price"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "shop": {"type": "string", "maxLength": 30},
        "date": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\d$"},
        "items": {"type": "array", "items": ITEM, "maxItems": 8},
        "total": {"type": "string", "pattern": r"^\d{1,5}\.\d\d$"},
    },
    "required": ["shop", "date", "items", "total"],
    "additionalProperties": False,
}


def read(name: str, image: bytes) -> dict[str, Any]:
    """The receipt of a file's bytes; the server knows JPEG, PNG, WebP, GIF and BMP."""
    kind = mimetypes.guess_type(name)[0] or "image/jpeg"
    shown = {"url": f"data:{kind};base64,{base64.b64encode(image).decode()}"}
    parts = [{"type": "image_url", "image_url": shown}, {"type": "text", "text": "Read this receipt. Answer in JSON."}]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "receipt", "schema": SCHEMA}},
        "temperature": 0,
    }
    request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        receipt: dict[str, Any] = json.loads(json.load(answer)["choices"][0]["message"]["content"])
    return receipt


for name in arguments:  # one by one: a body may have 16 MiB
    print(f"--- {name}")
    try:
        print(json.dumps(read(name, Path(name).read_bytes()), ensure_ascii=False))
    except HTTPError as error:
        print(json.load(error)["error"]["message"])
