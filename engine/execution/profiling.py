"""The memory of a GPU that pages may take: what remains beside weights and the largest step, which is run at start.

The step holds `max_num_batched_tokens` tokens, of which one per possible row is sampled, with all settings that are
expensive for a sampler. Prompts whose tokens are scored, and encoder inputs, are run as well if the model has them.
They read and write block 0 of a cache with few other pages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.cuda_graphs import graph_sizes
from engine.execution.gpu_choice import another_gpu, holders
from engine.execution.kv_cache import KVCache, cache_memory, count_blocks, page_bytes
from engine.execution.memory import DeviceMemory, device_memory, gib, is_out_of_memory
from engine.execution.prompt_graphs import LARGEST, can_record_prompts, token_sizes
from engine.execution.runner import ModelRunner
from engine.execution.state_cache import StateCache, count_slots, slot_bytes
from engine.execution.warmup import score_plan
from engine.interface.outputs import EngineInfo
from engine.interface.request import Decoding, Request
from engine.model.spec import Lm
from engine.scheduling.batch import build_plan
from engine.scheduling.plan import EncoderBatch, Float32, StepPlan
from engine.scheduling.row import Row
from engine.scheduling.sequence import SequenceGroup, pages_needed

logger = logging.getLogger("octavo.execution")

# Bytes that a recorded decoding step takes outside of torch's memory: about 2 KiB for each of a thousand nodes.
GRAPH = 2 * 2**20
# Attention's partial results in a recorded step with prompts, for rows of several queries, which the largest step may
# not have: 77 MB for 8 heads of 128 features, two of which share keys, on 148 multiprocessors.
PARTS = 96 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The uses of a GPU's memory besides pages, in bytes."""

    total: int
    used: int  # memory of weights, libraries and other processes
    weights: int
    step: int  # memory of the largest step while it runs
    graphs: int = 0  # memory reserved for recorded steps

    def left(self, utilization: float) -> int:
        """The bytes left for pages, if this share of the memory may be used; negative if it does not suffice."""
        return int(self.total * utilization) - self.used - self.step - self.graphs


def allocate_pages(
    runner: ModelRunner,
    config: EngineConfig,
    dtype: torch.dtype,
    *,
    max_rows: int,
    graphs: bool,
    beside: int = 0,
    reserved: int = 0,
) -> int:
    """Give a runner its pages in place of its few initial ones; returns their number.

    On a GPU their number depends on what the largest step leaves, unless it is set. Raises ConfigError if there is no
    room for a single page, or less memory than is needed without pages.

    Args:
        max_rows: maximum rows of a step.
        graphs: whether decoding steps will be recorded.
        beside: bytes that another model takes for each page.
        reserved: bytes of the memory that is free now, for other things than pages.
    """
    model, few = runner.model, runner.cache
    device, longest, encoder = model.device, model.max_model_len, model.max_encoder_len
    shapes = model.kv_shapes()
    memory = device_memory(device)
    needs = available = None
    if memory is not None and config.num_gpu_blocks_override is None and config.kv_cache_memory is None:
        needs = measure_needs(runner, memory, config.max_num_batched_tokens, max_rows, graphs=graphs)
        available = needs.left(config.gpu_memory_utilization) - reserved
        _check_room(
            config, needs, page_bytes(shapes, config.block_size, dtype) + beside, model.max_model_len, max_rows, device
        )
    sizes = model.spec.state_sizes
    slots = count_slots(config, sizes, *cache_memory(config, device, reserved=reserved, available=available))
    states = (slots + 1) * slot_bytes(sizes)
    count = count_blocks(
        config,
        shapes,
        longest,
        dtype,
        device,
        max_encoder_len=encoder,
        available=available,
        reserved=reserved,
        states=states,
        beside=beside,
    )
    if model.ranks is not None:
        count = model.ranks.smallest(count)
    runner.cache = KVCache(shapes, count, config.block_size, dtype, device, few.key_centres)
    if sizes:
        runner.cache.states = StateCache(sizes, slots, device)
    if needs is not None:
        logger.info(
            "GPU memory: %s in all; %s used by weights (%s), libraries and other processes; %s for the largest step; "
            "at most %s for recorded steps; %s for the KV cache (--gpu-memory-utilization %s)",
            *map(gib, (needs.total, needs.used, needs.weights, needs.step, needs.graphs, available or 0)),
            config.gpu_memory_utilization,
        )  # fmt: skip
    return count


