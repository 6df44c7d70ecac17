"""Steps that belong to no request: they warm the device up, and measure what steps cost.

They read and write block 0, which belongs to no sequence, and restore it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from engine.backends.attention.base import AttentionBackend
from engine.backends.torch.attention_tiles import TILE
from engine.execution.prompt_graphs import LARGEST
from engine.execution.recording import CudaRecorder
from engine.execution.runner import ModelRunner
from engine.interface.outputs import SignalInfo
from engine.interface.pooling import Pooling
from engine.interface.request import Decoding, Request
from engine.model.spec import Lm, MaskedLm
from engine.model.transformer import Transformer
from engine.scheduling.batch import build_plan
from engine.scheduling.budget import Costs, StepWork
from engine.scheduling.plan import StepPlan
from engine.scheduling.row import Row
from engine.scheduling.sequence import SequenceGroup, pages_needed

logger = logging.getLogger("octavo.execution")

Measured = list[tuple[StepWork, float]]

_TOKENS = 16
_CONTEXT = 1024
# Tokens of the context with which kernels for one row are compared: attention reads it in more than one part.
_TYPICAL = 400
_WHOLE = 256  # tokens of inputs that are read whole
# A short step is timed twice, since it may have been interrupted; for a long step, once is enough.
_SHORT = 0.05


def trial(runner: ModelRunner) -> None:
    """Run a step of one token, or of one signal; no request is to blame for an error in it."""
    try:
        runner.execute(_short_plan(runner) if runner.model.decoder is None else _plan(runner, 0, 1))
    finally:
        runner.cache.clear_scratch()


def can_record(model: Transformer) -> bool:
    """Whether the model decodes: others have no steps of single tokens. The slots of layers with a state are chosen on
    the host, and so is the work of heads' experts."""
    stack = model.spec.decoder
    if stack is None or not isinstance(model.spec.head, Lm) or model.spec.state_sizes:
        return False
    return all(part.routed is None for part in stack.attentions)


def record(runner: ModelRunner, backend: AttentionBackend, max_rows: int, max_tokens: int) -> None:
    """From now on, run steps of up to max_rows rows and, with prompts, of up to max_tokens tokens as CUDA graphs, if
    possible."""
    device = runner.model.device
    if device.type != "cuda" or not can_record(runner.model) or not max_rows:
        if runner.model.spec.state_sizes:
            logger.info("Steps run without CUDA graphs: layers with a state cannot be recorded")
        elif runner.model.spec.decoder and any(part.routed for part in runner.model.spec.decoder.attentions):
            logger.info("Steps run without CUDA graphs: heads that each token chooses cannot be recorded")
        return
    if not backend.recordable:
        logger.info("Steps run without CUDA graphs: %s attention cannot be recorded", backend.name)
        return
    recorder = CudaRecorder(device)

    def decoding() -> None:
        with typical_row(runner) as typical:
            runner.use_graphs(max_rows, recorder, recorder.seconds, typical)

    # The step that takes the most memory comes first.
    _try(
        f"steps with prompts, of up to {min(max_tokens, LARGEST)} tokens",
        partial(runner.use_prompt_graphs, max_rows, max_tokens, recorder),
    )
    _try(f"decoding steps of up to {max_rows} rows", decoding)


def _try(steps: str, act: Callable[[], None]) -> None:
    """Record steps, or log why they run eagerly."""
    began = time.perf_counter()
    try:
        act()
    except Exception as error:  # torch and Triton raise errors of all kinds: slow service is better than none
        logger.warning(
            "%s run without CUDA graphs, which is slower: recording failed (%s). Set --enforce-eager to "
            "skip the attempt.",
            steps,
            error,
            exc_info=True,
        )
        return
    logger.info("Recorded %s in %.1f s", steps, time.perf_counter() - began)


@contextmanager
def typical_row(runner: ModelRunner) -> Iterator[StepPlan]:
    """The plan of one decoding row. A prompt is computed into the first pages of the cache, which no request has yet;
    the row follows it. Its pages are zero again afterwards."""
    cache, limit = runner.cache, runner.model.max_model_len
    blocks = cache.layers[0][0].shape[0] - 1
    context = max(min(_TYPICAL, limit - 1, blocks * cache.block_size - 1), 0)
    used = pages_needed(context + 1, cache.block_size)
    table = range(1, used + 1)
    ids = [number * 7919 % runner.model.vocab_size for number in range(context + 2)]
    try:
        for start in range(0, context, _WHOLE):
            runner.execute(_plan(runner, start, min(_WHOLE, context - start), ids=ids, table=table))
        yield _plan(runner, context, 1, ids=ids, table=table)
    finally:
        cache.clear_scratch(used + 1)


