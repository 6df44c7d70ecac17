"""The work of each row: what is asked of a contestant in one turn, and the figures that come of it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peers.checkpoints import EOS
from peers.engines import Engine
from peers.servers import Server, first_token_ms
from peers.turns import PAUSE, Figures

Measure = Callable[[Any], Figures]
Answers = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Sizes:
    """How much work a turn is.

    Attributes:
        prompt: fewest and most tokens of a mixed request's prompt.
        answer: and of its answer.
        encoder: and of an encoder's input.
        repeats: of work that is over soon; a turn's figure is their median.
        http: requests of a turn by how many run at a time.
        singles: requests alone, for the first token.
    """

    prompt: tuple[int, int] = (32, 256)
    answer: tuple[int, int] = (32, 128)
    encoder: tuple[int, int] = (16, 200)
    decode_prompt: int = 32
    decode: int = 128
    prefill: int = 1024
    beam_prompt: int = 128
    beam_answer: int = 64
    overhead_rows: int = 32
    overhead_prompt: int = 128
    overhead_answer: int = 32
    first_prompt: int = 128
    repeats: int = 3
    http: tuple[tuple[int, int], ...] = ((1, 8), (8, 32), (32, 64))
    singles: int = 10


TINY = Sizes(
    prompt=(4, 16),
    answer=(3, 6),
    encoder=(4, 12),
    decode_prompt=4,
    decode=6,
    prefill=64,
    beam_prompt=8,
    beam_answer=4,
    overhead_rows=4,
    overhead_prompt=6,
    overhead_answer=5,
    first_prompt=8,
    repeats=1,
    http=((1, 2), (8, 8), (32, 32)),
    singles=2,
)


def mixed_requests(count: int, sizes: Sizes, vocab_size: int, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens each wants."""
    rng = random.Random(f"{count} {seed}")
    prompts = [tokens(rng, rng.randint(*sizes.prompt), vocab_size) for _ in range(count)]
    return prompts, [rng.randint(*sizes.answer) for _ in range(count)]


def tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Random ids, none of a special token."""
    return [rng.randrange(3, vocab_size) for _ in range(count)]


def decode(sizes: Sizes, vocab_size: int) -> Measure:
    """Tokens per second of one request that decodes: what a long answer takes longer than one token does."""
    prompt = tokens(random.Random(1), sizes.decode_prompt, vocab_size)

    def measure(engine: Engine) -> Figures:
        short, long = [], []
        for _ in range(sizes.repeats):
            short.append(engine.generate([prompt], [1])[0])
            long.append(engine.generate([prompt], [1 + sizes.decode])[0])
        seconds = statistics.median(long) - statistics.median(short)
        if seconds <= 0:  # a short turn that something else disturbed
            seconds = statistics.median(long)
        return {"tokens_per_second": sizes.decode / seconds}

    return measure


def advance(sizes: Sizes, context: int, vocab_size: int) -> tuple[Measure, Measure]:
    """Tokens per second of a request that decodes behind a context.

    Returns:
        What is done first, and each turn. A long context is computed first and once, since that takes long, and each
        turn goes on from where the last one ended. A short one is computed before each turn.
    """
    prompt = tokens(random.Random(1), context, vocab_size)

    def measure(engine: Engine) -> Figures:
        if context <= sizes.decode:
            engine.hold(prompt)
        return {"tokens_per_second": sizes.decode / engine.advance(sizes.decode)[0]}

    def prepare(engine: Engine) -> Figures:
        engine.hold(prompt)
        return measure(engine)

    return prepare, measure


def mixed(count: int, sizes: Sizes, vocab_size: int, answers: Answers) -> Measure:
    """Output tokens per second of requests of mixed lengths, all at once."""
    prompts, wanted = mixed_requests(count, sizes, vocab_size)

    def measure(engine: Engine) -> Figures:
        seconds, answers[engine.name] = engine.generate(prompts, wanted)
        return {"tokens_per_second": sum(wanted) / seconds}

    return measure


def prefill(sizes: Sizes, vocab_size: int) -> Measure:
    """Prompt tokens per second of one long prompt, up to its first token."""
    prompt = tokens(random.Random(2), sizes.prefill, vocab_size)

    def measure(engine: Engine) -> Figures:
        seconds = statistics.median(engine.generate([prompt], [1])[0] for _ in range(sizes.repeats))
        return {"tokens_per_second": sizes.prefill / seconds}

    return measure


def load(engine: Engine) -> Figures:
    """Seconds per 10^9 bytes of a model's file, up to where a request could come."""
    seconds, size = engine.load_again(engine.settings[0])
    return {"load_seconds_per_gb": seconds / size * 1e9}