def measure_needs(runner: ModelRunner, memory: DeviceMemory, max_tokens: int, max_rows: int, *, graphs: bool) -> Needs:
    """Run the largest step, and measure its memory. Raises ConfigError if the step does not fit beside the weights."""
    weights = runner.model.weight_bytes()
    try:
        step = _peak(runner, memory, largest_steps(runner, max_tokens, max_rows))
        tokens = min(max_tokens, LARGEST) if can_record_prompts(runner.model) else 0
        recorded = max(tokens, max_rows)
        graph = _peak(runner, memory, islice(largest_steps(runner, recorded, max_rows), 1)) if graphs else 0
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"The largest step ({max_tokens} tokens, {max_rows} rows) does not fit beside the weights: the GPU has "
            f"{gib(memory.total())}, the weights take {gib(weights)}, {gib(memory.free())} are free "
            f"({str(error).splitlines()[0]}). Lower --max-num-batched-tokens or --max-num-seqs, use a smaller model or "
            f"a 16-bit --dtype, or {another_gpu(runner.model.device)}."
        ) from error
    finally:
        runner.cache.clear_scratch()
    memory.reset()
    # Libraries keep what they took for the first step (workspaces, code): it is part of what is used now.
    return Needs(
        total=memory.total(),
        used=memory.total() - memory.free(),
        weights=weights,
        step=step,
        graphs=graph + count_graphs(max_rows, tokens) * GRAPH + (PARTS if tokens else 0) if graphs else 0,
    )


def _peak(runner: ModelRunner, memory: DeviceMemory, plans: Iterable[StepPlan]) -> int:
    memory.reset()
    before = memory.allocated()
    for plan in plans:
        runner.execute(plan)
    return memory.peak() - before


def count_graphs(max_rows: int, max_tokens: int) -> int:
    """The number of graphs recorded for decoding steps, including sampling, and for steps of up to max_tokens tokens.
    They share one memory pool, which is as large as the largest of them needs."""
    return 2 * len(graph_sizes(max_rows)) + (len(token_sizes(max_tokens)) if max_tokens else 0)


def largest_steps(runner: ModelRunner, max_tokens: int, max_rows: int) -> Iterator[StepPlan]:
    """Plans that take the most memory a step can, each in a different way. Tables name only block 0."""
    model, size = runner.model, runner.cache.block_size
    generates = isinstance(model.spec.head, Lm)
    longest = max(model.max_model_len - 1, 1)
    count = min(max(max_rows, math.ceil(max_tokens / longest)), max_tokens)
    each, more = divmod(min(max_tokens, count * longest), count)
    decoding = Decoding(
        max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=5
    )
    rows = []
    for number in range(count):
        tokens = each + (number < more)
        request = Request(request_id="", prompt_token_ids=(0,) * tokens, decoding=decoding)
        group = SequenceGroup(request, number, b"")
        group.sequences[0].table.extend([0] * pages_needed(tokens, size))
        rows.append(Row(group, group.sequences[0], 0, tokens, int(generates and number < max_rows)))
    plan = build_plan(rows, [], size)
    if model.max_encoder_len is not None:
        length = min(model.max_encoder_len, max_tokens)
        signal, total = model.spec.signal, max_tokens
        signals: tuple[Float32, ...] = ()
        if signal is not None:  # all have the same length
            count = max(max_tokens // length, 1)
            total, signals = count * length, (np.zeros(signal.shape, dtype=np.float32),) * count
        starts = np.append(np.arange(0, total, length), total).astype(np.int32)
        token_ids, slots = np.zeros(total, dtype=np.int32), np.arange(total, dtype=np.int32) % size
        plan = replace(plan, encoder=EncoderBatch(token_ids=token_ids, starts=starts, slots=slots, signals=signals))
    yield plan
    if generates:
        yield score_plan(runner, min(max_tokens, longest))


def _check_room(
    config: EngineConfig, needs: Needs, page: int, max_model_len: int, max_rows: int, device: torch.device
) -> None:
    """Refuse a start without room for a page. Raises ConfigError with the needed and the free memory."""
    share, tokens = config.gpu_memory_utilization, config.max_num_batched_tokens
    left = needs.left(share)
    if left >= 2 * page:  # block 0 is one, too
        return
    request = page * pages_needed(max_model_len, config.block_size)
    graphs = f", recorded steps {gib(needs.graphs)}" if needs.graphs else ""
    raise ConfigError(
        f"The model does not fit into the GPU's memory: of {gib(needs.total)}, --gpu-memory-utilization {share} allows "
        f"{gib(needs.total * share)}. Weights take {gib(needs.weights)}, libraries and other processes "
        f"{gib(needs.used - needs.weights)}{holders(device)}, the largest step ({tokens} tokens, {max_rows} rows) "
        f"{gib(needs.step)}{graphs}: {gib(max(left, 0))} are left for pages, of which one takes {gib(page)} and one "
        f"request of {max_model_len} tokens {gib(request)}. Raise --gpu-memory-utilization, lower "
        "--max-num-batched-tokens, --max-num-seqs or --max-model-len, use a narrower --kv-cache-dtype (fp8, int8)"
        f"{', --enforce-eager' if needs.graphs else ''}, a smaller model, or {another_gpu(device)}."
    )


def warn_if_short(info: EngineInfo) -> None:
    """Warn if not even one request of the full length fits; shorter ones are served."""
    if info.num_blocks and info.full_requests < 1.0:
        logger.warning(
            "The KV cache holds %d tokens, fewer than max_model_len (%d): longer requests will "
            "be refused. Give it more memory (--kv-cache-memory, --gpu-memory-utilization), choose a smaller "
            "--kv-cache-dtype, or lower --max-model-len.",
            info.num_blocks * info.block_size, info.max_model_len,
        )  # fmt: skip
