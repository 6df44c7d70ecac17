"""Starting a model, in three steps: resolve makes all decisions that need no weights, load reads the weights, and
prepare allocates pages, measures, and records what can be recorded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.backends import triton as gpu
from engine.backends.attention.base import AttentionBackend
from engine.backends.attention.formats import LARGEST, format_name
from engine.backends.attention.selection import select
from engine.backends.native.build import cpu_features
from engine.backends.native.ranks import Ranks
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError, UnsupportedModelError
from engine.execution.adapters import LoadedAdapters
from engine.execution.calibration import mean_keys
from engine.execution.division import RankExecutor, check_divisible, failing
from engine.execution.executor import LocalExecutor, ModelFacts
from engine.execution.gpu_choice import look_at
from engine.execution.image_size import with_image_size
from engine.execution.image_vectors import image_bytes, reserved_for_images
from engine.execution.invariance import min_invariant_rows
from engine.execution.kv_cache import KVCache, choose_cache_dtype
from engine.execution.loading import (
    check_positions_fit,
    check_weights_fit,
    explained,
    find_max_encoder_len,
    find_max_model_len,
    find_quantization,
)
from engine.execution.memory import gib
from engine.execution.page_content import contents_of, shape_of
from engine.execution.pooler import PoolingParts
from engine.execution.profiling import allocate_pages
from engine.execution.projector_fit import misfit
from engine.execution.runner import ModelRunner
from engine.execution.threads import use_threads
from engine.execution.warmup import Measured, can_record, measure, record, trial
from engine.execution.whole_prompts import use_flash
from engine.host import gpus
from engine.host.cgroups import available_memory
from engine.images.crop_settings import read_cropping
from engine.images.model_facts import vision_info
from engine.interface.outputs import EngineInfo
from engine.interface.vision import VisionInfo
from engine.model.abilities import find_abilities
from engine.model.checkpoint import ConfigReader, find, laid_out, read_config
from engine.model.families import build_spec, context_length, stored_scheme
from engine.model.gguf.files import NO_PROJECTOR
from engine.model.gguf.folder import lacks_tokenizer
from engine.model.lora.reading import largest_rank
from engine.model.parameter_count import check_parameters
from engine.model.projection import load_projection
from engine.model.quantisation import Wanted
from engine.model.retrieval import read_folder
from engine.model.sentence import InputWeights, Pipeline
from engine.model.spec import ModelSpec
from engine.model.table import WeightTable
from engine.model.transformer import Transformer
from engine.model.weights import load_model, stored_dtype
from engine.scheduling.budget import Costs

logger = logging.getLogger("octavo.execution")

_WITHOUT_IMAGES = "Choose another file, or serve the model without images: --mmproj none."


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The decisions of a start before it reads a weight."""

    config: EngineConfig
    device: torch.device
    path: Path  # the checkpoint's folder
    file: Path | None  # the GGUF file that the folder stands for, if any
    hf_config: Any  # the model's config, as transformers reads it
    spec: ModelSpec
    pipeline: Pipeline  # what the folder says about its embeddings
    dtype: torch.dtype  # the format of weights and activations
    cache_dtype: torch.dtype  # the pages' format
    quantization: Wanted | None  # what matrices are converted to; None: they keep the dtype
    max_model_len: int  # maximum length of prompt plus answer, in tokens
    max_encoder_len: int  # longest input of an encoder beside a decoder that reads token ids
    backend: AttentionBackend
    vision: VisionInfo | None  # the images that are read among tokens; None: none are read
    table: WeightTable | None = None  # the names of the weights; None: the family's


class Beside(Protocol):
    """Another model beside the one that is started, which reads its hidden states."""

    def adapt(self, resolved: Resolved) -> Resolved:
        """The model that is loaded instead, before it is."""

    def load(self, runner: ModelRunner) -> int:
        """Load this model beside that one. Returns the bytes that it takes for each page."""


def start(
    config: EngineConfig,
    read: ConfigReader = read_config,
    *,
    beside: int | Beside = 0,
    ranks: Ranks | None = None,
) -> LocalExecutor:
    """Load a model in this process. Raises ModelLoadError, UnsupportedModelError or ConfigError with a remedy.

    Args:
        beside: bytes that another model takes for each page of this one, or the other model.
        read: the same argument as in `engine.model.checkpoint.read_config`.
        ranks: those that divide the model; this process has the part of one of them.
    """
    if ranks is not None:
        with failing(ranks):
            return RankExecutor(_start(config, read, beside, ranks), ranks)
    return _start(config, read, beside, None)


