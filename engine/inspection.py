"""Finds out what a start would find, without starting: torch, the device, the checkpoint and its memory."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from engine.backends import native
from engine.backends import triton as gpu
from engine.backends.attention.formats import format_name
from engine.backends.attention.selection import select
from engine.config import EngineConfig, parse_bytes
from engine.disk.opening import check_kv_disk, kv_folder
from engine.disk.store import used_bytes
from engine.execution.division import check_divisible
from engine.execution.gpu_choice import GpuFacts, look_at
from engine.execution.image_vectors import image_bytes, reserved_for_images
from engine.execution.kv_cache import cache_memory, choose_cache_dtype, count_blocks, page_bytes
from engine.execution.loading import check_weights_fit, find_max_encoder_len, find_max_model_len, find_quantization
from engine.execution.starting import choose_device, choose_dtype, find_vision, resolve
from engine.execution.state_cache import count_slots, slot_bytes
from engine.execution.whole_prompts import FlashFacts, look_at_flash
from engine.host.cgroups import available_memory
from engine.host.cpus import Threads, choose_threads, given_environment
from engine.host.folders import check_private
from engine.images import most_tokens, read_cropping, steps_for
from engine.interface.generation import load_defaults
from engine.interface.outputs import Task
from engine.model.abilities import find_abilities
from engine.model.checkpoint import locate, read_config
from engine.model.families import architecture, stored_scheme, weight_table
from engine.model.gguf.files import SUFFIX
from engine.model.gguf.folder import PROJECTOR_LINK, lacks_tokenizer
from engine.model.parameter_count import check_parameters
from engine.model.quantisation import Wanted
from engine.model.quantised_cache import find_folder, kept_files
from engine.model.quantised_loading import mark_stored
from engine.model.retrieval import read_folder
from engine.model.sharding import Share, refusals, shard
from engine.model.spec import ModelSpec
from engine.model.transformer import Transformer
from engine.model.weight_files import MAPPED, Checkpoint, weight_files
from engine.model.weights import as_linears, stored_dtype
from engine.process.launch import make_folder, remove_folder
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.needs import SequenceNeeds
from engine.text.grammars import are_prepared_early, prepared_bytes
from engine.text.processor import load_tokenizer

PROCESS, IMPORTED, STARTING = 184 << 20, 190 << 20, 228 << 20
"""Memory of the engine's process on a CPU without the model: at rest, at the beginning of a load, and at most after the
load, while steps are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """The installed torch.

    Attributes:
        version: such as 2.13.0+cpu.
        cuda, rocm: the version of CUDA or ROCm that it was built for; both are None for a CPU build.
        gpus: names of the visible GPUs.
        kernels: the instruction set of Octavo's own kernels for the CPU; "" if torch computes everything.
        no_kernels: the reason if there are none.
    """

    version: str
    cuda: str | None
    rocm: str | None = None
    gpus: tuple[str, ...]
    kernels: str = ""
    no_kernels: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A checkpoint as it would be loaded. Sizes in bytes.

    Attributes:
        path: its folder.
        architecture: the name in its config.json.
        weight_files: the number of files with weights.
        device, dtype, kv_cache_dtype: the results of the settings.
        weights: size of the parameters in that dtype, or quantised according to the settings.
        weights_as_stored: size with the quantization "stored"; 0 if the checkpoint has no quantised weights.
        resident: memory of the engine's process on a CPU before its first request; 0 on a GPU.
        peak: maximum memory while it loads; 0 on a GPU.
        grammars: memory that structured output takes in addition; 0 for a model without it.
        early_grammars: whether it is taken right after the start, and not with the first request that needs it.
        num_blocks: pages that the settings and the free memory now allow; 0 for an encoder-only model.
        pages: size of these pages.
        num_states: number of state slots, for models whose layers carry a state; 0 for others.
        states: size of these slots.
        max_num_seqs: maximum requests with a row in the same step.
        full_requests: requests of max_model_len tokens (and the longest encoder input) that these pages hold at a time;
            0.0 for an encoder-only model.
        block_size: tokens per page.
        max_model_len: maximum tokens of prompt and answer together; for an encoder-decoder model, of the answer.
        max_encoder_len: maximum tokens of an encoder-decoder model's prompt; None for others.
        free: device memory that this process can still use.
        tasks: the tasks that the model supports.
        quantization: format of the matrices, "int8", "int8-fast", "int4" or "stored"; None: they have the dtype.
        stored: bytes in each format, largest first (`Checkpoint.stored_bytes`), for GGUF files and checkpoints with
            quantised weights.
        hears: whether it is a speech model.
        writes_of_images: whether it is an encoder-decoder model whose encoder reads an image.
        images: maximum bytes of the cached vectors of images and of the tower's pass over the largest image; 0 if the
            model reads no images among its tokens.
        image_tokens: maximum tokens of an image in a chat, without the texts around its crops; 0 if it reads none.
        projector: for a GGUF file, the name of the image projector that is used; "" for none.
        ranks: what each rank has, if the settings divide the model.
        divisible: numbers of ranks up to 8 that can divide it on a CPU.
        indivisible: the parts that no number of ranks can divide.
        no_tokenizer: for a GGUF file, why its tokenizer cannot be built, and what to do; "" if it can.
    """

    path: Path
    architecture: str
    weight_files: int
    device: str
    dtype: str
    kv_cache_dtype: str
    weights: int
    num_blocks: int
    pages: int
    max_num_seqs: int
    full_requests: float
    block_size: int
    max_model_len: int
    max_encoder_len: int | None
    free: int
    tasks: tuple[Task, ...] = ("generate",)
    quantization: str | None = None
    resident: int = 0
    peak: int = 0
    grammars: int = 0
    early_grammars: bool = False
    weights_as_stored: int = 0
    stored: dict[str, int] = field(default_factory=dict)
    hears: bool = False
    writes_of_images: bool = False
    no_tokenizer: str = ""
    num_states: int = 0
    states: int = 0
    images: int = 0
    image_tokens: int = 0
    projector: str = ""
    ranks: tuple[RankFacts, ...] = ()
    divisible: tuple[int, ...] = ()
    indivisible: tuple[str, ...] = ()

    @property
    def planned(self) -> int:
        """Memory of the weights and of the caches, once these are full."""
        return self.weights + self.pages + self.states + self.images


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank's part of a model: bytes of weights, heads and K/V heads of its first layer with attention."""

    weights: int
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """The folder for quantised weights.

    Attributes:
        folder: None if they are not cached.
        entries, size: the number of checkpoints in it, and their bytes.
        problem: why nothing can be cached there; "" if it can.
    """

    folder: Path | None
    entries: int = 0
    size: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """The folder that stores pages of the KV cache."""

    folder: Path
    # limit, used, free: bytes that pages may take, bytes that they take, and bytes that are free on the disk
    limit: int
    used: int
    free: int
    problem: str = ""  # why none can be stored there; "" if they can


