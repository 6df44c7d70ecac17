"""Requests whose answers follow from the request alone, so that each is known beforehand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from soaking.shapes import Shapes

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDINGS, TOKENIZE = "/v1/embeddings", "/tokenize"
_LEAD = "Once upon a time there was a little fox. "  # many prompts begin with it: pages are shared
_HEAVY = 8  # prompts
_KINDS = (
    "greedy", "seeded", "several", "beams", "stop", "ids", "prompts", "logprobs", "chat", "chat_several", "embeddings",
    "tokenize",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Attributes:
        name: kind and number.
        body: without `stream`.
        num_choices: of the answer; 0 where the answer is no text.
        num_inputs: of a request for vectors.
        num_prompts: of a request for text.
    """

    name: str
    path: str
    body: dict[str, Any]
    num_choices: int = 0
    num_inputs: int = 0
    num_prompts: int = 1

    @property
    def streams(self) -> bool:
        """Whether it can be asked for as a stream."""
        return bool(self.num_choices)


def make_cases(count: int, shapes: Shapes, context: int, tokens: list[int], rng: random.Random) -> list[Case]:
    """This number of cases, all kinds in turn.

    Args:
        context: the longest prompt and answer together, in tokens.
        tokens: of the vocabulary, for prompts of ids.
    """
    maker = _Maker(shapes, context, tokens, rng)
    return [maker.make(_KINDS[number % len(_KINDS)], number) for number in range(count)]


def heavy_case(context: int) -> Case:
    """A stream too large for the buffers between the server and a client that reads nothing."""
    body = {
        "prompt": [_LEAD] * _HEAVY, "max_tokens": int(0.8 * context), "ignore_eos": True, "temperature": 0,
        "logprobs": 5, "return_token_ids": True,
    }  # fmt: skip
    return Case("heavy", COMPLETIONS, body, _HEAVY, num_prompts=_HEAVY)


class _Maker:
    def __init__(self, shapes: Shapes, context: int, tokens: list[int], rng: random.Random):
        self._shapes, self._context, self._tokens, self._rng = shapes, context, tokens, rng

    def make(self, kind: str, number: int) -> Case:
        rng, name = self._rng, f"{kind}-{number}"
        prompt_share, answer_share = rng.choice(self._shapes.lengths)
        longest = max(1, int(0.3 * self._context * answer_share))
        body: dict[str, Any] = {"max_tokens": longest, "temperature": 0, "return_token_ids": True}
        if kind == "tokenize":
            return Case(name, TOKENIZE, {"prompt": self._text(prompt_share)})
        if kind == "embeddings":
            texts = [self._text(prompt_share) for _ in range(rng.randint(1, 4))]
            return Case(name, EMBEDDINGS, {"input": texts}, num_inputs=len(texts))
        if kind in ("seeded", "several", "chat_several"):
            body |= {"temperature": rng.choice((0.7, 1.0, 1.5)), "seed": rng.randrange(1 << 31), "top_p": 0.95}
        if kind in ("several", "chat_several"):
            body["n"] = rng.randint(2, 4)
        if kind.startswith("chat"):
            body["messages"] = [{"role": "user", "content": self._text(prompt_share)}]
            return Case(name, CHAT, body, body.get("n", 1))
        body["prompt"] = self._text(prompt_share)
        if kind == "greedy":
            body["ignore_eos"] = True
        elif kind == "beams":
            body |= {"use_beam_search": True, "n": rng.randint(2, 4)}
        elif kind == "stop":
            body["stop"] = [rng.choice((" the", " a", ".", "and")), rng.choice((" was", " he", ","))]
        elif kind == "ids":
            size = max(1, int(0.5 * self._context * prompt_share))
            body["prompt"] = rng.choices(self._tokens, k=size)
        elif kind == "logprobs":
            body |= {"logprobs": 3, "echo": True}
        elif kind == "prompts":
            body["prompt"] = [self._text(prompt_share), self._text(0.2)]
            return Case(name, COMPLETIONS, body, 2, num_prompts=2)
        return Case(name, COMPLETIONS, body, body.get("n", 1))

    def _text(self, share: float) -> str:
        """A text of about this share of half the context, and safely below it."""
        text = self._rng.choice(self._shapes.texts)
        lead = _LEAD if self._rng.random() < 0.5 else ""
        return (lead + text)[: max(12, int(1.0 * self._context * share))]
