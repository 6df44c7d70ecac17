"""The engine: requests in, tokens out, one step at a time. It knows ids only; text is `engine.text`'s."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from typing import Any

import torch

from engine import gpu
from engine.attention import select
from engine.attention.formats import LARGEST, format_name
from engine.cache_map import CacheMap
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, InvalidRequestError
from engine.execution.calibration import mean_keys
from engine.execution.executor import LocalExecutor
from engine.execution.invariance import min_invariant_rows
from engine.execution.kv_cache import KVCache, choose_cache_dtype
from engine.execution.loading import (
    check_positions_fit,
    check_weights_fit,
    explained,
    find_max_model_len,
    find_quantization,
)
from engine.execution.profiling import allocate_pages, warn_if_short
from engine.execution.runner import ModelRunner
from engine.execution.threads import use_threads
from engine.execution.warmup import can_record, measure, record
from engine.generation import GenerationDefaults, load_defaults, resolve
from engine.inputs import check_terms, decoder_start, read_input, read_pooling_input
from engine.model.abilities import find_abilities
from engine.model.checkpoint import locate, read_config
from engine.model.config_values import check_parameters
from engine.model.families import build_spec, context_length
from engine.model.projection import load_projection
from engine.model.sentence import read_pipeline
from engine.model.weights import load_model, stored_dtype
from engine.outputs import CompletionOutput, EngineInfo, EngineStats, RequestDelta, RequestOutput
from engine.pooling import check_task, resolve_pooling
from engine.request import Decoding, EngineInput, PoolingParams, Request, SamplingParams, TokenInput
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.budget import StepBudget
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.mapping import draw_map
from engine.scheduling.scheduler import Scheduler
from engine.stepping import Stepping

logger = logging.getLogger("octavo.engine")

# Seconds a step should stay under on a CPU: how long a new request, or a client that leaves, may have to wait.
CPU_STEP_TIME = 0.25

# Tokens that a step of whole inputs may always hold: no stream waits for one, and fewer waste a busy machine's time.
WHOLE_STEP = 64.0


class Engine:
    """A loaded model with its scheduler. Not thread-safe: one thread calls it.

    Args:
        config: all settings.

    Raises:
        ModelLoadError, UnsupportedModelError, ConfigError: with what to do about it.
    """

    def __init__(self, config: EngineConfig):
        device = choose_device(config.device)
        with explained(config.model), gpu.current(device):
            self._load(config, device)

    def _load(self, config: EngineConfig, device: torch.device) -> None:
        started = time.monotonic()
        self.config = config
        use_threads(config)
        pipeline = read_pipeline(locate(config.model, config.revision, config.hf_token))
        path = pipeline.transformer
        hf_config = read_config(path)
        spec = build_spec(hf_config)
        check_parameters(path, spec)
        stored = stored_dtype(path, hf_config)
        dtype = choose_dtype(config.dtype, stored, device)
        quantization = find_quantization(config, device)
        cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype)
        check_weights_fit(path, stored, dtype, device, quantization, config.gpu_memory_utilization)
        max_model_len = find_max_model_len(config, hf_config, spec, pipeline.max_seq_length)
        check_positions_fit(spec, max_model_len)
        abilities = find_abilities(hf_config, spec, pipeline)
        backend = select(device, [b.attention for b in spec.trunk.blocks], cache_dtype if spec.decoder else None)
        model = load_model(
            path,
            hf_config,
            spec,
            dtype=dtype,
            device=device,
            backend=backend,
            max_model_len=max_model_len,
            show_progress=config.show_progress,
            quantization=quantization,
            quantization_cache=config.quantization_cache,
        )
        model.pack(quantization)
        if model.spec != spec:  # the head it names is not stored, for example
            spec = model.spec
            abilities = find_abilities(hf_config, spec, pipeline)
        shapes = model.kv_shapes()
        whole, num_blocks = spec.decoder is None, 0
        centres = mean_keys(model, context_length(hf_config, spec)) if cache_dtype in LARGEST and not whole else None
        cache = KVCache(shapes, int(not whole), config.block_size, cache_dtype, device, centres)
        self.runner = ModelRunner(
            model,
            cache,
            max_num_batched_tokens=config.max_num_batched_tokens,
            min_rows=min_invariant_rows(model),
            activation=abilities.activation,
            project=load_projection(pipeline.layers, device),
        )
        if not whole:
            recorded = backend.recordable and can_record(model) and not config.enforce_eager
            num_blocks = allocate_pages(self.runner, config, cache_dtype, max_rows=config.most_seqs, graphs=recorded)
        costs, measured = measure(self.runner, max_tokens=config.max_num_batched_tokens, max_model_len=max_model_len)
        step_time = config.max_step_time
        if step_time is None:
            step_time = CPU_STEP_TIME if device.type == "cpu" else 0.0
        floor = WHOLE_STEP if whole else 1.0
        self._budget = StepBudget(step_time, costs, measured, floor=floor) if step_time else None
        self.defaults: GenerationDefaults = load_defaults(
            path, hf_config, model.vocab_size, honour=config.generation_config == "auto"
        )
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_batched_tokens if whole and config.max_num_seqs is None else config.most_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            window=spec.attention_span,
            whole_inputs=whole,
            rotary_shifts=model.rotary_shifts,
        )
        record(self.runner, backend, 0 if config.enforce_eager else limits.max_num_seqs)
        self.scheduler = Scheduler(limits, BlockPool(num_blocks))
        ahead = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        self._stepping = Stepping(self.scheduler, LocalExecutor(self.runner), self._budget, depth=int(ahead))
        self.info = EngineInfo(
            model=config.model,
            model_path=str(path),
            dtype=str(dtype).removeprefix("torch."),
            kv_cache_dtype=format_name(cache_dtype),
            device=str(device),
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            block_size=0 if whole else config.block_size,
            num_blocks=num_blocks,
            full_requests=0.0 if whole else limits.fitting(max_model_len, num_blocks, model.max_encoder_len or 0),
            max_num_seqs=limits.max_num_seqs,
            max_num_beams=config.max_num_beams,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_encoder_len=model.max_encoder_len,
            encoder_vocab_size=None if model.max_encoder_len is None else spec.encoder_vocab_size,
            decoder_start_token_id=None if model.max_encoder_len is None else self.defaults.decoder_start_token_id,
            default_forced_bos_token_id=self.defaults.values.get("forced_bos_token_id"),
            default_max_new_tokens=self.defaults.values.get("max_new_tokens"),
            default_max_length=self.defaults.values.get("max_length"),
            first_context_len=model.rotary_shifts[0][0] if model.rotary_shifts else None,
            whole_inputs=whole,
            hidden_size=spec.trunk.output_size,
            quantization=quantization,
            **abilities.facts(),
        )
        self._random = random.Random(config.seed)
        self._outputs: dict[str, RequestOutput] = {}
        self._crossed = False  # a request has been told of
        warn_if_short(self.info)
        self._log_start(time.monotonic() - started)

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
    ) -> None:
        """Queue a request; the queue itself is not bounded.

        Args:
            request_id: unique among unfinished requests.
            input: token ids, or a `TokenInput`.
            params: how to decode, or what to make of the input instead.
            priority: lower runs earlier.
            cache_salt: only requests of the same salt share cached pages.
            deadline: `time.monotonic()` seconds after which the request is ended with "abort".
            tenant: on whose behalf it is; tenants that wait are served in turn.

        Raises:
            InvalidRequestError: the request can never run; nothing was changed.
            EngineDeadError: the engine was closed.
        """
        if not hasattr(self, "runner"):
            raise EngineDeadError(f"the engine of {self.config.model} was closed and takes no more requests.")
        check_terms(request_id, priority, cache_salt, deadline, tenant)
        terms: dict[str, Any] = {
            "request_id": request_id,
            "priority": priority,
            "cache_salt": cache_salt,
            "deadline": deadline,
            "tenant": tenant,
            "arrival_time": time.monotonic(),
        }
        if isinstance(params, PoolingParams):
            self._add_pooling(input, params, terms)
            return
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params must be SamplingParams or PoolingParams, not {type(params).__name__}.", param="params"
            )
        check_task(self.info, "generate")
        encoder_input, prompt = read_input(input, self.info, start=decoder_start(params, self.info))
        decoding = resolve(
            params,
            self.defaults,
            prompt_len=len(prompt),
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            random_seed=self._random.getrandbits(64),
            prompt_name="decoder_prompt" if encoder_input else "prompt",
        )
        if decoding.num_beams > self.config.max_num_beams:
            raise InvalidRequestError(
                f"num_beams is {decoding.num_beams}, but at most {self.config.max_num_beams} are allowed "
                "(max_num_beams). Ask for fewer, or raise --max-num-beams.",
                param="num_beams",
            )
        request = Request(prompt_token_ids=prompt, decoding=decoding, encoder_token_ids=encoder_input, **terms)
        self.scheduler.add(request)
        self._tell_crossing(request)
        self._outputs[request_id] = RequestOutput(
            request_id=request_id,
            prompt=input.text if isinstance(input, TokenInput) else None,
            prompt_token_ids=list(prompt),
            encoder_token_ids=list(encoder_input) if encoder_input else None,
            outputs=[CompletionOutput(index=i) for i in range(decoding.n)],
            finished=False,
        )

    def _tell_crossing(self, request: Request) -> None:
        """Say it, the first time as a warning, where an answer may pass the length of pretraining."""
        limit = self.scheduler.config.crossed_limit(request)
        if limit is None:
            return
        logger.log(
            logging.DEBUG if self._crossed else logging.WARNING,
            "a request of %d prompt tokens may reach %d with its max_tokens of %d, more than the %d that this model "
            "was first trained with: it gets the rotary factors for long sequences from its first token on. Set "
            "max_tokens to %d or less for those of short ones.%s",
            len(request.prompt_token_ids), request.reach, request.decoding.max_tokens, limit,
            limit - len(request.prompt_token_ids) + 1,
            "" if self._crossed else " Later requests of this kind are told at the level debug.",
        )  # fmt: skip
        self._crossed = True

    def _add_pooling(self, input: EngineInput, params: PoolingParams, terms: dict[str, Any]) -> None:
        check_task(self.info, params.task)
        prompt, types = read_pooling_input(input, self.info)
        request = Request(
            prompt_token_ids=prompt,
            token_type_ids=types,
            decoding=Decoding(max_tokens=1, temperature=0.0),
            pooling=resolve_pooling(params, self.info, prompt_len=len(prompt)),
            **terms,
        )
        self.scheduler.add(request)
        self._outputs[request.request_id] = RequestOutput(
            request_id=request.request_id,
            prompt=input.text if isinstance(input, TokenInput) else None,
            prompt_token_ids=list(prompt),
            outputs=[],
            finished=False,
        )

    def abort_request(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its answers, at once; its pages are free on return. Unknown ids are
        ignored: the request may just have finished."""
        self.scheduler.abort(request_id, choice)
        if not self.scheduler.knows(request_id):
            self._outputs.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        """Another `step` has something to do."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Run one step; the requests that it brought news for, each with its whole answer so far."""
        outputs = []
        for delta in self._stepping.advance():
            output = self._outputs[delta.request_id]
            output.accumulate(delta)
            outputs.append(output.copy())
            if delta.finished:
                del self._outputs[delta.request_id]
        return outputs

    def step_deltas(self) -> list[RequestDelta]:
        """Run one step; only what is new. Do not mix with `step` for the same request."""
        deltas = self._stepping.advance()
        for delta in deltas:
            if delta.finished:
                self._outputs.pop(delta.request_id, None)
        return deltas

    def stats(self) -> EngineStats:
        """Counters and gauges, as a copy."""
        return dataclasses.replace(self.scheduler.snapshot())

    def cache_map(self) -> CacheMap:
        """What the pages hold at this moment, and for whom."""
        return draw_map(self.scheduler.pool, self.scheduler.groups())

    def check_integrity(self) -> None:
        """Raise AssertionError if a page leaked or is counted wrongly."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Free the model and the pages. The engine cannot be used afterwards."""
        for group in list(self.scheduler.groups()):
            self.scheduler.abort(group.request.request_id)
        while self.scheduler.skip():  # a step in flight holds what it computes
            pass
        self._outputs.clear()
        if hasattr(self, "runner"):
            on_gpu = self.runner.model.device.type == "cuda"
            del self.runner, self._stepping
            if on_gpu:
                torch.cuda.empty_cache()

    def _log_start(self, seconds: float) -> None:
        info = self.info
        tokens = info.num_blocks * info.block_size
        logger.info("loaded %s (%s, %s) in %.1f s", info.model, info.format, info.device, seconds)
        logger.debug(  # the server says it with more
            "KV cache: %d pages of %d tokens = %d tokens in %s; %.1f requests of the full %d tokens fit, "
            "and at most %d sequences run in one step",
            info.num_blocks, info.block_size, tokens, info.kv_cache_dtype, info.full_requests, info.max_model_len,
            info.max_num_seqs,
        )  # fmt: skip


def choose_device(setting: str) -> torch.device:
    """The device a setting means; auto takes a GPU where there is one.

    Raises:
        ConfigError: a GPU was asked for and torch sees none.
    """
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(setting)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device is {setting}, but torch {torch.__version__} sees {count} GPUs. Use --device cpu, or install "
                "a CUDA build of torch and a driver."
            )
    return device


def choose_dtype(setting: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The format to compute in; auto takes the checkpoint's, but float32 on a CPU for which 16-bit
    formats are slow."""
    if setting != "auto":
        chosen: torch.dtype = getattr(torch, setting)
        return chosen
    if device.type == "cpu" and stored != torch.float32:
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    return stored if stored in (torch.float32, torch.bfloat16, torch.float16) else torch.float32


def has_fast_bfloat16() -> bool:
    """The CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX)."""
    capability = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(capability is not None and capability()) or bool(
        getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    )
