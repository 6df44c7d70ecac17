"""Live beams: what a stream tells of a beam search, played back, is the search."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Step, hf_byte_tokenizer
from support.asgi import request
from support.driving import check_idle

from engine import ChoiceDelta, Engine, RequestDelta, SamplingParams
from engine.interface.outputs import BeamMove, BeamMoves
from engine.text.processor import Tokenizer
from server.app import create_app

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Replay:
    """Beams as the moves say they are."""

    def __init__(self, num_beams: int):
        self.num_beams = num_beams
        self.live: list[tuple[int, ...]] = [()]
        self.ended: list[tuple[float, tuple[int, ...]]] = []

    def take(self, moves: BeamMoves) -> None:
        before = self.live
        self.live = [(*before[move.parent], move.token_id) for move in moves.live]
        self.ended += [(move.score, (*before[move.parent], move.token_id)) for move in moves.ended]
        scores = [move.score for move in moves.live]
        assert scores == sorted(scores, reverse=True)
        assert len(self.live) <= self.num_beams

    def best(self, n: int) -> list[tuple[float, tuple[int, ...]]]:
        return sorted(self.ended, key=lambda pair: -pair[0])[:n]


def decode(engine: Engine, jobs: dict[str, SamplingParams]) -> dict[str, Replay]:
    """Run beam searches together; each one's moves must lead to its answers."""
    replays = {name: Replay(params.num_beams or 1) for name, params in jobs.items()}
    answers: dict[str, list[list[int]]] = {name: [[] for _ in range(params.n)] for name, params in jobs.items()}
    scores: dict[str, list[float | None]] = {name: [None] * params.n for name, params in jobs.items()}
    for name, params in jobs.items():
        engine.add_request(name, PROMPT, params)
    while engine.has_unfinished_requests():
        for delta in engine.step_deltas():
            assert delta.beams is not None
            replay = replays[delta.request_id]
            replay.take(delta.beams)
            for choice in delta.choices:
                answer = answers[delta.request_id][choice.index]
                answer += choice.token_ids
                scores[delta.request_id][choice.index] = choice.score
                # What is settled is what all live beams begin with.
                assert all(beam[: len(answer)] == tuple(answer) for beam in replay.live) or delta.finished
            assert delta.finished == (not replay.live)
    check_idle(engine)
    for name, params in jobs.items():
        expected = [(score, tuple(tokens)) for score, tokens in zip(scores[name], answers[name], strict=True)]
        assert replays[name].best(params.n) == expected
    return replays


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("num_beams", [2, 5])
def test_the_moves_lead_to_the_answers(early_stopping: Any, num_beams: int, engines: Callable[..., Engine]) -> None:
    params = SamplingParams(
        num_beams=num_beams, n=2, max_tokens=14, early_stopping=early_stopping, length_penalty=0.7, stream_beams=True,
        stop_token_ids=[7, 11, 30],
    )  # fmt: skip
    decode(engines(), {"one": params})


def test_beams_that_are_preempted_are_told_as_if_they_had_not_been(engines: Callable[..., Engine]) -> None:
    jobs = {
        f"r{number}": SamplingParams(num_beams=2 + number % 3, n=1, max_tokens=20, stream_beams=True, ignore_eos=True)
        for number in range(5)
    }
    alone = {name: decode(engines(), {name: params})[name].best(1) for name, params in jobs.items()}
    tight = engines(num_gpu_blocks_override=24, block_size=4, max_num_seqs=16, max_model_len=64)
    crowded = decode(tight, jobs)
    assert tight.stats().num_preemptions > 0
    assert {name: replay.best(1) for name, replay in crowded.items()} == alone


def test_beams_are_told_on_request_only(engines: Callable[..., Engine]) -> None:
    engine = engines()
    engine.add_request("beams", PROMPT, SamplingParams(num_beams=3, max_tokens=5))
    engine.add_request("sampled", PROMPT, SamplingParams(temperature=1.0, max_tokens=5, stream_beams=True))
    while engine.has_unfinished_requests():
        assert all(delta.beams is None for delta in engine.step_deltas())


# ---------------------------------------------------------------- over HTTP


def search(request_id: str, source: Any, params: SamplingParams) -> Iterable[Step]:
    """Two beams, "ab" and "ac"; the first one ends with "!" and is the answer."""
    a, b, c, end = (ord(letter) for letter in "abc!")
    moves = [
        BeamMoves([BeamMove(0, a, -0.5), BeamMove(0, c, -2.0)], []),
        BeamMoves([BeamMove(0, b, -0.75), BeamMove(0, c, -1.5)], []),
        BeamMoves([], [BeamMove(0, end, -0.25), BeamMove(1, end, float("-inf"))]),
    ]
    yield RequestDelta(request_id=request_id, choices=())
    for step in moves[:2]:
        yield RequestDelta(request_id=request_id, choices=(), beams=step)
    last = ChoiceDelta(index=0, token_ids=[a, b, end], finish_reason="stop", score=-0.25)
    yield RequestDelta(request_id=request_id, choices=[last], finished=True, beams=moves[2])


def ask(path: str, **body: Any) -> httpx.Response:
    chatty = hf_byte_tokenizer()
    chatty.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    app = create_app(FakeClient(search), Tokenizer(chatty), "m")
    return request(app, "POST", path, json={"num_beams": 2, "stream_beams": True, **body}, strict=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_a_stream_tells_the_steps_of_each_prompt(path: str, body: dict[str, Any]) -> None:
    blocks = ask(path, stream=True, stream_options={"include_usage": True}, **body).text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    events = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    prompts = range(len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
    steps: dict[int, list[Any]] = {prompt: [] for prompt in prompts}
    for event in events:
        if "beams" in event:
            assert event["choices"] == []
            steps[event["beams"]["prompt"]] += event["beams"]["steps"]

    def move(parent: int, token: str, score: float) -> dict[str, Any]:
        return {"parent": parent, "token": token, "score": score}

    expected = [
        {"live": [move(0, "a", -0.5), move(0, "c", -2.0)], "ended": []},
        {"live": [move(0, "b", -0.75), move(0, "c", -1.5)], "ended": []},
        {"live": [], "ended": [move(0, "!", -0.25), move(1, "!", -9999.0)]},
    ]
    assert steps == dict.fromkeys(prompts, expected)
    told = [event["choices"][0] for event in events if event["choices"]]
    texts = "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in told)
    assert texts == "ab" * len(prompts)  # the ending token is not shown
    assert events[-1]["usage"]["completion_tokens"] == 3 * len(prompts)


def test_an_answer_that_is_no_stream_has_none() -> None:
    answer = ask("/v1/completions", prompt="x").json()
    assert "beams" not in answer
    assert answer["choices"][0]["text"] == "ab"
    stream = ask("/v1/completions", prompt="x", stream=True, stream_beams=False)
    assert "beams" in stream.text  # the script's engine tells them unasked; the real one does not, see above
