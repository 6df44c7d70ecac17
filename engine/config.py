"""The engine's settings, under vLLM's names where vLLM has the setting."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from engine.errors import ConfigError
from engine.interface.json_settings import as_json
from engine.interface.kv_events import KVEventsConfig, parse_kv_events
from engine.interface.speculation import parse_speculative

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: int | str, setting: str) -> int:
    """Bytes from an integer or a text such as "4GiB", "512MiB" or "2g".

    Raises:
        ConfigError: not a size, or not above 0.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(value).lower())
        if not match or match[2] not in _UNITS:
            raise ConfigError(f"{setting} must be a size such as 4GiB, 512MiB or a number of bytes, got {value!r}.")
        size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise ConfigError(f"{setting} must be above 0, got {value!r}.")
    return size


DEFAULT_NUM_SEQS = 128
DEFAULT_NUM_BEAMS = 16
MOST_LORA_RANK = 256
ADAPTER_NAME = re.compile(r"[\w./:-]{1,128}", re.ASCII)
CATALOGUE_NUM_BEAMS = 256  # ranking answers by beams needs many beams
_LARGEST = 2**63 - 1  # the limit of a message to the engine's process


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: local folder, GGUF file or hub id. A GGUF file on the hub is org/name:Q4_K_M.
        mmproj: image projector of a GGUF model, a GGUF file; or none, to serve the model without images (default: the
            only mmproj*.gguf in the model's folder).
        tokenizer: folder or hub id of the tokenizer, if it is not the model's own.
        skip_tokenizer_init: do not load a tokenizer; requests and answers contain token ids.
        revision: branch, tag or commit on the hub.
        hf_token: token for gated models on the hub (default: HF_TOKEN).
        dtype: format of weights and activations. auto takes the checkpoint's format, but float32 on a CPU without fast
            bfloat16.
        quantization: format of the weight matrices. int8 and int4 (a scale per 32 inputs) and int8-fast (a scale per
            output: faster, less exact, CPU only) are made at load time. stored keeps weights that are already quantized
            as they are. none expands them to dtype (default: stored on a CPU, none on a GPU).
        quantization_cache: folder that keeps quantized weights for the next start, or off (default: octavo/quantization
            in the user's cache).
        share_weights: on a CPU, store the weights of every model in quantization_cache, in the form that the kernels
            read, and map them from there. Engines with the same model then share one copy in memory and start faster.
            The folder grows by the size of the model (default: off; in a service with several models, on for those that
            are not pinned).
        device: cpu, cuda, cuda:N or auto.
        threads: number of CPU threads (default: OMP_NUM_THREADS, else one per available core, within the limit of the
            container).
        max_model_len: maximum tokens of prompt and answer together (default: the model's maximum).
        max_num_seqs: maximum sequences in one step (default: 128, or max_num_batched_tokens if that is lower; no limit
            for models without a KV cache).
        max_num_batched_tokens: maximum tokens in one step.
        max_step_time: target duration of a step in seconds. Prompts are split into smaller chunks to stay below it
            (default: 0.25 on a CPU, no limit on a GPU and in `LLM`; 0: no limit).
        async_scheduling: plan and launch each step while the previous one runs (default: on for GPUs; a CPU gains
            nothing).
        distributed_executor_backend: where steps are computed: uni in the engine's process, mp in a separate process.
        tensor_parallel_size: divide each layer of the model among this many processes, each of which loads its part of
            the weights. The processes share kv_cache_memory. threads is the number for each process; by default, the
            cores are divided among them. CPU only.
        block_size: tokens per page of the KV cache.
        kv_cache_memory: size of the KV cache, such as "4GiB" (default on a CPU: a quarter of the free memory, at most 4
            GiB; on a GPU: the memory that gpu_memory_utilization leaves).
        kv_cache_dtype: format of the KV cache. auto uses dtype. int8 and fp8 (e4m3) have a scale per head and token;
            they hold about twice as many tokens as a 16-bit format in the same memory.
        gpu_memory_utilization: share of the GPU's memory for weights, activations and KV cache.
        num_gpu_blocks_override: number of pages of the KV cache, on any device, instead of kv_cache_memory.
        enforce_eager: do not record decoding steps as CUDA graphs. The engine starts sooner and needs less memory, but
            small steps take longer.
        flash_prefill: on a GPU, compute prompts of more than 2048 tokens with torch's flash attention if they fit into
            one step (max_num_batched_tokens above 2048) and the KV cache has the model's 16-bit format. The last bits
            of the results then depend on how a prompt was split or cached.
        enable_prefix_caching: reuse the KV cache of earlier prompts with the same beginning.
        kv_disk: folder that keeps pages of the KV cache for which memory has no room, and those of a process that ends.
            Prompts find them again after a restart (default: none are kept).
        kv_disk_size: maximum bytes that all pages in kv_disk take, such as "20GiB".
        kv_events_config: publish which pages are cached, for routers that choose a server by the beginning of a prompt.
            JSON in vLLM's format, such as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}.
        speculative_config: draft tokens and check several in one step. Answers do not change. ngram drafts the tokens
            that followed an earlier occurrence of the last tokens; suffix looks at earlier answers of the same API key,
            too; mtp drafts with the model's layer for multi-token prediction; off drafts nothing. JSON in vLLM's format
            works too, such as {"method": "ngram", "num_speculative_tokens": 8}; a draft model and an EAGLE-3 head need
            it (default: ngram on a CPU if max_step_time is not 0; off on a GPU and in `LLM`).
        chat_template: Jinja chat template that replaces the tokenizer's own: a file, or chatml, gemma, llama2, llama3,
            mistral, phi3, plain, vicuna or zephyr.
        generation_config: auto applies the model's generation_config.json, none ignores it.
        max_num_beams: maximum beams per request (default: 16; with a catalogue 256, or max_num_seqs if that is lower).
        lora_modules: NAME=PATH: a LoRA adapter to load at the start, a folder of PEFT or a GGUF file. Requests select
            it by sending NAME as their model. Several values, repeated flags and vLLM's JSON form {"name": "sql",
            "path": "adapters/sql"} work too.
        max_loras: maximum LoRA adapters that are loaded at the same time (default: as many as lora_modules names; 0
            turns adapters off).
        max_lora_rank: maximum rank of an adapter, at most 256 (default: the largest of lora_modules, else 64).
        lora_dtype: format of adapters' numbers on a CPU: float32, bfloat16 or float16. auto keeps matrices that have
            bfloat16's or float16's precision, and rounds the others to dtype. A GPU always uses the model's dtype.
        catalogue: NAME=FILE: a list of titles to which answers can be limited. Each line of the file is JSON: a text,
            or an object with text or ids. For several lists, repeat the flag or separate them by commas.
        seed: seed for requests without their own seed (default: random).
        show_progress: show a progress bar while weights load (default: if stderr is a terminal).
    """

    model: str
    mmproj: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    hf_token: str | None = field(default=None, repr=False)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int8-fast", "int4", "stored"] | None = None
    quantization_cache: str | None = None
    share_weights: bool | None = None
    device: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    max_step_time: float | None = None
    async_scheduling: bool | None = None
    distributed_executor_backend: Literal["uni", "mp"] = "uni"
    tensor_parallel_size: int = 1
    block_size: int = 16
    kv_cache_memory: int | str | None = None
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"] = "auto"
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool = False
    flash_prefill: bool = False
    enable_prefix_caching: bool = True
    kv_disk: str | None = None
    kv_disk_size: int | str = "20GiB"
    kv_events_config: str | None = None
    speculative_config: str | None = None
    chat_template: str | None = None
    generation_config: Literal["auto", "none"] = "auto"
    max_num_beams: int | None = None
    lora_modules: tuple[str, ...] = ()
    max_loras: int | None = None
    max_lora_rank: int | None = None
    lora_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    catalogue: tuple[str, ...] = ()
    seed: int | None = None
    show_progress: bool | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model must name a local folder or a hub id, got an empty value.")
        for name in ("max_num_batched_tokens", "block_size", "tensor_parallel_size"):
            self._at_least(name, 1)
        for name in ("threads", "max_model_len", "max_num_seqs", "max_num_beams", "num_gpu_blocks_override"):
            if getattr(self, name) is not None:
                self._at_least(name, 1)
        self._check_adapters()
        if self.tensor_parallel_size > 1:  # each rank is a process
            object.__setattr__(self, "distributed_executor_backend", "mp")
        if self.max_num_batched_tokens < self.most_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.most_seqs}): every running sequence needs one token per step. "
                "Raise --max-num-batched-tokens or lower --max-num-seqs."
            )
        if self.seed is not None:
            self._at_least("seed", -_LARGEST)
        if self.max_step_time is not None:
            self._not_negative("max_step_time")
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise ConfigError(f"async_scheduling must be true, false or None, got {self.async_scheduling!r}.")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}.")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}.")
        if self.quantization not in (None, "none", "int8", "int8-fast", "int4", "stored"):
            raise ConfigError(f"quantization must be none, int8, int8-fast, int4 or stored, got {self.quantization!r}.")
        if self.quantization_cache == "":
            raise ConfigError('quantization_cache must be a folder or off, got "".')
        if self.share_weights and self.quantization_cache == "off":
            raise ConfigError("share_weights keeps weights in quantization_cache, but that is off. Name a folder.")
        if self.kv_cache_dtype not in ("auto", "float32", "bfloat16", "float16", "int8", "fp8"):
            raise ConfigError(
                f"kv_cache_dtype must be auto, float32, bfloat16, float16, int8 or fp8, got {self.kv_cache_dtype!r}."
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}.")
        if self.distributed_executor_backend not in ("uni", "mp"):
            raise ConfigError(
                f"distributed_executor_backend must be uni or mp, got {self.distributed_executor_backend!r}."
            )
        if self.generation_config not in ("auto", "none"):
            raise ConfigError(f'generation_config must be "auto" or "none", got {self.generation_config!r}.')
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory, "kv_cache_memory")
        self._check_kv_disk()
        self._check_catalogues()
        object.__setattr__(self, "kv_events_config", as_json(self.kv_events_config))
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config needs the prefix cache, but enable_prefix_caching is false. Enable it, or remove "
                "kv_events_config."
            )
        object.__setattr__(self, "speculative_config", as_json(self.speculative_config))
        if self.speculative_config is not None:
            parse_speculative(self.speculative_config)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """`kv_events_config`, if events are published."""
        if self.kv_events_config is None:
            return None
        events = parse_kv_events(self.kv_events_config)
        return events if events.publishes else None

    def with_kv_topic(self, topic: str) -> EngineConfig:
        """A copy whose KV events have this topic, if events are on and no topic is set."""
        events = self.kv_events
        if events is None or events.topic:
            return self
        return replace(self, kv_events_config=as_json(asdict(events) | {"topic": topic}))

    @property
    def most_seqs(self) -> int:
        """`max_num_seqs`, or its default."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        most = max(DEFAULT_NUM_SEQS, CATALOGUE_NUM_BEAMS) if self.catalogue else DEFAULT_NUM_SEQS
        return min(most, self.max_num_batched_tokens)

    @property
    def most_beams(self) -> int:
        """`max_num_beams`, or its default."""
        if self.max_num_beams is not None:
            return self.max_num_beams
        return max(DEFAULT_NUM_BEAMS, min(CATALOGUE_NUM_BEAMS, self.most_seqs)) if self.catalogue else DEFAULT_NUM_BEAMS

    @property
    def catalogues(self) -> dict[str, str]:
        """The files of `catalogue` by name."""
        return {name: path for name, _, path in (given.partition("=") for given in self.catalogue)}

    @property
    def adapters(self) -> dict[str, str]:
        """The paths of `lora_modules` by name."""
        return dict(map(_adapter, self.lora_modules))

    @property
    def most_loras(self) -> int:
        """`max_loras`, or its default."""
        return len(self.lora_modules) if self.max_loras is None else self.max_loras

    def _check_adapters(self) -> None:
        for name, low in (("max_loras", 0), ("max_lora_rank", 1)):
            if getattr(self, name) is not None:
                self._at_least(name, low)
        if self.max_lora_rank is not None and self.max_lora_rank > MOST_LORA_RANK:
            raise ConfigError(f"max_lora_rank must be at most {MOST_LORA_RANK}, got {self.max_lora_rank}.")
        if self.lora_dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"lora_dtype must be auto, float32, bfloat16 or float16, got {self.lora_dtype!r}.")
        given: object = self.lora_modules
        if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(i, str) for i in given):
            raise ConfigError(f"lora_modules must be a list of texts NAME=PATH, got {given!r}.")
        object.__setattr__(self, "lora_modules", tuple(self.lora_modules))
        names = [_adapter(item)[0] for item in self.lora_modules]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"lora_modules has two adapters with the name {name}; names must be unique.")
        if len(names) > self.most_loras:
            raise ConfigError(
                f"lora_modules names {len(names)} adapters, but max_loras is {self.max_loras}. Raise max_loras."
            )

    def _check_kv_disk(self) -> None:
        parse_bytes(self.kv_disk_size, "kv_disk_size")
        if self.kv_disk == "":
            raise ConfigError('kv_disk must be a folder, got "".')

    def _check_catalogues(self) -> None:
        given: object = self.catalogue
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise ConfigError(f"catalogue must be a list of texts NAME=FILE, got {given!r}.")
        object.__setattr__(self, "catalogue", tuple(self.catalogue))
        for item in self.catalogue:
            if not isinstance(item, str) or not re.fullmatch(r"[\w.-]{1,64}=.+", item, re.ASCII):
                raise ConfigError(
                    "catalogue must be NAME=FILE, the name of at most 64 letters, digits, and . _ -, such as "
                    f"cities=data/cities.jsonl, got {item!r}."
                )
        names = [item.partition("=")[0] for item in self.catalogue]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"catalogue has two files with the name {name}; names must be unique.")

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}.")
        if value > _LARGEST:
            raise ConfigError(f"{name} must be at most {_LARGEST}, got {value}.")

    def _not_negative(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
            raise ConfigError(f"{name} must be a number of at least 0, got {value!r}.")


def _adapter(item: str) -> tuple[str, str]:
    """The name and the path of an item of `lora_modules`.

    Raises:
        ConfigError: the item is neither NAME=PATH nor vLLM's JSON.
    """
    name, _, path = item.partition("=")
    if item.lstrip().startswith("{"):
        try:
            values = json.loads(item)
            name, path = values["name"], values["path"]
        except (ValueError, KeyError, RecursionError):
            name = path = ""
    if not isinstance(name, str) or not isinstance(path, str) or not ADAPTER_NAME.fullmatch(name) or not path:
        raise ConfigError(
            'lora_modules must be NAME=PATH or {"name": "NAME", "path": "PATH"}, the name of at most 128 letters, '
            f"digits, and . _ - / :, such as sql=adapters/sql, got {item!r}."
        )
    return name, path
