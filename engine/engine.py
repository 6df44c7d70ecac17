"""The engine turns requests into tokens, one step at a time. It only knows token ids; `engine.text.processor` handles
text."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.config import EngineConfig
from engine.disk.opening import check_kv_disk, open_stores
from engine.disk.tier import DiskTier
from engine.errors import ConfigError, EngineDeadError, InvalidRequestError
from engine.execution.division import check_ranks
from engine.execution.draft_model import DraftModel
from engine.execution.executor import Executor, LocalExecutor, Reading
from engine.execution.profiling import warn_if_short
from engine.execution.runner import ModelRunner
from engine.execution.starting import start
from engine.execution.trained_head import TrainedHead
from engine.host.cgroups import available_memory
from engine.host.cpus import choose_threads
from engine.interface.adapters import AdapterInfo, AdapterRegistry
from engine.interface.cache_map import CacheMap
from engine.interface.generation import GenerationDefaults, load_defaults, log_fallback, plain_defaults, resolve
from engine.interface.inputs import (
    check_terms,
    decoder_start,
    read_aligned_input,
    read_input,
    read_pooling_input,
    repeated,
)
from engine.interface.kv_events import default_topic
from engine.interface.outputs import CompletionOutput, EngineInfo, EngineStats, RequestDelta, RequestOutput
from engine.interface.pooling import check_task, resolve_pooling
from engine.interface.reasoning import LimitedReasoning, check_no_beams
from engine.interface.request import Decoding, EngineInput, PoolingParams, Request, SamplingParams, TokenInput
from engine.interface.speculation import SpeculativeConfig, parse_speculative
from engine.interface.speech import timed
from engine.model.adapters import Adapter
from engine.model.checkpoint import ConfigReader, read_config
from engine.scheduling.block_pool import BlockPool, PageHasher
from engine.scheduling.budget import StepBudget
from engine.scheduling.draft_costs import DraftCosts
from engine.scheduling.drafting import TextDrafter
from engine.scheduling.earlier_answers import EarlierAnswers
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.mapping import draw_map
from engine.scheduling.scheduler import Scheduler
from engine.stepping import Stepping
from engine.text.breakers import BreakerTokens
from engine.text.catalogues import Catalogues, check_files
from engine.text.grammars import Grammars, are_prepared_early
from engine.text.tokenizer import Tokenizer
from engine.text.tokenizer_loading import load_tokenizer

if TYPE_CHECKING:
    from engine.process.kv_events import KVEventPublisher

logger = logging.getLogger("octavo.engine")

# Maximum seconds of a step on a CPU: how long a new request, or a client that leaves, may have to wait.
CPU_STEP_TIME = 0.25

# Threads that fill grammar masks.
MOST_MASK_THREADS = 8

# Tokens that a step of whole inputs may always have: no stream waits for such a step, and fewer tokens would waste a
# busy machine's time.
WHOLE_STEP = 64.0


class Engine:
    """A loaded model with its scheduler. Not thread-safe: one thread calls it.

    Args:
        config: all settings.
        read: reads the config of a checkpoint folder, if the model is loaded in this process.

    Raises:
        ModelLoadError, UnsupportedModelError, ConfigError: the messages suggest what to do.
    """

    def __init__(self, config: EngineConfig, read: ConfigReader = read_config):
        started = time.monotonic()
        self.config = config
        check_files(config.catalogues)
        check_ranks(config)
        check_kv_disk(config)
        self._disk: DiskTier | None = None
        self._publisher = _open_publisher(config)  # before the model loads, so that a taken port is reported at once
        try:
            self._draft_model = _start_draft_model(config, read)
            self.executor: Executor = _start(config, read, self._draft_model)
            try:
                self._prepare(config, read)
            except BaseException:  # a runner in a separate process would keep running
                self.executor.close()
                if self._draft_model is not None:
                    self._draft_model.close()
                raise
        except BaseException:
            if self._publisher is not None:
                self._publisher.close()
            raise
        warn_if_short(self.info)
        self._log_start(time.monotonic() - started)

    def _prepare(self, config: EngineConfig, read: ConfigReader) -> None:
        """Make the objects that plan and drive the executor's steps."""
        facts = self.executor.facts
        info, device = facts.info, torch.device(facts.info.device)
        encoder_only, path = info.encoder_only, Path(info.model_path)
        limits = SchedulerConfig.of(config, facts.needs)
        states = BlockPool(facts.num_states) if facts.num_states else None
        opened = open_stores(config, self.executor)
        hasher = PageHasher(opened[0][0].hash_key) if opened else None
        self.scheduler = Scheduler(limits, BlockPool(info.num_blocks), hasher, states=states)
        if self._publisher is not None:
            if encoder_only or info.max_encoder_len is not None:
                raise ConfigError(
                    f"kv_events_config is for decoder-only models, but {config.model} has an encoder. Remove "
                    f"kv_events_config."
                )
            self.scheduler.record_events()
            self._publisher.start("GPU" if device.type == "cuda" else "CPU")
            self._publish_events()
        if opened:
            self._disk = DiskTier(opened, self.scheduler)
        # On a GPU a step with one token per row is recorded, and takes less time than one that checks several.
        self.scheduler.drafts_forced_tokens = device.type == "cpu"
        step_time = config.max_step_time
        if step_time is None:
            step_time = CPU_STEP_TIME if device.type == "cpu" else 0.0
        self._draft(config, step_time, device)
        floor = WHOLE_STEP if encoder_only else 1.0
        self._budget = StepBudget(step_time, facts.costs, facts.measured, floor=floor) if step_time else None
        ahead = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        if states is not None:
            if ahead:
                logger.info("Layers of this model carry a state: no step is planned ahead (--async-scheduling).")
            ahead = False
        observe = self._draft_model.observe if isinstance(self._draft_model, TrainedHead) else None
        self._stepping = Stepping(self.scheduler, self.executor, self._budget, depth=int(ahead), observe=observe)
        self.defaults = GenerationDefaults()
        if info.entities is None:  # GLiNER's folders have neither of the files that may contain defaults
            honour = config.generation_config == "auto"
            self.defaults = load_defaults(
                path, read(path), info.vocab_size, honour=honour, load_vocabulary=partial(_load_tokenizer, config, info)
            )
        if "generate" in info.tasks:
            log_fallback(self.defaults)
        values = self.defaults.values
        self.info = dataclasses.replace(
            info,
            full_requests=0.0
            if encoder_only
            else limits.fitting(info.max_model_len, info.num_blocks, info.max_encoder_len or 0),
            max_num_seqs=limits.max_num_seqs,
            decoder_start_token_id=None if info.max_encoder_len is None else self.defaults.decoder_start_token_id,
            default_forced_bos_token_id=values.get("forced_bos_token_id"),
            default_max_new_tokens=values.get("max_new_tokens"),
            default_num_beams=int(values.get("num_beams", 1)),
            default_max_length=values.get("max_length"),
            decoding=plain_defaults(self.defaults) if "generate" in info.tasks else {},
            given_up_for_temperature=tuple(name for name in self.defaults.fallback if name != "temperature"),
            speech=self.defaults.speech if info.max_encoder_len is not None else None,
        )
        if self.info.speech is not None and self.info.speech.alignment is not None:
            self.info = dataclasses.replace(self.info, tasks=(*info.tasks, "align"))
        self._grammars = Grammars(
            partial(_load_tokenizer, config, info),
            self.info.vocab_size,
            self.defaults.eos_ids,
            opens_texts=self.info.max_encoder_len is not None,
            threads=min(choose_threads(config.threads, os.environ).count, MOST_MASK_THREADS),
        )
        self._breakers = BreakerTokens(partial(_load_tokenizer, config, info), self.info.vocab_size)
        self._catalogues = Catalogues(
            config.catalogues, self.info, self.defaults, partial(_load_tokenizer, config, self.info)
        )
        self.info = dataclasses.replace(self.info, catalogues=self._catalogues.infos)
        self._random = random.Random(config.seed)
        self._adapters = AdapterRegistry(config.most_loras)
        self._outputs: dict[str, RequestOutput] = {}
        self._crossed = False  # the log has reported a request
        self._closed = False
        for name, adapter in config.adapters.items():
            self.load_adapter(name, adapter)
        self.info = dataclasses.replace(self.info, adapters=tuple(self._adapters))

    @property
    def runner(self) -> ModelRunner:
        assert isinstance(self.executor, LocalExecutor)
        return self.executor.runner

    def add_request(
        self,
        request_id: str,
        input: EngineInput,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        tenant: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Queue a request; the queue itself is not bounded. Raises InvalidRequestError if the request can never run;
        nothing was changed; EngineDeadError if the engine was closed.

        Args:
            request_id: unique among unfinished requests.
            input: token ids, or one of the kinds of `EngineInput`.
            params: how to decode, or which results to compute from the input instead.
            priority: lower runs earlier.
            cache_salt: only requests with the same salt share cached pages.
            deadline: `time.monotonic()` seconds after which the request ends with "abort".
            tenant: the tenant of the request; waiting tenants are served in turn.
            adapter: the name of the request's adapter (`load_adapter`); None for the base model alone.
        """
        if self._closed:
            raise EngineDeadError(f"the engine of {self.config.model} was closed and accepts no more requests.")
        check_terms(request_id, priority, cache_salt, deadline, tenant)
        terms: dict[str, Any] = {
            "request_id": request_id,
            "priority": priority,
            "cache_salt": cache_salt,
            "deadline": deadline,
            "tenant": tenant,
            "adapter": self._adapters.find(adapter),
        }
        if isinstance(params, PoolingParams):
            self._add_pooling(input, params, terms)
            return
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params must be SamplingParams or PoolingParams, not {type(params).__name__}.", param="params"
            )
        check_task(self.info, "generate")
        read = read_input(input, self.info, start=decoder_start(params, self.info))
        encoder_input, prompt = read.encoder_token_ids, read.token_ids
        params = self._catalogues.completed(params, len(prompt))
        decoding = resolve(
            params,
            self.defaults,
            prompt_len=len(prompt),
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            random_seed=self._random.getrandbits(64),
            prompt_name="decoder_prompt" if encoder_input else "prompt",
            constraint=None if params.structured_outputs is None else self._grammars.get(params.structured_outputs),
            breakers=self._breakers.get(params.dry_sequence_breakers) if params.uses_dry else None,
        )
        if decoding.num_beams > self.config.most_beams:
            raise InvalidRequestError(
                f"num_beams is {decoding.num_beams}, but at most {self.config.most_beams} are allowed "
                f"(max_num_beams). Lower it, or raise --max-num-beams.",
                param="num_beams",
            )
        decoding = self._catalogues.constrained(params, decoding)
        if params.reasoning_budget is not None:
            check_no_beams(decoding.num_beams)
            limit = LimitedReasoning(params.reasoning_budget, self.info.vocab_size, decoding.constraint)
            decoding = dataclasses.replace(decoding, constraint=limit)
        if params.timestamps:
            decoding = timed(decoding, self.info.speech, self.info.vocab_size)
        request = Request(
            prompt_token_ids=prompt,
            decoding=decoding,
            encoder_token_ids=encoder_input,
            sides=read.sides,
            signal=read.signal,
            images=read.images,
            **terms,
        )
        self.scheduler.add(request)
        self._tell_crossing(request)
        self._outputs[request_id] = RequestOutput(
            request_id=request_id,
            prompt=input.text if isinstance(input, TokenInput) else None,
            prompt_token_ids=list(prompt),
            encoder_token_ids=list(encoder_input) if encoder_input and read.signal is None else None,
            outputs=[CompletionOutput(index=i) for i in range(decoding.n)],
            finished=False,
        )

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Begin the slow work of `add_request` in a thread, so that `add_request` finds it done: compiling a grammar,
        or looking up sequence breakers of DRY. None if nothing is left to do. The future raises the errors that
        `add_request` would raise."""
        compiling = None
        if params.structured_outputs is not None:
            compiling = self._grammars.begin(params.structured_outputs)
        if compiling is None and params.uses_dry:
            return self._breakers.begin(params.dry_sequence_breakers)
        return compiling

    def warm_grammars(self) -> None:
        """Prepare the data that all grammars need, in a thread, unless it is ready."""
        self._grammars.warm()

    @property
    def warms_grammars(self) -> bool:
        """Whether grammars are prepared at start. They are if the model generates text and they need little memory,
        compared with its weights or with the free memory."""
        if "generate" not in self.info.tasks:
            return False
        return are_prepared_early(self.info.vocab_size, self.executor.facts.weights, available_memory())

    def _tell_crossing(self, request: Request) -> None:
        """Log if an answer may exceed the length of pretraining, the first time as a warning."""
        limit = self.scheduler.config.needs.crossed_limit(request)
        if limit is None:
            return
        logger.log(
            logging.DEBUG if self._crossed else logging.WARNING,
            "a request of %d prompt tokens may reach %d with its max_tokens of %d, more than the %d that this model "
            "was first trained with: it uses the rotary factors for long sequences from its first token on. Set "
            "max_tokens to %d or less to use those for short ones.%s",
            len(request.prompt_token_ids), request.reach, request.decoding.max_tokens, limit,
            limit - len(request.prompt_token_ids) + 1,
            "" if self._crossed else " Later requests of this kind are logged at level debug.",
        )  # fmt: skip
        self._crossed = True

    def _add_pooling(self, input: EngineInput, params: PoolingParams, terms: dict[str, Any]) -> None:
        check_task(self.info, params.task)
        if params.task == "align":
            read = read_aligned_input(input, self.info)
        else:
            read = read_pooling_input(input, self.info)
        prompt, encoder_input = read.token_ids, read.encoder_token_ids
        if self.info.repeats is not None:
            encoder_input, prompt = prompt, repeated(prompt, self.info.repeats)
        request = Request(
            prompt_token_ids=prompt,
            encoder_token_ids=encoder_input,
            sides=read.sides,
            signal=read.signal,
            images=read.images,
            decoding=Decoding(max_tokens=1, temperature=0.0),
            pooling=resolve_pooling(params, self.info, prompt_len=len(read.token_ids)),
            **terms,
        )
        self.scheduler.add(request)
        self._outputs[request.request_id] = RequestOutput(
            request_id=request.request_id,
            prompt=input.text if isinstance(input, TokenInput) else None,
            prompt_token_ids=list(prompt) if read.signal is None or encoder_input else [],
            encoder_token_ids=list(encoder_input) if encoder_input and read.signal is None else None,
            outputs=[],
            finished=False,
        )

    def abort_request(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its answers, at once; its pages are free on return. Unknown ids are
        ignored: the request may just have finished."""
        self.scheduler.abort(request_id, choice)
        if not self.scheduler.knows(request_id):
            self._outputs.pop(request_id, None)

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The loaded adapters by name."""
        return {info.name: info for info in self._adapters}

    def load_adapter(self, name: str, source: Adapter | str, *, replacing: str | None = None) -> AdapterInfo:
        """Load a low-rank adapter; running requests continue. `source`: the adapter's folder or file, or the adapter
        itself, if the model is loaded in this process. `replacing`: the name of an adapter to unload, once the new one
        is read. Raises AdapterError: all `max_loras` slots are taken, the name is taken, or the adapter does not match
        the model; nothing was changed."""
        return self.finish_adapter(name, self.read_adapter(name, source, replacing=replacing), replacing=replacing)

    def read_adapter(self, name: str, source: Adapter | str, *, replacing: str | None = None) -> Reading:
        """Start `load_adapter`: the adapter is read while steps run. Raises AdapterError if no slot is free, or the
        name is taken."""
        self._adapters.reserve(name, replacing)
        try:
            return self.executor.read_adapter(name, source)
        except BaseException:
            self._adapters.cancel(name)
            raise

    def finish_adapter(self, name: str, reading: Reading, *, replacing: str | None = None) -> AdapterInfo:
        """Finish `load_adapter`: put the adapter into its slot when it has been read. Raises AdapterError if it does
        not match the model; nothing was changed."""
        try:
            reading.wait()
            if replacing is not None:
                self.unload_adapter(replacing)
            info = self.executor.load_adapter(reading, self._adapters.free_slot())
        except BaseException:
            self._adapters.cancel(name)
            raise
        self._adapters.add(info)
        logger.info("Loaded the adapter %s from %s (%.1f MiB)", name, info.path, info.num_bytes / (1 << 20))
        return info

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Its unfinished requests end with an error, which the next step returns. Raises
        AdapterError if no adapter has this name."""
        info = self._adapters.pop(name)
        groups = [group for group in self.scheduler.groups() if group.request.adapter is info]
        self.scheduler.end(groups, f"the adapter {name!r} was unloaded while the request ran.")
        self.executor.unload_adapter(info.slot)
        logger.info("Unloaded the adapter %s", name)

    def has_unfinished_requests(self) -> bool:
        """Whether another `step` has something to do."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests with new results, each with its whole answer so far."""
        outputs = []
        for delta in self._advance():
            output = self._outputs[delta.request_id]
            output.accumulate(delta)
            outputs.append(output.copy())
            if delta.finished:
                del self._outputs[delta.request_id]
        return outputs

    def step_deltas(self) -> list[RequestDelta]:
        """Run one step. Returns only the new results. Do not mix with `step` for the same request."""
        deltas = self._advance()
        for delta in deltas:
            if delta.finished:
                self._outputs.pop(delta.request_id, None)
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget the contents of all pages; returns False, and forgets nothing, while requests hold some."""
        done = self.scheduler.pool.clear()
        if done and self.scheduler.states is not None:
            self.scheduler.states.pool.clear()
        self._publish_events()
        return done

    def keep_pages(self) -> None:
        """Write the pages that the disk lacks, if it keeps any; any thread may call this before the process ends."""
        if self._disk is not None:
            self._disk.flush()

    def _advance(self) -> list[RequestDelta]:
        if self._disk is not None:
            self._disk.turn()
        deltas = self._stepping.advance()
        if self._publisher is not None:
            self._publish_events()
        return deltas

    def _publish_events(self) -> None:
        events = self.scheduler.events
        if self._publisher is not None and events is not None and events.events:
            self._publisher.publish(events.take())

    def stats(self) -> EngineStats:
        """Counters and gauges, as a copy."""
        stats = dataclasses.replace(self.scheduler.snapshot())
        if self._publisher is not None:
            stats.num_kv_event_messages = self._publisher.num_messages
            stats.num_kv_event_drops = self._publisher.num_dropped
        if self._disk is not None:
            self._disk.count(stats)
        if any(True for _ in self._adapters):
            stats.running_adapters, stats.waiting_adapters = self.scheduler.adapters_in_use()
        return stats

    def cache_map(self) -> CacheMap:
        """The contents of the pages at this moment, and the requests that use them."""
        return draw_map(self.scheduler.pool, self.scheduler.groups())

    def check_integrity(self) -> None:
        """Raise AssertionError if a page leaked or is counted wrongly."""
        self.scheduler.check_integrity()
        if self._draft_model is not None:
            self._draft_model.check_integrity()

    def close(self) -> None:
        """Free the model and the pages. The engine cannot be used afterwards."""
        for group in list(self.scheduler.groups()):
            self.scheduler.abort(group.request.request_id)
        while self.scheduler.skip():  # a step in flight holds its results
            pass
        self._outputs.clear()
        if not self._closed:
            self._closed = True
            if self._disk is not None:
                self._disk.close()
            if self._publisher is not None:
                self.reset_prefix_cache()
                self._publisher.close()
            self.executor.close()
            if self._draft_model is not None:
                self._draft_model.close()
            del self.executor, self._stepping

    def _draft(self, config: EngineConfig, step_time: float, device: torch.device) -> None:
        """Enable drafts if they are set or likely to help: if a step waits for memory, a draft costs little. A client's
        prediction is a reason, too, unless drafts are off by the settings. `step_time`: limit of a step in seconds, 0
        for none. With 0, nothing depends on the clock unless it is requested."""
        settings = SpeculativeConfig()
        own = bool(step_time) and device.type == "cpu"
        if config.speculative_config is not None:
            settings, own = parse_speculative(config.speculative_config), True
        if self._draft_model is not None:
            info = self.executor.facts.info
            self._draft_model.join(info)
            if isinstance(self._draft_model, TrainedHead):
                self.scheduler.drafter, self.scheduler.draft_costs = self._draft_model, DraftCosts()
                return
            tokenizer = _load_tokenizer(config, info)
            small = _load_tokenizer(dataclasses.replace(config, tokenizer=None), self._draft_model.info)
            if tokenizer is not None and small is not None:
                self._draft_model.check_tokens(info, tokenizer.token_text, small.token_text)
            self.scheduler.drafter, self.scheduler.draft_costs = self._draft_model, DraftCosts()
        elif settings.method != "off" and "generate" in self.executor.facts.info.tasks:
            earlier = EarlierAnswers() if settings.keeps_answers else None
            self.scheduler.drafter = TextDrafter(settings.num_speculative_tokens, own=own, earlier=earlier)
            self.scheduler.draft_costs = DraftCosts() if own else None

    def _log_start(self, seconds: float) -> None:
        info = self.info
        tokens = info.num_blocks * info.block_size
        logger.info("Loaded %s (%s, %s) in %.1f s", info.model, info.format, info.device, seconds)
        logger.debug(  # the server logs it with more details
            "KV cache: %d pages of %d tokens = %d tokens in %s; %.1f requests of the full %d tokens fit, "
            "and at most %d sequences run in one step",
            info.num_blocks, info.block_size, tokens, info.kv_cache_dtype, info.full_requests, info.max_model_len,
            info.max_num_seqs,
        )  # fmt: skip


def _load_tokenizer(config: EngineConfig, info: EngineInfo) -> Tokenizer | None:
    """The model's tokenizer, which grammars and DRY's sequence breakers need."""
    if config.skip_tokenizer_init:
        return None
    return load_tokenizer(
        config.tokenizer or info.model_path,
        revision=config.revision if config.tokenizer else None,
        hf_token=config.hf_token,
        lower_case=info.lower_case,
    )


def _open_publisher(config: EngineConfig) -> KVEventPublisher | None:
    events = config.kv_events
    if events is None:
        return None
    try:
        from engine.process.kv_events import KVEventPublisher  # needs packages that an engine without it does not
    except ModuleNotFoundError as error:
        raise ConfigError(f"kv_events_config needs the package {error.name}, which is not installed.") from error
    topic = events.topic or default_topic(config.model, None, os.environ)
    return KVEventPublisher(events, topic, config.block_size)


def _start_draft_model(config: EngineConfig, read: ConfigReader) -> DraftModel | None:
    settings = None if config.speculative_config is None else parse_speculative(config.speculative_config)
    if settings is None or settings.method not in ("draft_model", "mtp", "eagle3"):
        return None
    return (DraftModel if settings.method == "draft_model" else TrainedHead)(config, settings, read)


def _start(config: EngineConfig, read: ConfigReader, drafter: DraftModel | None) -> Executor:
    if config.distributed_executor_backend == "uni":
        if isinstance(drafter, TrainedHead):
            return start(config, read, beside=drafter)
        return start(config, read, beside=0 if drafter is None else drafter.page_bytes)
    from engine.process.runner import ProcessExecutor  # needs more packages than an engine in one process

    return ProcessExecutor(config)