def measure(
    runner: ModelRunner, *, max_tokens: int, max_model_len: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[Costs, Measured]:
    """Measure the cost of pairs and logits, and of small steps; this takes about as long as a prompt of 60 tokens.

    Args:
        max_tokens: maximum tokens of a step.
        clock: seconds.
    """
    trial(runner)  # what happens only once is not measured
    if runner.model.device.type == "cuda":
        runner.warm()

    def timed(plan: StepPlan) -> tuple[StepWork, float]:
        taken: list[float] = []
        # Ranks run the same steps, whatever the time that each of them takes.
        while not taken or (len(taken) < 2 and (taken[0] < _SHORT or runner.model.ranks is not None)):
            began = clock()
            runner.execute(plan)
            taken.append(clock() - began)
        return StepWork.of(plan), min(taken)

    if runner.model.decoder is None:  # no pages are written
        return _measure_whole(runner, min(max_tokens, max_model_len), timed)
    count = max(min(_TOKENS, max_tokens, max_model_len - 1), 1)
    far = max(min(_CONTEXT, max_model_len - 1) - count, 0)
    try:
        one, plain = timed(_plan(runner, 0, 1)), timed(_plan(runner, 0, count))
        late = timed(_plan(runner, far, count))
        scored = timed(_plan(runner, 0, count, scored=True)) if isinstance(runner.model.spec.head, Lm) else plain
    finally:
        runner.cache.clear_scratch()
    # If memory rather than arithmetic limits the speed, 16 tokens take hardly longer than one, and say little about
    # many.
    token = max((plain[1] - one[1]) / max(count - 1, 1), plain[1] / (4 * count))
    pairs = late[0].pairs - plain[0].pairs
    costs = Costs(
        pair=max(late[1] - plain[1], 0.0) / pairs / token if pairs else 0.0,
        score=max(scored[1] - plain[1], 0.0) / count / token,
        tile=TILE,
    )
    return costs, [one, plain]


def score_plan(runner: ModelRunner, count: int) -> StepPlan:
    """A prompt of count tokens, all of which are scored."""
    return _plan(runner, 0, count, scored=True)


def _measure_whole(
    runner: ModelRunner, most: int, timed: Callable[[StepPlan], tuple[StepWork, float]]
) -> tuple[Costs, Measured]:
    """The measurement for a model that reads whole inputs: one input and several with as many tokens differ only in
    pairs."""
    if not runner.model.vocab_size:  # all inputs have one length, so the share of the time for pairs never matters
        signal = runner.model.spec.signal
        assert signal is not None
        inputs = max(min(_WHOLE, most) // signal.positions, 1)
        return Costs(), [timed(_signal_plan(signal, 1)), *([timed(_signal_plan(signal, inputs))] * (inputs > 1))]
    if runner.model.twin is not None and runner.model.spec.signal is not None:
        runner.execute(_signal_plan(runner.model.spec.signal, 1))  # so that the first one waits for nothing
    count = min(_TOKENS, most)
    inputs = max(min(_WHOLE, most) // count, 1)
    one, several = timed(_read_plan(runner, [1])), timed(_read_plan(runner, [count] * inputs))
    joined = timed(_read_plan(runner, [count * inputs]))
    token = several[1] / (count * inputs)
    pairs = joined[0].pairs - several[0].pairs
    score = 0.0
    if isinstance(runner.model.spec.head, MaskedLm):
        short, scored = timed(_read_plan(runner, [count])), timed(_read_plan(runner, [count], scored=True))
        score = max(scored[1] - short[1], 0.0) / count / token
    costs = Costs(pair=max(joined[1] - several[1], 0.0) / pairs / token if pairs else 0.0, score=score)
    return costs, [one, several, joined]


def _short_plan(runner: ModelRunner) -> StepPlan:
    """The shortest input of a model that reads whole inputs."""
    signal = runner.model.spec.signal
    if runner.model.vocab_size or signal is None:
        return _read_plan(runner, [1])
    return _signal_plan(signal, 1)


def _signal_plan(signal: SignalInfo, count: int) -> StepPlan:
    """A plan of this many whole inputs that are signals."""
    rows = []
    for number in range(count):
        request = Request(
            request_id="",
            prompt_token_ids=(0,) * signal.positions,
            decoding=Decoding(max_tokens=1),
            signal=np.zeros(signal.shape, dtype=np.float32),
        )
        group = SequenceGroup(request, number, b"", unchunked=True)
        rows.append(Row(group, group.sequences[0], 0, signal.positions, 0))
    return build_plan(rows, [], 1)


def _read_plan(runner: ModelRunner, lengths: list[int], *, scored: bool = False) -> StepPlan:
    """Whole inputs of these lengths; with the logits of each token if they are scored."""
    rows = []
    for number, length in enumerate(lengths):
        request = Request(
            request_id="",
            prompt_token_ids=(0,) * length,
            decoding=Decoding(max_tokens=1),
            pooling=Pooling(task="fill_mask", positions=tuple(range(length)), top_k=1) if scored else None,
        )
        group = SequenceGroup(request, number, b"", unchunked=True)
        rows.append(Row(group, group.sequences[0], 0, length, 0))
    return build_plan(rows, [], runner.cache.block_size)


def _plan(
    runner: ModelRunner,
    start: int,
    count: int,
    *,
    scored: bool = False,
    ids: Sequence[int] | None = None,
    table: Sequence[int] = (),
) -> StepPlan:
    """A step of `count` tokens after `start` others, in block 0 or in the pages of a table."""
    size = runner.cache.block_size
    decoding = Decoding(max_tokens=1, temperature=0.0, prompt_logprobs=0 if scored else None)
    # One more token than is computed, so that the last computed one has a next token to score.
    tokens = (0,) * (start + count + 1) if ids is None else tuple(ids[: start + count + 1])
    request = Request(request_id="", prompt_token_ids=tokens, decoding=decoding)
    group = SequenceGroup(request, 0, b"")
    group.prompt_logprobs = [None] * (start + 1)
    sequence = group.sequences[0]
    pages = pages_needed(start + count, size)
    sequence.table.extend(table[:pages] or [0] * pages)
    sampled = int(count == 1 and isinstance(runner.model.spec.head, Lm))
    return build_plan([Row(group, sequence, start, count, sampled)], [], size)
