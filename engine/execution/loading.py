"""Checks of a load besides the checkpoint itself: memory, readable files, and lengths of inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.backends import native
from engine.backends import triton as gpu
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution.gpu_choice import another_gpu, holders
from engine.execution.memory import device_memory, gib, is_out_of_memory
from engine.host.cgroups import available_memory
from engine.model.families import context_length
from engine.model.positions import Rotary
from engine.model.quantisation import ON_GPUS, Held, Wanted, size_of
from engine.model.spec import ModelSpec
from engine.model.stored.scheme import Scheme
from engine.model.weight_files import Checkpoint

logger = logging.getLogger("octavo.engine")

LOADING = 128 << 20
"""Memory that processes on a CPU take besides the weights, from just before they are read until the service is ready:
for measured steps and tokenizers."""


def check_weights_fit(
    path: Path,
    scheme: Scheme | None,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Wanted | None = None,
    utilization: float = 1.0,
) -> None:
    """Refuse weights that exceed the free memory, before they are read.

    On a CPU, the operating system grants more memory than it has, and later kills the process that uses it. If a
    control group limits the memory, its limit counts (`engine.host.cgroups`). Raises ModelLoadError if the weights need
    more than the free memory.

    Args:
        scheme: how quantised weights are stored.
        utilization: share of a GPU's memory that may be used.
    """
    memory = device_memory(device)
    with Checkpoint(path, scheme) as checkpoint:
        path = checkpoint.path  # for a GGUF file, the file
        size = sum(
            checkpoint.shape(name).numel() * _share(quantization, checkpoint, name, dtype, device) >> 20
            for name in checkpoint.names
        )
    if memory is not None:
        total, free = memory.total(), memory.free()
        allowed = total * utilization - (total - free)
        if size > allowed:
            found = (
                f"The weights of {path} take {gib(size)} as {quantization or dtype}, but {device} has {gib(free)} of "
                f"{gib(total)} free"
            )
            if size <= free:
                found += f", of which --gpu-memory-utilization {utilization} allows {gib(max(allowed, 0))}"
            raise ModelLoadError(f"{found}. {_instead(size, total, free, utilization, dtype, device, quantization)}")
        return
    free = available_memory()
    if size + LOADING > free:
        smaller = ", a 16-bit --dtype" * (dtype.itemsize > 2 and quantization is None)
        smaller += ", --quantization int8 or int4" * (quantization is None)
        smaller += ", --quantization int4" * (quantization in ("int8", "int8-fast"))
        raise ModelLoadError(
            f"The weights of {path} take {gib(size)} as {quantization or str(dtype)[6:]}, and the processes "
            f"{gib(LOADING)} more while they load, but only {gib(free)} of memory are free. Use a smaller model"
            f"{smaller}, or a machine or container with more memory."
        )


def _share(
    quantization: Wanted | None, checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes per 2^20 numbers of a tensor. This is a lower bound: embeddings take more than what matrices become."""
    kind: Held | None
    if quantization == "stored":
        stored = checkpoint.own_kind(name) if device.type == "cpu" else checkpoint.kind_on_gpu(name)
        kind = (stored or "int8") if checkpoint.few_bits(name) else None
    else:
        kind = quantization
    return dtype.itemsize << 20 if kind is None else size_of(1, 1 << 20, kind)


def _instead(
    size: int,
    total: int,
    free: int,
    utilization: float,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Wanted | None,
) -> str:
    """Advice if a GPU has too little memory for weights of this many bytes."""
    others = "a smaller model"
    if quantization is None:
        others += ", a 16-bit --dtype" * (dtype.itemsize > 2) + ", smaller weights (--quantization int8 or int4)"
    if size > total:
        return f"That is more than all of it. Use {others}, a GPU with at least {gib(size / 0.8)}, or --device cpu."
    others += f" or {another_gpu(device)}"
    held = total - free
    if size <= total * utilization and held > 0:
        return f"Other processes have {gib(held)}{holders(device)}: end them, or use {others}."
    return f"Raise --gpu-memory-utilization, or use {others}."


def check_positions_fit(spec: ModelSpec, max_model_len: int) -> None:
    """Refuse a context whose position tables exceed the free memory; they are made on the CPU. Raises ModelLoadError:
    names --max-model-len."""
    parts = [part for stack in (spec.encoder, spec.decoder) if stack for part in stack.attentions]
    # Cosines, sines and angles of all features, in float32, or a bias for each head.
    widest = max((3 * part.turned if isinstance(part.position, Rotary) else part.heads for part in parts), default=0)
    size, free = max_model_len * widest * 4, available_memory()
    if size > free:
        raise ModelLoadError(
            f"The tables of {max_model_len} positions take {size} bytes, but only {free} bytes of memory are free. "
            f"Lower --max-model-len."
        )