def load_cold(engine: Engine) -> Figures:
    """The same from the disk, and how much of the files the system had in memory all the same."""
    seconds, size, share = engine.load_cold(engine.settings[0])
    return {"load_seconds_per_gb": seconds / size * 1e9, "in_memory_percent": share * 100}


def beams(sizes: Sizes, vocab_size: int, answers: Answers) -> Measure:
    """Tokens per second of the best answer of one request with 4 beams; its prompt is part of the time."""
    prompt = tokens(random.Random(3), sizes.beam_prompt, vocab_size)
    return _beams([prompt], sizes.beam_answer, answers)


def encoder_decoder(count: int, sizes: Sizes, vocab_size: int, answers: Answers) -> Measure:
    """The same of requests to an encoder-decoder model, whose inputs have mixed lengths and end with the end token."""
    rng = random.Random(count)
    lengths = [rng.randint(*sizes.encoder) if count > 1 else sizes.beam_prompt for _ in range(count)]
    return _beams([[*tokens(rng, length - 1, vocab_size), EOS] for length in lengths], sizes.beam_answer, answers)


def _beams(prompts: list[list[int]], answer: int, answers: Answers) -> Measure:
    def measure(engine: Engine) -> Figures:
        seconds, answers[engine.name] = engine.generate(prompts, [answer] * len(prompts), beams=4)
        return {"tokens_per_second": len(prompts) * answer / seconds}

    return measure


def overhead(sizes: Sizes, vocab_size: int, parts: dict[str, float]) -> Measure:
    """The share of a decoding step that is not the model's, in percent.

    Args:
        parts: gets the microseconds of each part of the middle step.
    """
    rng = random.Random(4)
    prompts = [tokens(rng, sizes.overhead_prompt, vocab_size) for _ in range(sizes.overhead_rows)]

    def measure(engine: Engine) -> Figures:
        steps = engine.ask(op="overhead", prompts=prompts, new=sizes.overhead_answer)["steps"]
        spans = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
        shares = [1 - step["model"] / step["step"] for step in steps]
        names = {"model": spans["model"], "schedule": spans["schedule"], "update": spans["update"]}
        names["prepare and sample"] = statistics.median(step["execute"] - step["model"] for step in steps)
        parts.update({part: round(seconds * 1e6, 1) for part, seconds in names.items()})
        return {"overhead_percent": statistics.median(shares) * 100}

    return measure


def http(concurrency: int, requests: int, sizes: Sizes, vocab_size: int) -> Measure:
    """Output tokens per second, and the median time to the first token, of mixed requests, so many at a time."""
    prompts, wanted = mixed_requests(requests, sizes, vocab_size)

    def measure(server: Server) -> Figures:
        seconds, records = server.send(zip(prompts, wanted, strict=True), concurrency)
        return {"tokens_per_second": sum(wanted) / seconds, "first_token_ms": first_token_ms(records)}

    return measure


class OneAtATime:
    """A server and the bare engine in turns, as one contestant."""

    settings = ("defaults",)

    def __init__(self, name: str, engine: Engine, server: Server):
        self.name = name
        self.engine, self.server = engine, server

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of both."""
        return (*self.engine.pids, *self.server.pids)

    def prepare(self, setting: str) -> None:
        """The server starts, and the engine loads."""
        self.server.prepare(setting)
        self.engine.prepare(setting)


def first_token(sizes: Sizes, vocab_size: int) -> Measure:
    """Milliseconds to the first token of a request that is alone: what the server takes more than the engine."""
    rng = random.Random(5)

    def measure(pair: OneAtATime) -> Figures:
        engine, server = [], []
        for _ in range(sizes.singles):
            prompt = tokens(rng, sizes.first_prompt, vocab_size)
            engine.append(pair.engine.ask(op="first_token", prompt=prompt)["seconds"] * 1e3)
            time.sleep(PAUSE)
            server.append(first_token_ms(pair.server.send([(prompt, 2)], 1)[1]))
            time.sleep(PAUSE)
        added = statistics.median(server) - statistics.median(engine)
        return {
            "added_ms": added,
            "engine_ms": statistics.median(engine),
            "server_ms": statistics.median(server),
        }

    return measure


def agreement(answers: Answers, reference: str) -> dict[str, str]:
    """The share of answers whose first token is the reference's. A wrong conversion changes most of them."""
    if reference not in answers:
        return {}
    first = [answer[0] for answer in answers[reference]]
    return {
        name: f"{sum(one[0] == token for one, token in zip(found, first, strict=True))} of {len(first)}"
        for name, found in answers.items()
        if name != reference
    }