def inspect_torch() -> TorchFacts:
    """The facts about the installed torch."""
    available = torch.cuda.is_available()
    kernels, no_kernels = native.prospect()
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        gpus=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) if available else (),
        kernels=kernels,
        no_kernels=no_kernels,
    )


def inspect_threads(config: EngineConfig) -> Threads:
    """The number of threads that would compute on the CPU, and the reason."""
    return choose_threads(config.threads, given_environment())


def inspect_device(config: EngineConfig) -> str:
    """The device that would be used. Raises ConfigError if the device does not exist."""
    return str(choose_device(config.device))


def inspect_gpu(config: EngineConfig) -> GpuFacts:
    """The GPU that would be used, if the device is a GPU. Raises ConfigError if the device does not exist."""
    device = choose_device(config.device)
    return replace(look_at(device, config.gpu_memory_utilization), no_kernels=gpu.obstacle(device.index))


def inspect_model(config: EngineConfig) -> ModelFacts:
    """The checkpoint and the memory that it takes; only the headers of its files are read, and nothing is downloaded.
    Raises ModelLoadError, UnsupportedModelError, ConfigError if the error that would prevent the start."""
    pipeline = read_folder(locate(config.model, config.revision, config.hf_token, download=False, mmproj=config.mmproj))
    path = pipeline.transformer
    hf_config = read_config(path)
    device = choose_device(config.device)
    spec, vision = find_vision(hf_config, path, config, device)
    scheme = stored_scheme(hf_config)
    check_parameters(path, spec, scheme)
    abilities = find_abilities(hf_config, spec, pipeline)
    steps_for(spec.signal, path)
    files = weight_files(path)
    dtype = choose_dtype(config.dtype, stored_dtype(path, hf_config), device)
    quantization = find_quantization(config, path, device, scheme)
    check_weights_fit(path, scheme, dtype, device, quantization, config.gpu_memory_utilization)
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype)
    max_model_len = find_max_model_len(config, hf_config, spec, pipeline.max_seq_length)
    paged = spec.decoder is not None
    backend = select(device, spec.trunk.attentions, cache_dtype if paged else None)
    encoder_len = find_max_encoder_len(config, spec, max_model_len)
    check_divisible(config, spec, device)

    def shapes_of(part: ModelSpec) -> Transformer:  # no memory
        return Transformer(part, backend, max_model_len, max_encoder_len=encoder_len, device="meta", dtype=dtype)

    model = shapes_of(spec)
    count = config.tensor_parallel_size
    ranks = [shapes_of(shard(spec, Share(rank, count))) for rank in range(count)] if count > 1 else [model]
    as_stored, stored = 0, dict[str, int]()
    if scheme is not None or files[0].suffix == SUFFIX:
        with Checkpoint(path, scheme) as checkpoint:
            stored = checkpoint.stored_bytes
            table = weight_table(hf_config, spec)
            checkpoint.rename(table)
            mark_stored(model, checkpoint, as_linears(checkpoint, table), device)
            as_stored = model.weight_bytes("stored", device) if checkpoint.has_few_bits else 0
    weights = sum(rank.weight_bytes(quantization, device) for rank in ranks)
    cropping = None if vision is None else read_cropping(path)
    images = image_bytes(model, vision, max_model_len)
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    reserved = weights + reserved_for_images(images, free - weights)
    resident = peak = 0
    if device.type == "cpu":
        held, planner = weights + sum(rank.buffer_bytes for rank in ranks), PROCESS * (count > 1)
        resident = held + planner + PROCESS * count
        loading = (max(STARTING, rank.loading_bytes(quantization) + MAPPED + IMPORTED) for rank in ranks)
        peak = held + planner + sum(loading)
    num_blocks, pages, full_requests = 0, 0, 0.0
    slots = states = 0
    limits = SchedulerConfig.of(config, SequenceNeeds(paged=paged, window=spec.attention_span))
    if paged:
        sizes = spec.state_sizes
        slots = count_slots(config, sizes, *cache_memory(config, device, reserved=reserved))
        states = (slots + 1) * slot_bytes(sizes) if slots else 0
        num_blocks = min(
            count_blocks(
                config,
                rank.kv_shapes(),
                max_model_len,
                cache_dtype,
                device,
                max_encoder_len=model.max_encoder_len,
                reserved=reserved,
                states=states,
            )
            for rank in ranks
        )
        sizes_of_pages = (page_bytes(rank.kv_shapes(), config.block_size, cache_dtype) for rank in ranks)
        pages = (num_blocks + 1) * sum(sizes_of_pages)
        full_requests = limits.fitting(max_model_len, num_blocks, model.max_encoder_len or 0)
    image_tokens = 0 if vision is None or cropping is None else most_tokens(vision, cropping)
    if spec.signal is not None and spec.signal.texts:
        image_tokens = spec.signal.positions
    writes = "generate" in abilities.tasks and not config.skip_tokenizer_init
    return ModelFacts(
        path=path,
        architecture=architecture(hf_config),
        weight_files=len(files),
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_dtype=format_name(cache_dtype),
        weights=weights,
        weights_as_stored=as_stored,
        resident=resident,
        peak=peak,
        num_blocks=num_blocks,
        pages=pages,
        num_states=slots,
        states=states,
        max_num_seqs=limits.max_num_seqs,
        full_requests=full_requests,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_encoder_len=model.max_encoder_len,
        free=free,
        grammars=prepared_bytes(model.vocab_size) if writes else 0,
        early_grammars=writes and are_prepared_early(model.vocab_size, weights, available_memory()),
        tasks=abilities.tasks,
        quantization=quantization,
        stored=stored,
        no_tokenizer=lacks_tokenizer(path),
        hears=_hears(config, path, hf_config),
        writes_of_images=(
            model.max_encoder_len is not None and spec.signal is not None and spec.signal.kind == "image"
        ),
        images=images,
        image_tokens=image_tokens,
        projector=next((file.resolve().name for file in files if file.name == PROJECTOR_LINK), ""),
        ranks=tuple(_rank(rank, quantization, device) for rank in ranks) if count > 1 else (),
        divisible=tuple(number for number in range(2, 9) if device.type == "cpu" and not refusals(spec, number)),
        indivisible=tuple(refusals(spec, 1)),
    )