def _start(config: EngineConfig, read: ConfigReader, beside: int | Beside, ranks: Ranks | None) -> LocalExecutor:
    device = choose_device(config.device)
    if config.device == "auto" and device.type == "cpu" and gpus.has_driver():
        why, fix = gpus.obstacle(torch.version.cuda, torch.version.hip)
        logger.warning("Running on the CPU although there is an NVIDIA driver: %s. %s", why, fix)
    if device.type == "cuda":
        gpu_facts = look_at(device, config.gpu_memory_utilization)
        logger.info("GPU: %s", gpu_facts.chosen)
        for found, fix in gpu_facts.warnings:
            logger.warning("%s. %s", found, fix)
    with explained(config.model), gpu.current(device):
        use_threads(config)
        resolved = resolve(config, device, read)
        if isinstance(beside, int):
            check_divisible(config, resolved.spec, device)
            if ranks is not None:
                ranks.smallest(0)  # no rank takes memory before all have checked that the weights fit
            return prepare(resolved, load(resolved, ranks), beside=beside)
        resolved = beside.adapt(resolved)
        runner = load(resolved)
        return prepare(resolved, runner, beside=beside.load(runner))


def resolve(config: EngineConfig, device: torch.device, read: ConfigReader = read_config) -> Resolved:
    """Decide what to load, and how; refuse what cannot be loaded."""
    place = find(config.model, config.revision, config.hf_token)
    pipeline = read_folder(laid_out(place, config.mmproj))
    path = pipeline.transformer
    if not config.skip_tokenizer_init and config.tokenizer is None and (why := lacks_tokenizer(path)):
        raise ModelLoadError(why)
    hf_config = read(path)
    spec, vision = find_vision(hf_config, path, config, device)
    scheme = stored_scheme(hf_config)
    check_parameters(path, spec, scheme)
    stored = stored_dtype(path, hf_config)
    dtype = choose_dtype(config.dtype, stored, device)
    quantization = find_quantization(config, path, device, scheme)
    cache_dtype = choose_cache_dtype(config.kv_cache_dtype, dtype)
    check_weights_fit(path, scheme, dtype, device, quantization, config.gpu_memory_utilization)
    max_model_len = find_max_model_len(config, hf_config, spec, pipeline.max_seq_length)
    max_encoder_len = find_max_encoder_len(config, spec, max_model_len)
    check_positions_fit(spec, max(max_model_len, max_encoder_len))
    find_abilities(hf_config, spec, pipeline)  # refuses a pipeline that does not fit
    return Resolved(
        config=config,
        device=device,
        path=path,
        file=None if place.is_dir() else place,
        hf_config=hf_config,
        spec=spec,
        pipeline=pipeline,
        dtype=dtype,
        cache_dtype=cache_dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_encoder_len=max_encoder_len,
        backend=select(device, spec.trunk.attentions, cache_dtype if spec.decoder else None),
        vision=vision,
    )


def find_vision(
    hf_config: Any, path: Path, config: EngineConfig, device: torch.device
) -> tuple[ModelSpec, VisionInfo | None]:
    """The model, and how it reads images among its tokens. If its folder does not define how images are prepared, or
    has a setting that is not implemented, or an image projector does not fit, the model loses its vision part, and the
    log says why. Raises UnsupportedModelError instead if the configuration names an image projector."""
    spec = with_image_size(build_spec(hf_config), path)
    named = config.mmproj not in (None, NO_PROJECTOR)
    if spec.vision is None:
        if named:
            raise UnsupportedModelError(f"{config.mmproj} is not supported; the log says why. {_WITHOUT_IMAGES}")
        return spec, None
    try:
        cropping = read_cropping(path)
        if cropping is not None:
            info = vision_info(spec.vision, cropping, path)
            if info.two_way is not None:
                _check_two_way(info, config, device)
            if (wrong := misfit(path, hf_config, spec, device)) is not None:
                raise UnsupportedModelError(wrong)
            return spec, info
        why: object = f"{path} has no preprocessor_config.json, which says how images are made ready."
    except UnsupportedModelError as error:
        why = error
    if named:
        raise UnsupportedModelError(f"Images cannot be served with {config.mmproj}: {why} {_WITHOUT_IMAGES}")
    logger.warning("Requests with images are refused: %s", why)
    return replace(spec, vision=None), None


