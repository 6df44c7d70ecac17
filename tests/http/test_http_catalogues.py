"""Catalogues over HTTP, by a real engine: completions and chat, greedy, sampled and by beams, streamed or not; what is
refused, and where the names are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.catalogues import random_titles, write
from support.checkpoints import SHAPES, Checkpoint
from support.local_client import LocalClient
from test_http_terms import COMPLETIONS, Api, error

from engine import EngineConfig

CHAT = "/v1/chat/completions"
NAME = "llama-grouped"
EOS = SHAPES[NAME].eos
TITLES = set(random_titles(2, 200, SHAPES[NAME].vocab, without=EOS))
MINE = {"catalogue": "mine"}


@pytest.fixture(scope="module")
def api(checkpoint: Callable[[str], Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("catalogues")
    files = {"mine": write(folder / "mine.jsonl", TITLES), "few": write(folder / "few.jsonl", [(3, 4), (5,)])}
    client = LocalClient(
        EngineConfig(
            model=str(checkpoint(NAME).path), dtype="float32", device="cpu", show_progress=False,
            catalogue=tuple(f"{name}={path}" for name, path in files.items()),
        )
    )  # fmt: skip
    yield Api(client, max_answer_size="1MiB")
    asyncio.run(client.close())


def body(path: str) -> dict[str, Any]:
    return {"prompt": [5, 6, 7]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ab"}]}


def answers(call: Any, *, stream: bool) -> dict[int, dict[str, Any]]:
    """Tokens, the reason of the end, and the score of each choice."""
    lines = [line.removeprefix("data: ") for line in call.text.split("\n\n") if line.startswith("data: {")]
    found: dict[int, dict[str, Any]] = {}
    for event in map(json.loads, lines if stream else [call.text]):
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], {"tokens": []})
            one["tokens"] += choice.get("token_ids") or []
            one |= {key: choice[key] for key in ("finish_reason", "score") if choice.get(key) is not None}
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "search", [{"temperature": 0}, {"n": 3, "seed": 4}, {"num_beams": 256, "n": 40}, {"num_beams": 8, "n": 3}]
)
def test_answers_are_titles(api: Api, path: str, search: dict[str, Any], stream: bool) -> None:
    """Without max_tokens: the longest has room. Beams bring their scores, and no title twice."""
    call = api.post(path, **body(path), **search, constraint=MINE, stream=stream, return_token_ids=True)
    assert call.status == 200, call.text
    found = answers(call, stream=stream)
    assert len(found) == search.get("n", 1)
    for answer in found.values():
        assert answer["finish_reason"] == "stop"
        assert answer["tokens"][-1] in EOS
        assert tuple(answer["tokens"][:-1]) in TITLES
    if "num_beams" in search:
        assert len({tuple(answer["tokens"]) for answer in found.values()}) == search["n"]
        scores = [found[index]["score"] for index in range(search["n"])]
        assert scores == sorted(scores, reverse=True)
    else:
        assert not any("score" in answer for answer in found.values())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"constraint": {"catalogue": "x"}}, "constraint", "there is no catalogue 'x'; the catalogues are few, mine."),
        ({"constraint": {}}, "constraint", 'constraint must be {"catalogue": NAME}, got {}.'),
        ({"constraint": "mine"}, "constraint", "constraint"),
        ({"constraint": {"catalogue": 3}}, "constraint", "constraint"),
        ({"constraint": {"catalogue": "mine", "grammar": "x"}}, "constraint", "constraint"),
        ({"constraint": {"catalogue": "a" * 300}}, "constraint", "constraint"),
        ({"constraint": MINE, "ignore_eos": True}, "ignore_eos", "cannot be used with constraint"),
        ({"constraint": MINE, "num_beams": 257}, "num_beams", "at most 256 beams are allowed"),
        ({"constraint": {"catalogue": "few"}, "num_beams": 4, "n": 3}, "n", "the catalogue few has 2 titles"),
    ],
)
def test_what_is_refused(api: Api, path: str, fields: dict[str, Any], param: str, message: str) -> None:
    found = error(api.post(path, **body(path), **fields), 400)
    assert message in found["message"]
    assert found["param"].startswith(param)


def test_the_size_of_an_answer_counts_the_longest_title(api: Api) -> None:
    """Not the tokens that an answer may have where nothing is said."""
    fields = {"n": 16, "seed": 1, "logprobs": 20}
    assert "answer_too_large" in str(error(api.post(COMPLETIONS, prompt=[5, 6], **fields, max_tokens=200), 400))
    assert api.post(COMPLETIONS, prompt=[5, 6], **fields, constraint=MINE).status == 200
    fields |= {"min_tokens": 200}
    assert "answer_too_large" in str(error(api.post(COMPLETIONS, prompt=[5, 6], **fields, constraint=MINE), 400))


def test_names_are_told(api: Api) -> None:
    client = TestClient(api.app, base_url="http://localhost", headers={"Authorization": "Bearer one"})
    (card,) = client.get("/v1/models").json()["data"]
    assert card["catalogues"] == {"few": 2, "mine": len(TITLES)}
    metrics = client.get("/metrics").text
    assert 'octavo_catalogue_titles{catalogue="few"} 2.0' in metrics
    assert f'octavo_catalogue_titles{{catalogue="mine"}} {len(TITLES)}.0' in metrics