def _rank(model: Transformer, quantization: Wanted | None, device: torch.device) -> RankFacts:
    part = next(iter(model.spec.trunk.attentions))
    return RankFacts(weights=model.weight_bytes(quantization, device), heads=part.heads, kv_heads=part.kv_heads)


def _hears(config: EngineConfig, path: Path, hf_config: Any) -> bool:
    """Whether it is a speech model. Raises ModelLoadError if it would be one, but files lack something."""
    if getattr(hf_config, "model_type", None) != "whisper":
        return False
    source = config.tokenizer or str(path)
    skips = config.skip_tokenizer_init or not Path(source).is_dir()  # nothing is downloaded here
    honour = config.generation_config == "auto"
    defaults = load_defaults(
        path, hf_config, hf_config.vocab_size, honour=honour,
        load_vocabulary=lambda: None if skips else load_tokenizer(source),
    )  # fmt: skip
    return defaults.speech is not None


def inspect_flash(config: EngineConfig, path: Path) -> FlashFacts:
    """The long prompts of a model that torch's flash attention can compute (`flash_prefill`, set or not), found by a
    trial on the GPU. The trial compiles a kernel, unless one exists, and takes some megabytes. `path`: the model's
    folder, found by `inspect_model`. Raises RuntimeError: torch's, if the GPU has no memory left."""
    device = choose_device(config.device)
    with gpu.current(device):
        found = resolve(replace(config, model=str(path), skip_tokenizer_init=True), device)
        model = Transformer(  # shapes, no memory
            found.spec,
            found.backend,
            found.max_model_len,
            max_encoder_len=found.max_encoder_len,
            device="meta",
            dtype=found.dtype,
        )
        tokens = config.max_num_batched_tokens
        return look_at_flash(model, found.backend, found.cache_dtype, config.block_size, tokens, device)