def _check_two_way(info: VisionInfo, config: EngineConfig, device: torch.device) -> None:
    """Refuse images whose tokens see each other where one step cannot compute them. Raises UnsupportedModelError with
    the reason."""
    if device.type != "cpu":
        raise UnsupportedModelError("attention to later tokens of a prompt has no kernels for GPUs yet.")
    least = info.grid[0] * info.grid[1] + config.most_seqs
    if config.max_num_batched_tokens < least:
        raise UnsupportedModelError(
            f"one step computes all tokens of an image beside those of max_num_seqs sequences, {least} together, but "
            f"max_num_batched_tokens is {config.max_num_batched_tokens}. Raise --max-num-batched-tokens."
        )


def _adapter_dtype(name: str, device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """The format of adapters that `lora_dtype` names; None for auto. Raises ConfigError if the device has another."""
    wanted: torch.dtype | None = None if name == "auto" else getattr(torch, name)
    if device.type != "cpu" and wanted not in (None, dtype):
        raise ConfigError(
            f"lora_dtype is {name}, but on a GPU adapters have the model's dtype, {format_name(dtype)}. Set "
            "--lora-dtype auto, or change --dtype."
        )
    return wanted


def load(resolved: Resolved, ranks: Ranks | None = None) -> ModelRunner:
    """Read the weights; the runner has few pages yet. `ranks`: as in `start`."""
    config, device, pipeline = resolved.config, resolved.device, resolved.pipeline
    adapter_dtype = _adapter_dtype(config.lora_dtype, device, resolved.dtype)
    rank = config.max_lora_rank or largest_rank(config.adapters.values())  # a missing adapter is noticed first
    model = load_model(
        resolved.path,
        resolved.hf_config,
        resolved.spec,
        dtype=resolved.dtype,
        device=device,
        backend=resolved.backend,
        max_model_len=resolved.max_model_len,
        max_encoder_len=resolved.max_encoder_len,
        show_progress=config.show_progress,
        quantization=resolved.quantization,
        quantization_cache=config.quantization_cache,
        share_weights=bool(config.share_weights),
        pack=True,
        table=resolved.table,
        ranks=ranks,
    )
    if config.most_loras:
        model.take_adapters(config.most_loras, rank)
    if resolved.vision is not None and resolved.vision.fitted is not None:
        squares = 1 if model.spec.vision is None else model.spec.vision.squares
        model.make_room(config.max_num_batched_tokens, resolved.vision.fitted.most_vectors * squares**2)
    model.pack(resolved.quantization)
    cache_dtype, whole = resolved.cache_dtype, model.spec.decoder is None
    centres = None
    if cache_dtype in LARGEST and not whole:
        centres = mean_keys(model, context_length(resolved.hf_config, model.spec))
    model_type = getattr(resolved.hf_config, "model_type", "")
    runner = ModelRunner(
        model,
        KVCache(model.kv_shapes(), int(not whole), config.block_size, cache_dtype, device, centres),
        max_num_batched_tokens=config.max_num_batched_tokens,
        min_rows=min_invariant_rows(model) if ranks is None else ranks.largest(min_invariant_rows(model)),
        adapters=LoadedAdapters(
            model,
            config.most_loras,
            rank,
            model_type,
            of_gguf=resolved.file is not None,
            model_name=config.model,
            dtype=adapter_dtype,
        ),
        activation=find_abilities(resolved.hf_config, model.spec, pipeline).activation,
        parts=load_parts(pipeline, device),
    )
    if resolved.vision is not None:
        runner.use_images(resolved.vision)
    return runner


def load_parts(pipeline: Pipeline, device: torch.device) -> PoolingParts:
    """Load the parts that compute vectors beside the model. Raises ModelLoadError if weights are missing, or their
    names or shapes do not match."""
    weighing = (pipeline.sparse.layer,) if isinstance(pipeline.sparse, InputWeights) else ()
    return PoolingParts(
        project=load_projection(pipeline.layers, device),
        sparse=pipeline.sparse,
        weigh=load_projection(weighing, device),
        tokens=load_projection(() if pipeline.tokens is None else pipeline.tokens.layers, device),
    )


def _reserve_for_images(resolved: Resolved, model: Transformer) -> int:
    """The memory that pages leave for images. If it does not hold the largest image, the log says so."""
    device = resolved.device
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    needed = image_bytes(model, resolved.vision, resolved.max_model_len)
    reserved = reserved_for_images(needed, free)
    if reserved < needed:
        logger.warning(
            "The largest allowed image needs %s of memory, but after the model only %s are free. Lower max_pixels in "
            "preprocessor_config.json, or --max-model-len.",
            gib(needed),
            gib(free),
        )
    return reserved


def prepare(resolved: Resolved, runner: ModelRunner, *, beside: int = 0) -> LocalExecutor:
    """Give the runner its pages, measure steps, and record decoding steps if possible. `beside`: bytes that another
    model takes for each page."""
    config, model, backend = resolved.config, runner.model, resolved.backend
    spec, num_blocks = model.spec, 0  # the head that the config names may not be stored, and then is not in the spec
    if config.flash_prefill:  # before memory is measured: a step with it takes more
        use_flash(model, backend, resolved.cache_dtype, config.block_size, config.max_num_batched_tokens)
    kept = _reserve_for_images(resolved, model)
    if spec.decoder is not None:
        recorded = backend.recordable and can_record(model) and not config.enforce_eager
        num_blocks = allocate_pages(
            runner,
            config,
            resolved.cache_dtype,
            max_rows=config.most_seqs,
            graphs=recorded,
            beside=beside,
            reserved=kept,
        )
    costs, measured = Costs(), Measured()
    if config.max_step_time == 0 and resolved.device.type == "cpu":  # nothing depends on the cost of steps
        trial(runner)
    else:  # these steps compile a GPU's kernels, too
        most = config.max_num_batched_tokens
        costs, measured = measure(runner, max_tokens=most, max_model_len=resolved.max_model_len)
    record(runner, backend, 0 if config.enforce_eager else config.most_seqs, config.max_num_batched_tokens)
    if resolved.device.type == "cpu":
        runner.cache.forget()
    info = EngineInfo(
        model=config.model,
        model_path=str(resolved.path),
        model_file=None if resolved.file is None else str(resolved.file),
        dtype=str(resolved.dtype).removeprefix("torch."),
        kv_cache_dtype=format_name(resolved.cache_dtype),
        device=str(resolved.device),
        max_model_len=resolved.max_model_len,
        vocab_size=model.vocab_size,
        block_size=0 if spec.decoder is None else config.block_size,
        num_blocks=num_blocks,
        full_requests=0.0,
        max_num_seqs=config.most_seqs,
        max_num_beams=config.most_beams,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_encoder_len=model.max_encoder_len,
        encoder_vocab_size=None if model.max_encoder_len is None else spec.encoder_vocab_size,
        first_context_len=model.rotary_shifts[0][0] if model.rotary_shifts else None,
        encoder_only=spec.decoder is None,
        hidden_size=spec.trunk.output_size,
        quantization=resolved.quantization,
        signal=spec.signal,
        max_loras=config.most_loras,
        max_lora_rank=runner.adapters.max_rank,
        vision=resolved.vision,
        **find_abilities(resolved.hf_config, spec, resolved.pipeline).facts(),
    )
    facts = ModelFacts(
        info=info,
        needs=runner.kind.needs,
        costs=costs,
        measured=measured,
        weights=runner.model.weight_bytes(),
        num_states=0 if runner.cache.states is None else runner.cache.states.slots,
        page_shape=shape_of(runner.cache),
        content_sizes=tuple(content.size for content in contents_of(runner.cache)) if runner.kind.needs.paged else (),
    )
    return LocalExecutor(runner, facts)


def choose_device(setting: str) -> torch.device:
    """The device that a setting means; auto takes a GPU if there is one. Raises ConfigError if a GPU was requested, but
    torch sees none."""
    if setting == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(setting)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            seen = f"device is {setting}, but torch {torch.__version__} sees {count} GPUs"
            if count:
                raise ConfigError(f"{seen}. {gpus.another(count)}")
            why, fix = gpus.obstacle(torch.version.cuda, torch.version.hip)
            raise ConfigError(f"{seen}: {why}. {fix} Or use --device cpu.")
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
    """Whether the CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX, or Arm's BF16)."""
    capability = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return bool(capability is not None and capability()) or bool(tiles()) or "bf16" in cpu_features()
