"""An engine client that plays a script, and a tokenizer of one token per byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine import (
    CacheMap,
    ChoiceDelta,
    EngineDeadError,
    EngineStats,
    LiveRequest,
    Logprob,
    Pooled,
    PoolingParams,
    RequestDelta,
    SamplingParams,
    TokenInput,
)
from engine.interface.cache_map import CellKinds
from engine.interface.outputs import EngineInfo
from engine.process.client import Deliver, EngineClient, Progress
from engine.text.processor import Tokenizer

EOS = 256
VOCAB_SIZE = 257
FEATURES = 4
# A step of a script: a delta, an exception to raise, or an event to wait for.
Step = RequestDelta | Exception | asyncio.Event
Script = Callable[[str, TokenInput, Any], Iterable[Step]]


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes, 256 is the end of sequence."""
    return Tokenizer(hf_byte_tokenizer())


def hf_byte_tokenizer() -> PreTrainedTokenizerFast:
    """The same as a `transformers` tokenizer."""
    # GPT-2's byte-to-character table: printable bytes as themselves, the others from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocab = {chars[byte]: byte for byte in range(256)} | {"<eos>": EOS}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<eos>")


def entry(token: int, top: int, logprob: float = -0.5) -> dict[int, Logprob]:
    """The chosen token and the `top` most probable: it and the ids after it."""
    ranked = [token, *((token + step) % 128 for step in range(1, top))]
    return {item: Logprob(logprob - rank, rank + 1) for rank, item in enumerate(ranked)}


def say(request_id: str, texts: Sequence[str], params: SamplingParams, finish: str = "length") -> list[RequestDelta]:
    """Deltas of one byte per step in which choice i says texts[i]."""
    spoken = [text.encode() for text in texts]
    deltas = []
    for step in range(max(map(len, spoken))):
        choices = []
        for index, said in enumerate(spoken):
            if step >= len(said):
                continue
            last = step == len(said) - 1
            logprobs = None if params.logprobs is None else [entry(said[step], params.logprobs)]
            if params.logprob_token_ids is not None:
                logprobs = [entry(said[step], 0) | {one: Logprob(-2.0, None) for one in params.logprob_token_ids}]
            choices.append(
                ChoiceDelta(
                    index=index,
                    token_ids=[said[step]],
                    logprobs=logprobs,
                    finish_reason=finish if last else None,  # type: ignore[arg-type]
                    cumulative_logprob=-float(len(said)) * (index + 1) if last else None,
                )
            )
        deltas.append(RequestDelta(request_id=request_id, choices=choices, finished=step == max(map(len, spoken)) - 1))
    return deltas


def pool(request_id: str, source: TokenInput, params: PoolingParams) -> list[RequestDelta]:
    """What a model with vectors of `FEATURES` would say at once: the input's length, its ids in front, and a third."""
    values = [len(source.token_ids), *source.token_ids[: FEATURES - 2], 1 / 3]
    row = np.zeros((1, FEATURES), np.float32)
    row[0, : len(values)] = values
    answer = Pooled.of(row[:, : params.dimensions])
    return [
        RequestDelta(request_id=request_id, choices=()),
        RequestDelta(request_id=request_id, choices=(), finished=True, pooled=answer),
    ]


def pausing(request_id: str, source: TokenInput, params: SamplingParams) -> list[Step]:
    """Says "a", nothing for 0.3 seconds, and "b"."""
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, gate.set)
    first, *rest = say(request_id, ["ab"], params)
    return [first, gate, *rest]


def failing(request_id: str, source: TokenInput, params: SamplingParams) -> list[Step]:
    """Says "ab" and fails."""
    return [*say(request_id, ["abc"], params)[:2], RuntimeError("boom")]


class FakeClient(EngineClient):
    """Plays `script`; records what was asked of it."""

    def __init__(self, script: Script):
        self.info = EngineInfo(
            model="fake", model_path="fake", dtype="float32", kv_cache_dtype="int8", device="cpu", max_model_len=64,
            vocab_size=VOCAB_SIZE, block_size=16, num_blocks=10, full_requests=2.5, max_num_seqs=8, max_num_beams=16,
        )  # fmt: skip
        self.script = script
        self.dead = False
        self.stuck_for = 0.0
        self.closed = False
        self.asked: dict[str, tuple[TokenInput, SamplingParams]] = {}
        self.terms: dict[str, dict[str, Any]] = {}
        self.running: set[str] = set()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.cut_short: list[str] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.num_warmed = 0

    def warm_grammars(self) -> None:
        self.num_warmed += 1

    def submit(self, request_id: str, input: Any, params: Any, deliver: Deliver, **terms: Any) -> None:
        if self.dead:
            raise EngineDeadError("dead")
        self.asked[request_id] = (input, params)
        self.terms[request_id] = terms
        self.running.add(request_id)
        self.tasks[request_id] = asyncio.create_task(self._play(request_id, input, params, deliver))

    async def _play(self, request_id: str, input: Any, params: Any, deliver: Deliver) -> None:
        try:
            steps = iter(self.script(request_id, input, params))
        except Exception as problem:
            steps = iter([problem])
        for step in steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            await asyncio.sleep(0)
            over = isinstance(step, Exception) or step.finished
            if over:
                self.running.discard(request_id)
            if self.on_news is not None and not self.dead and not isinstance(step, Exception):
                self.on_news([step], self.stats())
            if over:
                deliver(step)  # type: ignore[arg-type]  # scripts may raise anything
                return
            deliver(step)

    def abandon(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.discard(request_id)
            self.tasks[request_id].cancel()
            self.cut_short.append(request_id)

    async def settled(self) -> None:
        return

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.aborted.append((request_id, choice))

    def give_up(self, cause: str) -> None:
        raise AssertionError(f"nobody gives this engine up: {cause}")

    def stats(self) -> EngineStats:
        if self.dead:
            raise EngineDeadError("dead")
        return EngineStats(
            num_running=len(self.running), pages_total=10, pages_held=2, pages_cached=3, pages_free=5, num_steps=7,
            step_seconds=0.5, prompt_tokens=11, generation_tokens=12, num_preemptions=1, prefix_queries=9,
            prefix_hits=4, num_page_copies=6,
        )  # fmt: skip

    async def cache_map(self) -> CacheMap:
        if self.dead:
            raise EngineDeadError("dead")
        free, held = ([0], [0], [0], [0], [[]], [0]), ([0, 1], [0, 0], [0, 1], [0, 0], [[], [0]], [0, 0])
        lists = dict(
            zip(("held", "cached", "tables", "found", "holders", "others"), held if self.running else free, strict=True)
        )
        return CacheMap(
            pages_per_cell=1,
            runs=[8, 0, 2, 1] if self.running else [10, 0],
            kinds=CellKinds(**lists),
            running=[LiveRequest(request_id=name, num_prompt=3) for name in sorted(self.running)],
            waiting=[],
        )

    @property
    def progress(self) -> Progress:
        return Progress(idle=not self.running, seconds=self.stuck_for)

    @property
    def is_alive(self) -> bool:
        return not self.dead

    async def close(self) -> None:
        self.closed = True
