"""`allowed_token_ids` over HTTP, by a real engine: completions and chat, beams and streams, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.checkpoints import Checkpoint
from support.local_client import LocalClient
from test_http_terms import COMPLETIONS, Api, error

from engine import EngineConfig

CHAT = "/v1/chat/completions"
IDS = [5, 17, 40, 41, 99]


@pytest.fixture(scope="module")
def api(checkpoint: Callable[[str], Checkpoint]) -> Iterator[Api]:
    path = str(checkpoint("llama-grouped").path)
    client = LocalClient(EngineConfig(model=path, dtype="float32", device="cpu", show_progress=False))
    yield Api(client)
    asyncio.run(client.close())


def body(path: str) -> dict[str, Any]:
    return {"prompt": [5, 6, 7]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ab"}]}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "search",
    [{"temperature": 0}, {"n": 3, "seed": 4}, {"num_beams": 4, "n": 2}, {"temperature": 0, "stream": True}],
    ids=str,
)
def test_no_other_token_comes(api: Api, path: str, search: dict[str, Any]) -> None:
    call = api.post(path, **body(path), **search, allowed_token_ids=IDS, max_tokens=6, return_token_ids=True)
    assert call.status == 200, call.text
    lines = [call.text]
    if search.get("stream"):
        lines = [line.removeprefix("data: ") for line in call.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert len(tokens) == 6 * search.get("n", 1)
    assert set(tokens) <= set(IDS)
    assert {choice["finish_reason"] for choice in choices} - {None} == {"length"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "allowed_token_ids must hold at least one token id; leave it out to allow all."),
        ([1, 100_000], "allowed_token_ids holds token id 100000, but the vocabulary has ids 0 to 306."),
        ([-1], "allowed_token_ids must hold token ids"),
        (list(range(1025)), "allowed_token_ids may have at most 1024 token ids, got 1025."),
        ("5", "allowed_token_ids"),
        ([1.5], "allowed_token_ids"),
    ],
    ids=["empty", "unknown", "negative", "many", "text", "fraction"],
)
def test_what_is_refused(api: Api, path: str, ids: Any, message: str) -> None:
    found = error(api.post(path, **body(path), allowed_token_ids=ids, max_tokens=3), 400)
    assert message in found["message"]
    assert found["param"].startswith("allowed_token_ids")