def inspect_quantization_cache(config: EngineConfig) -> CacheFacts:
    """The folder for quantised weights; it is not created."""
    folder = find_folder(config.quantization_cache)
    if folder is None:
        return CacheFacts(folder=None)
    problem, sizes = "", []
    try:
        if folder.exists():
            check_private(folder)
            sizes = [path.stat().st_size for path in kept_files(folder)]
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            problem = f"{place} cannot be written to"
    except OSError as error:
        problem = str(error)
    return CacheFacts(folder=folder, entries=len(sizes), size=sum(sizes), problem=problem)


def inspect_kv_disk(config: EngineConfig) -> DiskFacts:
    """The folder that stores pages; it is not created. Raises ConfigError: other settings contradict it."""
    assert config.kv_disk is not None
    check_kv_disk(config)
    folder, limit = kv_folder(config.kv_disk), parse_bytes(config.kv_disk_size, "kv_disk_size")
    problem, used, free = "", 0, 0
    try:
        place = next(path for path in (folder, *folder.parents) if path.exists())
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            problem = f"{place} cannot be written to"
        else:
            used, free = used_bytes(folder), shutil.disk_usage(place).free
    except OSError as error:
        problem = str(error)
    return DiskFacts(folder=folder, limit=limit, used=used, free=free, problem=problem)


def inspect_socket_folder() -> Path:
    """The folder in which the engine's socket can be created. Raises ConfigError: nowhere."""
    folder = make_folder()
    remove_folder(folder)
    return folder.parent