def find_quantization(
    config: EngineConfig, path: Path, device: torch.device, scheme: Scheme | None = None
) -> Wanted | None:
    """The format that matrices are converted to. A CPU with Octavo's own kernels serves quantised weights in their
    stored format, a GPU that multiplies FP8 those that are stored as FP8. Raises ConfigError if this device does not
    support the format.

    Args:
        scheme: how the checkpoint stores quantised weights, which may name a format for serving; on a GPU without
            kernels for that, they become plain.
    """
    if config.quantization == "none":
        return None
    wanted: Wanted | None = config.quantization or (None if scheme is None else scheme.served_as)
    if wanted is None and device.type == "cpu" and native.available():
        wanted = "stored"
    if wanted is None and gpu.converts_float8(device) and gpu.serves(device):
        with Checkpoint(path, scheme) as checkpoint:
            kinds = {checkpoint.own_kind(name) for name in checkpoint.names if checkpoint.few_bits(name)}
        wanted = "stored" if kinds == {"e4m3"} else None
    if wanted == "stored":
        with Checkpoint(path, scheme) as checkpoint:
            if not checkpoint.has_few_bits:
                if config.quantization is not None:
                    message = "%s: --quantization stored has no effect, because the weights are not quantized."
                    logger.warning(message, checkpoint.path)
                return None
    if wanted is None or device.type == "cpu" or wanted in (*ON_GPUS, "stored"):
        return wanted
    obstacle = f"{wanted} works on CPUs only, GPUs support {' and '.join(ON_GPUS)}"
    if config.quantization is None:
        logger.info("Quantized weights are expanded while they load: %s", obstacle)
        return None
    raise ConfigError(
        f"quantization is {wanted}, but the device is {device}: {obstacle}. Use --device cpu, or --quantization none."
    )


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Turn missing memory and unreadable files into errors that say what to do. Raises ModelLoadError: instead of
    MemoryError, PermissionError, and torch's errors for missing memory."""
    try:
        yield
    except PermissionError as error:
        raise ModelLoadError(
            f"{error.filename} cannot be read: permission denied. Make it readable for the user that runs Octavo."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(
            f"There is not enough memory to load {model} ({str(error).strip() or type(error).__name__}). Use a "
            "smaller model, a 16-bit --dtype, a lower --max-model-len or --kv-cache-memory, or a machine or "
            "container with more memory."
        ) from error


def find_max_model_len(config: EngineConfig, hf_config: Any, spec: ModelSpec, own: int | None = None) -> int:
    """The maximum length of prompt plus answer, in tokens: as set, else what the model was made for. `own`: the longest
    input according to the model's own settings for embeddings, below its number of positions. Raises ConfigError:
    neither is known."""
    trained = context_length(hf_config, spec)
    encoder = spec.max_encoder_positions
    if config.max_model_len is None:
        known = [int(length) for length in (trained, None if spec.decoder and spec.encoder else own) if length]
        if not known:
            raise ConfigError(
                f"{config.model} does not define its context length (max_position_embeddings). Set --max-model-len."
            )
        return min(known)
    if encoder is not None and spec.max_positions is not None and config.max_model_len <= encoder:
        return min(config.max_model_len, spec.max_positions)
    if trained is not None and config.max_model_len > trained:
        logger.warning(
            "max_model_len is %d, but the model was trained with %d tokens: longer texts may get poor answers.",
            config.max_model_len,
            trained,
        )
    return config.max_model_len


def find_max_encoder_len(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> int:
    """The longest input of an encoder beside a decoder, in tokens: the number of its positions, or max_model_len if
    that is set and lower. If the encoder has no limit of its own, `max_model_len`, the result of `find_max_model_len`.
    """
    own = spec.max_encoder_positions
    if own is None:
        if spec.signal is not None and spec.signal.texts and spec.signal.positions > max_model_len:
            raise ConfigError(
                f"max_model_len is {max_model_len}, but an image has {spec.signal.positions} positions, which the "
                "encoder reads before the text. Raise --max-model-len."
            )
        return max_model_len
    return own if config.max_model_len is None else min(own, config.max_model_len)
